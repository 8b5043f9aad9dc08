"""An attached engine of ZeRO-3: what gathers, holds and unshards its parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch

from zerosync_strategy.core.attached.engine import AttachedEngine
from zerosync_strategy.core.attached.meter import Stage3Meter
from zerosync_strategy.core.budgets.automatic import automatic_budgets
from zerosync_strategy.core.engine import contract, zero, zero3, zero3_optimizer
from zerosync_strategy.core.engine.module_hooks import drop_functions
from zerosync_strategy.core.engine.parameter import Claim, record_of
from zerosync_strategy.core.engine.transformers import nothing_is_sharded
from zerosync_strategy.core.failures.doing import Doing
from zerosync_strategy.core.failures.errors import RankError
from zerosync_strategy.core.gradients.stage3 import Stage3Reducer
from zerosync_strategy.core.gradients.window import WindowState
from zerosync_strategy.core.optimizer.pending import PendingGradients
from zerosync_strategy.core.optimizer.probe import switches_weights
from zerosync_strategy.core.optimizer.stepper import counts_by_tensor
from zerosync_strategy.core.options.config import ZeroSyncConfig
from zerosync_strategy.core.params.edits import write_gathered_to_shards
from zerosync_strategy.core.params.full_parameters import let_average
from zerosync_strategy.core.params.of_module import ModuleParameters
from zerosync_strategy.core.params.scheduler import GatherScheduler
from zerosync_strategy.core.params.state_entries import warn_of_what_is_left
from zerosync_strategy.core.report import size_text

_MODIFIED = "modified by an inplace operation"  # torch, of what autograd has saved
_BEGINS_INSIDE = (
    "If nothing was: under ZeRO-3, a backward also meets this that begins inside of a unit, with a loss of what a hook"
    " has caught there or the module has kept, and not with what the unit returns: its parameters are not gathered."
    " Choose smaller units (unit_modules), or hold the parameters (param_memory_budget='all')."
)


class Stage3Engine(AttachedEngine):
    """The parts that only stage 3 has. ``unshard_on_read`` is ``None`` without ``eager_frames``."""

    reducer_class = Stage3Reducer
    reducer: Stage3Reducer
    meter: Stage3Meter
    scheduler: GatherScheduler

    def __init__(self, engine: Any, config: ZeroSyncConfig) -> None:
        super().__init__(engine, config)
        self._parameters = ModuleParameters.of(
            engine, config, self.reducer.streams, self.messages, self.topology, _is_constant
        )
        self.scheduler, self.cache, self.hooks = (
            self._parameters.scheduler, self._parameters.cache, self._parameters.hooks
        )  # fmt: skip
        self.values = self._parameters.values
        self.unshard_on_read = self._parameters.unshard_on_read if config.eager_frames else None
        self.reducer.first_uses = self._first_uses
        self.scheduler.in_backward.append(self.window.comes_to)
        self.scheduler.issuing.begun.append(self.reducer.pipeline.begun)
        self.scheduler.issuing.count.counters.append(self.traffic)
        self._joint_step = _joint_step(engine)
        self._restore_buffers = zero3_optimizer.free_reduction_buffers(engine.optimizer)
        self.pending = PendingGradients(engine, self.reducer, self.window, self.activity, self.traffic.apart)
        self.meter = Stage3Meter(engine.module, self.traffic, self.window, self.reducer, self.scheduler, self.cache)
        self.budgets = automatic_budgets(engine, config, self.reducer, (self.scheduler, self.cache))

    @classmethod
    def check_options(cls, engine: Any, config: ZeroSyncConfig) -> None:
        super().check_options(engine, config)
        if config.overlap_gather:
            raise ValueError(
                "ZeroSync option 'overlap_gather' is for the gather after a step of ZeRO stages 1 and 2, found stage 3,"
                " which gathers parameters when modules need them. Leave it out."
            )
        if (size := engine.zero_hpz_partition_size()) > 1 and config.parameters.node != 0:
            raise ValueError(
                f"ZeroSync option 'param_memory_budget' got {config.param_memory_budget!r}, and the configuration has"
                f" 'zero_optimization.zero_hpz_partition_size' = {size}, with which DeepSpeed keeps parameters by node"
                f" itself, and fills them anew in every step. Leave that out, and give node_size={size}."
            )
        _check_calls(engine)
        if config.eager_frames:
            contract.require(contract.UNSHARD_ON_READ, engine)  # before anything is interposed

    def _patch_process(self) -> None:
        super()._patch_process()
        let_average()

    def node_shards(self) -> list[torch.Tensor]:
        shards = self.cache.plan.node_shards
        return super().node_shards() + ([] if shards is None else shards.all_values())

    def detach(self) -> None:
        super().detach()
        self._restore_buffers()

    def destroyed(self) -> None:
        super().destroyed()
        drop_functions(self.engine.module)
        warn_of_what_is_left(self.engine.module)

    def _detach_parameters(self) -> None:
        self.scheduler.in_backward.remove(self.window.comes_to)
        self.scheduler.issuing.begun.remove(self.reducer.pipeline.begun)
        self.scheduler.issuing.count.counters.remove(self.traffic)
        self._parameters.detach()

    def parameters_as_they_are(self) -> AbstractContextManager[None]:
        return zero3.as_it_is()

    def parameters_written(self, by_step: bool) -> None:
        self._parameters.written(by_step)

    def adopt_edits(self) -> None:
        self.scheduler.shards_written()
        write_gathered_to_shards(self.reducer.params, self.names)
        self.masters.adopt(zero3_optimizer.weights(self.engine.optimizer))

    def change_masters(self, change: Callable[[], None]) -> None:
        optimizer, trained = self.engine.optimizer, self.reducer.params
        if any(record_of(param).claims & Claim.CONTEXT for param in trained):
            raise RuntimeError(
                "optimizer.train() or eval() was called inside of full_parameters() or GatheredParameters, whose end"
                " writes back what is gathered. Call it before or after the block."
            )
        self.adopt_edits()
        self.stepper.change(change)
        zero3_optimizer.take_all_master_weights(optimizer)
        self.masters.stepped(zero3_optimizer.weights(optimizer))

    def step_jointly(self, index: int) -> bool:
        """Step sub-group ``index`` with all others, when the last is ready; ``False``: it is to step by itself."""
        if self._joint_step is None:
            return False
        self._joint_step.ready(index)
        return True

    def _sends_parameters(self) -> str:
        nbytes, budget = size_text(self.meter.all_parameters_bytes), self.config.param_memory_budget
        if budget == "all":
            return f"{nbytes} of parameters once, holding them gathered until the step"
        units, gathered = self._parameters.units, ""
        if units.counts:
            kinds = ", ".join(f"{number} {name}" for name, number in units.counts.most_common(3))
            gathered = f", in units of up to {size_text(units.most_bytes)} ({kinds})"
        held = "none are held" if budget == 0 else f"those are held that fit into {budget!r}"
        return (
            f"{nbytes} of parameters for each time that all are gathered{gathered} (param_memory_budget: {held} until"
            " the step)"
        )

    def version(self) -> int:
        return self._parameters.times_written

    @property
    def shards_over_groups(self) -> bool:
        return self.reducer.over_groups

    @contextmanager
    def forward(self) -> Iterator[None]:
        self.window.forward_begins()
        if self.window.interrupted:  # at another place on each rank: they would compare the modules until there
            self.window.interrupted = False
            self._parameters.recover()
        if self.window.state is WindowState.CLOSED:
            self.scheduler.shards_written()  # by whatever the program has called since the step
        self._parameters.forward_begins()
        apart = nullcontext() if torch.is_grad_enabled() else self.scheduler.issuing.count.without_gradients()
        with self.activity(Doing.FORWARD), self.scheduler.order.forward(), apart, self._recovering():
            yield

    @contextmanager
    def backward(self, is_boundary: bool) -> Iterator[None]:
        with self._recovering(), super().backward(is_boundary):
            yield

    @contextmanager
    def _recovering(self) -> Iterator[None]:
        """Around a forward or a backward. An exception releases what it has gathered."""
        try:
            yield
        except RankError:
            raise  # what is in flight will not arrive
        except BaseException as error:
            if torch._C._current_graph_task_id() == -1:  # else perhaps a checkpoint that has repeated what it needs
                self._parameters.recover()
            if isinstance(error, RuntimeError) and _MODIFIED in str(error):
                raise RuntimeError(f"{error}\n{_BEGINS_INSIDE}") from error
            raise

    def _trains(self) -> bool:
        with zero3.as_it_is():
            trains = super()._trains()
            self.cache.backward_begins()
        return trains

    def _window_backward_begins(self, opens: bool) -> None:
        super()._window_backward_begins(opens)
        self.scheduler.order.backward_begins()

    def _first_uses(self) -> Mapping[int, int] | None:
        """Return when the forward has used each parameter first, where the backward gathers some between others."""
        if self._compiled is not None or self.cache.plan.holds_all:
            return None  # DeepCompile's graphs are the same on all ranks, and give every parameter a gradient
        return self.scheduler.order.first_uses()

    def _before_reduction(self) -> None:
        self.scheduler.before_step()

    def _before_update(self) -> None:
        self.adopt_edits()
        self.values.begin_step(self.trained)

    def _updating(self) -> AbstractContextManager[None]:
        return self.cache.stepping()

    def release_parameters(self) -> None:
        """Release the optimizer's parameters, before a step or a checkpoint."""
        self._parameters.release(self.engine.optimizer.module)

    def _after_update(self) -> None:
        self.masters.stepped(zero3_optimizer.weights(self.engine.optimizer))

    def before_save(self) -> None:
        self.scheduler.before_checkpoint()

    def release_held(self) -> None:
        self.cache.release_constants()

    @contextmanager
    def _gathered(self) -> Iterator[None]:
        with ExitStack() as stack:
            with self.activity("gathered_for_inference()"), zero3.as_it_is():
                stack.enter_context(self.cache.gathered())
            stack.enter_context(nothing_is_sharded())
            yield

    def compiling(self) -> AbstractContextManager[None]:
        compiling = super().compiling()
        if self.unshard_on_read is not None:
            self.unshard_on_read.prepare_deepcompile()
        self.meter.counts_gathers = False
        return compiling


