"""ZeRO-3: every rank has a shard of each parameter; modules gather the parameters that they need."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

import torch
from torch import nn

from zerosync_strategy.core.attached.stage import EngineParts, Stage
from zerosync_strategy.core.comm.nodes import MessageSizes, Topology
from zerosync_strategy.core.engine import (
    compilation,
    contract,
    deepspeed_internals,
    torch_internals,
    zero,
    zero3,
    zero3_optimizer,
)
from zerosync_strategy.core.engine.hooks import drop_functions
from zerosync_strategy.core.engine.parameter import CONTEXT, record_of
from zerosync_strategy.core.engine.patches import replaced
from zerosync_strategy.core.engine.transformers import nothing_is_sharded
from zerosync_strategy.core.engine.types import DeepSpeedEngine
from zerosync_strategy.core.failures.errors import RankError
from zerosync_strategy.core.failures.rank_state import Doing
from zerosync_strategy.core.gradients.reducer import FirstUses
from zerosync_strategy.core.gradients.stage3 import PerParamShards
from zerosync_strategy.core.gradients.window import WindowState
from zerosync_strategy.core.optimizer.edits import write_gathered_to_shards
from zerosync_strategy.core.optimizer.exchanged import ExchangedStepper
from zerosync_strategy.core.optimizer.masters import ShardMasters
from zerosync_strategy.core.optimizer.pending import PendingGradients
from zerosync_strategy.core.optimizer.probe import switches_weights
from zerosync_strategy.core.optimizer.stepper import Stepper, counts_by_tensor
from zerosync_strategy.core.options import ZeroSyncConfig
from zerosync_strategy.core.params.module_parameters import ModuleParameters
from zerosync_strategy.core.params.scheduler import GatherScheduler
from zerosync_strategy.core.params.state_entries import warn_of_what_is_left
from zerosync_strategy.core.report import size_text

_MODIFIED = "modified by an inplace operation"  # torch's error for a saved tensor
_BEGINS_INSIDE = (
    "If the program modified nothing: under ZeRO-3, this backward came to a unit by none of its outputs, but by what"
    " the module, a cache or a hook had kept, as no backward of the first steps did, and found the unit's parameters"
    " resharded. Hold the parameters (param_memory_budget='all'), or make units of the modules whose outputs are kept"
    " (unit_modules)."
)


class ShardedStage(Stage):
    """Stage 3: parameters sharded one by one, and gathered by units.

    All engines of a module share ``of_module``. ``is_constant`` returns whether no optimizer trains a parameter.

    Attributes:
        joint_step: steps all sub-groups with the last one; ``None``: each steps by itself.
        is_compiled: DeepCompile's graphs gather.
    """

    as_they_are = staticmethod(zero3.as_it_is)

    of_module: ModuleParameters
    scheduler: GatherScheduler

    def __init__(
        self, parts: EngineParts, shards: PerParamShards, whole: bool, sizes: MessageSizes, topology: Topology,
        is_constant: Callable[[nn.Parameter], bool],
    ) -> None:  # fmt: skip
        engine, config, reducer = parts.engine, parts.config, parts.reducer
        self._parts, self._optimizer = parts, engine.optimizer
        self.masters = ShardMasters(shards)
        # The stepper is made first: it may raise, before the module is changed.
        of_whole = (reducer, shards, self.masters, parts.edits.digest)
        self.stepper = ExchangedStepper(*of_whole) if whole else Stepper(shards, self.masters)
        if config.eager_frames:
            compilation.unwrap_compiled(engine)
        of_module = ModuleParameters.of(
            engine, config, shards.streams, sizes, topology, is_constant, parts.window
        )  # fmt: skip
        self.of_module, self.pending = of_module, PendingGradients(*parts.of_pending)
        self._trained = [param._zerosync_record for param in parts.reducer.params]
        self.scheduler, self.cache, self.units = of_module.scheduler, of_module.cache, of_module.units
        self.updating = self.cache.stepping
        self.is_compiled = False
        parts.window.begins = self.backward_begins
        self._count = of_module.scheduler.issuing.count
        self._count.counter.take()  # another engine of the module: what DeepSpeed has gathered to build this one
        self._count.counter = parts.counter
        self.joint_step = zero3_optimizer.JointStep(self._optimizer) if _needs_one_call(parts.engine) else None
        self._restore_buffers = zero3_optimizer.free_reduction_buffers(self._optimizer)

    @staticmethod
    def check_options(engine: DeepSpeedEngine, config: ZeroSyncConfig) -> None:
        """Raise ``ValueError`` if options, configuration and optimizer do not fit."""
        if (size := engine.zero_hpz_partition_size()) > 1 and config.parameters.node != 0:
            raise ValueError(
                f"ZeroSync option 'param_memory_budget' got {config.param_memory_budget!r}, and the configuration has"
                f" 'zero_optimization.zero_hpz_partition_size' = {size}, with which DeepSpeed keeps parameters by node"
                f" itself, and fills them anew in every step. Leave that out, and give node_size={size}."
            )
        stepping = zero.stepping_optimizer(engine)
        steps_from_disk = zero3_optimizer.steps_from_disk(engine.optimizer)
        if steps_from_disk and (_needs_one_call(engine) or switches_weights(stepping)):
            raise ValueError(
                f"attach() found the optimizer {type(stepping).__name__}, which may count its steps by group or"
                " exchange its weights by eval(), and 'offload_optimizer' on NVMe, from where DeepSpeed steps"
                ' sub-groups one at a time. Use {"device": "cpu"}, or AdamW.'
            )
        if config.eager_frames:
            contract.require(deepspeed_internals.UNSHARD_ON_READ, engine)  # before anything is interposed
            contract.require(torch_internals.COMPILATION)

    # ---- forwards and backwards ----------------------------------------------------------------------------------

    @contextmanager
    def forward(self) -> Iterator[None]:
        window, self._count.counter = self._parts.window, self._parts.counter
        window.forward_begins()
        if window.interrupted:  # ranks may stop at different places, so their gathers until then would differ
            window.interrupted = False
            self.of_module.recover()
        if window.state is WindowState.CLOSED:
            self.scheduler.streams.record_write()  # by calls of the program since the step
        self.of_module.forward_begins()
        apart = nullcontext() if torch.is_grad_enabled() else self._count.without_gradients()
        with self._parts.activity(Doing.FORWARD), self.scheduler.order.forward(), apart, self.backward():
            yield

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Around a backward or a forward; after an exception, what it has gathered is resharded."""
        try:
            yield
        except RankError:
            raise  # gathers in flight will not complete
        except BaseException as error:
            if torch._C._current_graph_task_id() == -1:  # else perhaps activation checkpointing that stops early
                self.of_module.recover()
            if isinstance(error, RuntimeError) and _MODIFIED in str(error):
                raise RuntimeError(f"{error}\n{_BEGINS_INSIDE}") from error
            raise

    def backward_begins(self, opens: bool) -> FirstUses | None:
        self.stepper.backward_begins(opens)
        self._count.counter = self._parts.counter
        self.scheduler.order.backward_begins()
        if self.is_compiled or self.cache.plan.holds_all:
            return None  # DeepCompile's graphs are the same on all ranks, and give every parameter a gradient
        return self.scheduler.order.first_uses

    # ---- the step ------------------------------------------------------------------------------------------------

    def pass_issued(self) -> None:
        self._count.counter = self._parts.counter
        self.scheduler.before_step()

    def before_update(self) -> None:
        self.adopt_edits()
        self.of_module.values.begin_step(self._trained)

    def after_update(self) -> None:
        self._parts.edits.stepped(zero3_optimizer.weights(self._optimizer))

    def release(self) -> None:
        """Reshard the optimizer's parameters, before a step or a checkpoint."""
        self.of_module.release(self._optimizer.module)

    # ---- weights -------------------------------------------------------------------------------------------------

    def written(self, by_step: bool) -> None:
        self.of_module.written(by_step)

    def version(self) -> int:
        return self.of_module.times_written

    def adopt_edits(self) -> None:
        self.scheduler.streams.record_write()
        write_gathered_to_shards(self._parts.reducer.params, self._parts.names)
        self._parts.edits.adopt(zero3_optimizer.weights(self._optimizer))

    def change_masters(self, change: Callable[[], None]) -> None:
        if any(record_of(param).bits & CONTEXT for param in self._parts.reducer.params):
            raise RuntimeError(
                "optimizer.train() or eval() was called inside of full_parameters() or GatheredParameters, whose end"
                " writes back what is gathered. Call it before or after the block."
            )
        self.adopt_edits()
        change()
        self.take_masters(())

    def take_masters(self, others: Iterable[nn.Parameter]) -> None:
        zero3_optimizer.take_all_master_weights(self._optimizer)
        zero3_optimizer.shards_written(param for param in others if zero3.is_sharded(param))
        self._parts.edits.stepped(zero3_optimizer.weights(self._optimizer))

    def before_save(self) -> None:
        self.scheduler.before_checkpoint()

    def release_held(self) -> None:
        self.cache.release_constants()

    def node_shards(self) -> list[torch.Tensor]:
        shards = self.cache.plan.node_shards
        return [] if shards is None else shards.all_values()

    # ---- other events, and the end -------------------------------------------------------------------------------

    def reading(self) -> AbstractContextManager[None]:
        return replaced(self._count, "counter", self._parts.counter)

    @contextmanager
    def gathered(self) -> Iterator[None]:
        with ExitStack() as stack:
            with self._parts.activity("gathered_for_inference()"), zero3.as_it_is():
                stack.enter_context(self.cache.gathered())
            stack.enter_context(nothing_is_sharded())
            yield

    def compiling(self) -> None:
        self.is_compiled = True
        if self.of_module.unshard_on_read is not None:
            self.of_module.unshard_on_read.prepare_deepcompile()

    def sends(self, nbytes: int) -> str:
        sent, budget = size_text(nbytes), self._parts.config.param_memory_budget
        if budget == "all":
            return f"{sent} of parameters once, holding them gathered until the step"
        units, gathered = self.units, ""
        if units.counts:
            kinds = ", ".join(f"{number} {name}" for name, number in units.counts.most_common(3))
            gathered = f", in units of up to {size_text(units.most_bytes)} ({kinds})"
        held = "none are held" if budget == 0 else f"those are held that fit into {budget!r}"
        return (
            f"{sent} of parameters for each time that all are gathered{gathered} (param_memory_budget: {held} until"
            " the step)"
        )

    def detach(self) -> None:
        self.of_module.detach(self._parts.window)

    def detached(self, destroyed: bool) -> None:
        if destroyed:
            drop_functions(self._parts.engine.module)
            warn_of_what_is_left(self._parts.engine.module)
        else:
            self._restore_buffers()


def _needs_one_call(engine: DeepSpeedEngine) -> bool:
    """Return whether one call of the torch optimizer must step all sub-groups, instead of one call each."""
    groups = zero3_optimizer.param_groups(engine.optimizer)
    return len(groups) > 1 and not counts_by_tensor(zero.stepping_optimizer(engine))