def _joint_step(engine: Any) -> zero3_optimizer.JointStep | None:
    """Return what steps all sub-groups at once; ``None``: one call for each is as good."""
    return zero3_optimizer.JointStep(engine.optimizer) if _needs_one_call(engine) else None


def _needs_one_call(engine: Any) -> bool:
    optimizer, stepping = engine.optimizer, zero.stepping_optimizer(engine)
    return not counts_by_tensor(stepping) and len(zero3_optimizer.param_groups(optimizer)) > 1


def _check_calls(engine: Any) -> None:
    """Raise where the torch optimizer is to be called with all master weights, which are on disk."""
    stepping = zero.stepping_optimizer(engine)
    if zero3_optimizer.steps_from_disk(engine.optimizer) and (_needs_one_call(engine) or switches_weights(stepping)):
        raise ValueError(
            f"attach() found the optimizer {type(stepping).__name__}, which may count its steps by group or exchange"
            " its weights by eval(), and 'offload_optimizer' on NVMe, from where DeepSpeed steps sub-groups one at a"
            ' time. Use {"device": "cpu"}, or AdamW.'
        )


def _is_constant(param: Any) -> bool:
    """Return whether no optimizer step changes ``param``."""
    return not param.requires_grad and not any(param in attached.trained for attached in AttachedEngine.all)
