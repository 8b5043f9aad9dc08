"""One engine while ZeroSync is attached to it: its mechanisms, and what its overridden methods do with them."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from zerosync_strategy.core.budgets.of_engine import automatic_budgets
from zerosync_strategy.core.checkpoints.loads import Source, verify
from zerosync_strategy.core.checkpoints.manifests import LATEST
from zerosync_strategy.core.checkpoints.saves import EngineSave, engine_save
from zerosync_strategy.core.checkpoints.together import together
from zerosync_strategy.core.coming_step import ComingStep
from zerosync_strategy.core.comm.collectives import share_timeout
from zerosync_strategy.core.comm.host_memory import keep_freed_memory
from zerosync_strategy.core.comm.messages import messages_of
from zerosync_strategy.core.comm.profile import phase
from zerosync_strategy.core.comm.traffic import EngineCounter
from zerosync_strategy.core.engine import (
    checkpoint_files,
    compilation,
    contract,
    fragments,
    patches,
    universal,
    zero,
    zero3,
    zero3_optimizer,
    zero12,
)
from zerosync_strategy.core.engine.cpu import leave_out_ranges
from zerosync_strategy.core.engine.interpose import interpose, restore
from zerosync_strategy.core.engine.outputs import allow_any_output
from zerosync_strategy.core.engine.overrides import EngineOverrides, Stage3Overrides, Stage12Overrides
from zerosync_strategy.core.engine.scalars import allow_scalars
from zerosync_strategy.core.engine.several import as_trained
from zerosync_strategy.core.engine.transformers import nothing_is_sharded
from zerosync_strategy.core.failures.checkpoint_errors import HALF_LOADED
from zerosync_strategy.core.failures.rank_status import RankError, rank_status
from zerosync_strategy.core.gradients.changes import LocalChanges
from zerosync_strategy.core.gradients.compiled import CompiledGradientHook
from zerosync_strategy.core.gradients.reducer import Pieces
from zerosync_strategy.core.gradients.stage3 import Stage3Reducer
from zerosync_strategy.core.gradients.stage12 import Stage12Reducer
from zerosync_strategy.core.gradients.window import Window, WindowState
from zerosync_strategy.core.meter import StepMeter
from zerosync_strategy.core.optimizer.frozen import FrozenParameters
from zerosync_strategy.core.optimizer.states import StripedStates
from zerosync_strategy.core.optimizer.stepping import can_step_by_part
from zerosync_strategy.core.optimizer.supported import listed
from zerosync_strategy.core.options.checks import check_backends, check_stage
from zerosync_strategy.core.options.config import ZeroSyncConfig
from zerosync_strategy.core.params.arriving import ArrivingParameters
from zerosync_strategy.core.params.averages import let_average
from zerosync_strategy.core.params.cache import ParameterCache
from zerosync_strategy.core.params.edits import (
    MasterWeights,
    Weights,
    restore_flat_parameters,
    weights_of_stage_1_2,
    write_gathered_to_shards,
)
from zerosync_strategy.core.params.export import export
from zerosync_strategy.core.params.full_weights import FullWeights
from zerosync_strategy.core.params.scheduler import GatherScheduler
from zerosync_strategy.core.params.unshard_on_read import UnshardOnRead
from zerosync_strategy.core.params.values import ParameterValues
from zerosync_strategy.core.progress import EngineProgress
from zerosync_strategy.core.race_check import CheckedEngine
from zerosync_strategy.core.required_gradients import RequiredGradients
from zerosync_strategy.version import __version__

_VERSION = "zerosync_version"  # of what saved a checkpoint
_COHORTS = "zerosync_cohorts"  # in a checkpoint, the state of FrozenParameters
_engines: weakref.WeakSet[AttachedEngine] = weakref.WeakSet()  # all that are attached in this process


class AttachedEngine:
    """The mechanisms of one attached engine.

    Implements :class:`~engine.overrides.EngineHooks`.

    Args:
        engine: the DeepSpeed engine, verified (C1).
        config: the options.

    Attributes:
        reducer, window, meter, traffic: of the gradients.
        coming: what a program does with them before the step.
        trained: the parameters of its optimizer.
        states: in which order the optimizer has its shards; ``None`` on stage 3.
        masters: what the optimizer steps.
        arriving: the parameters that are on their way, with ``overlap_gather``.
        frozen: which parameters are not stepped.
        cache, scheduler, values, unshard_on_read: of the parameters; ``None`` where the stage or the options need none.
        race_check: the engine's part in the check of this process.
        gradient_ready: the window's, without a step between unless gradients are noted down.

    Raises:
        ValueError: an option needs another stage, or a process group another backend.
    """

    def __init__(self, engine: Any, config: ZeroSyncConfig) -> None:
        self.engine = engine
        self.config = config
        optimizer = engine.optimizer
        is_stage_3 = zero.stage(engine) == 3
        check_stage(engine, config)
        if is_stage_3 and config.eager_frames:
            contract.require(contract.UNSHARD_ON_READ, engine)  # before anything is interposed
        check_backends(zero.process_groups(engine), engine.device)
        self._patch_process()
        if engine.device.type == "cpu":
            keep_freed_memory()
            leave_out_ranges()
        self._names = {param: name for name, param in engine.module.named_parameters()}
        messages = messages_of(zero.data_parallel_group(optimizer), engine.device)
        self.reducer = (Stage3Reducer if is_stage_3 else Stage12Reducer)(optimizer, config, self._names, messages)
        self.trained = frozenset(self.reducer.params)
        self.traffic = EngineCounter()
        self.frozen = FrozenParameters(
            lambda: zero.stepping_optimizer(engine), self.reducer.params, self._master_weights, self._states_made
        )
        self.states: StripedStates | None = None
        self.masters = MasterWeights(self.reducer.streams)
        self.arriving = ArrivingParameters(self.reducer.streams, self.activity) if config.overlap_gather else None
        if isinstance(self.reducer, Stage12Reducer):
            stepping = lambda: zero.stepping_optimizer(engine)  # noqa: E731
            self.states = StripedStates(optimizer, stepping, self.reducer.layouts)
        changes = LocalChanges(self.reducer.params, self._names)
        self.window = Window(
            self.reducer, config.overlap_last, self.traffic, self.activity, self._window_backward_begins, changes
        )
        self.coming = ComingStep(engine, self.reducer, self.window, changes, self.states, self.activity)
        self.gradient_ready: Callable[[Any], None] = self.window.gradient_ready
        self._required: RequiredGradients | None = None
        if zero.needs_every_gradient(engine):
            self._required = RequiredGradients(self.reducer.params, self._names, self.window.gradient_ready)
            self.gradient_ready = self._required.gradient_ready
        self.race_check = CheckedEngine(config.racecheck, self._device_changed)
        self.cache: ParameterCache | None = None
        self.scheduler: GatherScheduler | None = None
        self.values: ParameterValues | None = None
        self.unshard_on_read: UnshardOnRead | None = None
        self._restore_buffers: Callable[[], None] | None = None  # DeepSpeed's own, for reductions
        if is_stage_3:
            if config.eager_frames:
                compilation.unwrap_compiled(engine)  # which makes the modules' hooks anew
            self.scheduler = GatherScheduler.of(engine, self.reducer.streams, config.unshard_streams, messages)
            self.cache = ParameterCache.of(
                engine, config.held_bytes, config.host_bytes, config.auto_parameters, self.scheduler,
                config.eager_frames, _is_constant,
            )  # fmt: skip
            self.values = ParameterValues.of(engine, self.scheduler)
            if config.eager_frames:
                self.unshard_on_read = UnshardOnRead.of(engine, self.scheduler, self.values, config.trace_gathers)
            self.cache.skip_backward_hooks()
            self.reducer.first_uses = self._first_uses
            self.scheduler.in_backward.append(self.window.comes_to)
            self._restore_buffers = zero3_optimizer.free_reduction_buffers(optimizer)
        # DeepSpeed has left these out of what it reduces and steps, and nothing adds one later.
        self._untrained = [param for param in engine.module.parameters() if not param.requires_grad]
        self.meter = StepMeter(self.traffic, self.window, self.reducer, self.scheduler, self.cache)
        self.budgets = automatic_budgets(engine, config, self.reducer, self.scheduler, self.cache)
        self._compiled: CompiledGradientHook | None = None  # once DeepCompile compiles this engine
        self._times_written = 0  # parameters, by steps and checkpoints
        self._infers = False  # in gathered_for_inference()
        self._param_groups = len(zero.stepping_optimizer(engine).param_groups)
        self._postponing: list[str] = []  # DeepSpeed's contexts, entered and not left, in which no step is legal
        self._progress = EngineProgress(engine.module, self.meter, self.window, self.scheduler)
        self._rank_status = rank_status()
        groups = {layout.process_group for layout in self.reducer.layouts}
        share_timeout({zero.data_parallel_group(optimizer), *groups})
        self.traffic.start()
        self._layers = ((engine, EngineOverrides), (optimizer, Stage3Overrides if is_stage_3 else Stage12Overrides))
        for target, layer in self._layers:
            target._zerosync_hooks = self
            interpose(target, layer)
        fragments.intercept(self.reducer.params, self.coming)
        self.race_check.join()
        _engines.add(self)
        self._stop_counting = weakref.finalize(engine, self.traffic.stop)

    def _patch_process(self) -> None:
        """Replace what is replaced in the whole process, until the last engine is detached (C2)."""
        patches.hold(self.engine)
        allow_scalars()
        zero.count_parameters_quickly()
        if zero.stage(self.engine) == 3:
            allow_any_output()
            let_average()

    def detach(self) -> None:
        """Give the engine back as it was.

        Raises:
            RuntimeError: DeepCompile has compiled it.
        """
        if self._compiled is not None:
            raise RuntimeError(
                "detach() found an engine that DeepCompile has compiled; its graphs give their gradients to ZeroSync."
                " Leave it attached, or build the engine anew."
            )
        self._wait_for_parameters()
        self.in_stock_layout()
        self._detach()
        if self._restore_buffers is not None:
            self._restore_buffers()

    def _detach(self) -> None:
        _engines.discard(self)
        self.race_check.detach()
        self.coming.restore_clip_norm()
        self._stop_counting()
        if self.scheduler is not None:
            self.scheduler.in_backward.remove(self.window.comes_to)
        # The last that came goes first.
        for mechanism in (self.unshard_on_read, self.values, self.cache, self.scheduler):
            if mechanism is not None:
                mechanism.detach()
        fragments.release(self.reducer.params)
        for target, layer in self._layers:
            restore(target, layer)
            del target._zerosync_hooks, target._zerosync
        patches.release(self.engine)

    # ---- weights, for inference and export -----------------------------------------------------------------------

    @contextmanager
    def gathered_for_inference(self) -> Iterator[None]:
        """Around forwards without backwards; see :meth:`ZeroSync.gathered_for_inference`."""
        if self._infers:
            yield
            return
        self._infers = True
        try:
            if self.cache is None:
                yield
                return
            with ExitStack() as stack:
                with self.activity("gathered_for_inference()"), self._parameters_as_they_are():
                    stack.enter_context(self.cache.gathered())
                stack.enter_context(nothing_is_sharded())
                yield
        finally:
            self._infers = False

    def full_weights(self, module: torch.nn.Module | None, dtype: torch.dtype | None) -> FullWeights:
        """Return the full weights of ``module``, in the engine's; see :meth:`ZeroSync.full_weights`."""
        if module is None:
            module = self.engine.module
        elif all(each is not module for each in self.engine.module.modules()):
            raise ValueError(
                f"full_weights() and export() take a module= of the engine's {type(self.engine.module).__name__}, found"
                f" a {type(module).__name__} that is none. Give the engine's module or one in it."
            )
        if dtype is not None and not dtype.is_floating_point:
            raise ValueError(
                f"full_weights() and export() take a dtype= for floating-point weights, got {dtype}. Leave it out, or"
                " convert the tensors."
            )
        return FullWeights(module, self.scheduler, dtype, self._version, self.activity)

    def _version(self) -> int:
        """Return a number that grows whenever a step or a checkpoint changes the parameters."""
        self._wait_for_parameters()
        return self._times_written if self.values is None else self.values.steps

    def export(
        self, directory: Path, module: torch.nn.Module | None, dtype: torch.dtype | None, max_shard_bytes: int
    ) -> None:
        """Write the full weights of ``module``; see :meth:`ZeroSync.export`."""
        everyone = zero.data_parallel_group(self.engine.optimizer)
        weights = self.full_weights(module, dtype)
        if any(dist.get_world_size(group) < dist.get_world_size(everyone) for group in weights.process_groups):
            raise ValueError(
                "export() found parameters that shard_over() gives to groups of ranks: under one name, each group has"
                " another. Write what full_weights() yields on the first rank of each group."
            )
        with self.activity("export()"):
            export(weights, directory, max_shard_bytes, everyone, module or self.engine.module, dtype)

    def _refuse_in_inference(self, what: str) -> None:
        if self._infers:
            raise RuntimeError(
                f"{what} was called inside of gathered_for_inference(), which releases parameters at its end. Call it"
                " after the block."
            )

    # ---- what DeepSpeed's methods call ---------------------------------------------------------------------------

    @contextmanager
    def forward(self) -> Iterator[None]:
        if self.arriving is not None and self.arriving.is_waiting and compilation.is_compiled(self.engine.module):
            self.arriving.wait_for_all()  # graphs are guarded by the classes of parameters
        if self.window.state is WindowState.CLOSED:
            self._shards_written()  # by whatever the program has called since the step
        renewed = self.cache is not None and self.cache.renew_hooks()
        unsharding = nullcontext() if self.unshard_on_read is None else self.unshard_on_read.forward(self._keeps)
        ordering = nullcontext() if self.scheduler is None else self.scheduler.order.forward()
        with self.activity("the forward"), ordering, unsharding:
            if renewed and self.cache is not None:
                self.cache.skip_backward_hooks()
            yield

    @contextmanager
    def backward(self, is_boundary: bool) -> Iterator[None]:
        if is_boundary:
            self.window.expect_last()
        try:
            with self.activity("the backward"), self.window.engine_backward():
                yield
        except RankError:
            raise  # what is in flight will not arrive
        except BaseException:
            if self.unshard_on_read is not None:
                self.unshard_on_read.release(self._keeps)
            raise

    def backward_begins(self) -> None:
        self._refuse_in_inference("backward()")
        if self._required is not None and self.window.state is WindowState.CLOSED:
            self._required.forget()  # what a dropped window had
        with self._parameters_as_they_are():
            if thawed := [param for param in self._untrained if param.requires_grad]:
                self._check_trained(thawed)
            if self.cache is not None:
                self.cache.backward_begins()
            trains = any(param.requires_grad for param in self.reducer.params)
        if self.budgets is not None:
            self.budgets.sample()  # a forward has left its activations
        if trains:  # else the loss only passes through
            self.window.enter_graph()

    def _window_backward_begins(self, opens: bool) -> None:
        self.frozen.backward_begins(opens)
        if self.scheduler is not None:
            self.scheduler.order.backward_begins()

    def _first_uses(self) -> Mapping[int, int] | None:
        """Return when the forward has used each parameter first, where the backward gathers some between others."""
        if self._compiled is not None or self.cache is None or self.cache.holds_all or self.scheduler is None:
            return None  # DeepCompile's graphs are the same on all ranks, and give every parameter a gradient
        return self.scheduler.order.first_uses()

    def zero_grad(self) -> None:
        self.coming.dropped()
        self.frozen.forget()
        if self._required is not None:
            self._required.forget()
        self.window.zero_grad()

    @contextmanager
    def postponing_step(self, context: str) -> Iterator[None]:
        self._postponing.append(context)
        try:
            yield
        finally:
            self._postponing.pop()

    def check_step(self) -> None:
        self._refuse_in_inference("engine.step()")
        if self._postponing:
            raise RuntimeError(
                f"engine.step() was called inside of engine.{self._postponing[-1]}, whose block is there to postpone"
                " the reduction. Call it after the block, or leave the block out: gradients are reduced once per step"
                " in any case."
            )
        if len(zero.stepping_optimizer(self.engine).param_groups) != self._param_groups:
            self.refuse_param_group()

    def end_engine_step(self) -> None:
        self.window.end_engine_step()

    def refuse_param_group(self) -> None:
        raise ValueError(
            "add_param_group() was called on the optimizer of a DeepSpeed engine, which lays out what it trains when it"
            " is built: the added parameters would never be stepped. Give the optimizer all parameters before that, in"
            " as many groups as will need options of their own, and freeze after it those that are to train later. (In"
            " Lightning, a BaseFinetuning callback may freeze them before.)"
        )

    @contextmanager
    def step(self) -> Iterator[None]:
        with self.activity("the optimizer step"), self._parameters_as_they_are():
            self._wait_for_parameters()
            if self._required is not None and self.window.state is not WindowState.CLOSED:
                self._required.check()
            with self.activity("the reduction"):
                if self.scheduler is not None:
                    self.scheduler.before_step()
                self.window.begin_step()
            if self.budgets is not None:
                self.budgets.step_begins()
            if self.states is not None:
                self.states.to_stripes()
            self._adopt_edits()
            if self.values is not None:
                self.values.begin_step(self.trained)
            try:
                releasing = nullcontext() if self.cache is None else self.cache.stepping()
                with phase("step"), releasing, self.frozen.stepping(self._pieces()):
                    yield
            except BaseException as error:
                self.race_check.leave(f"step() raised {type(error).__name__}")
                raise
            finally:
                self.coming.restore_clip_norm()
                self._parameters_written()
            if self.states is not None:
                self.states.check()
            if self.arriving is not None:
                self.arriving.begin()
            else:
                self.masters.stepped(self._weights())
            self.meter.step_done(None if self.budgets is None else self.budgets.choice)
            if self.budgets is not None:
                self.budgets.end_window()
            self.race_check.stepped()

    def gather_parameters(self) -> AbstractContextManager[None]:
        reducer = self.reducer
        assert isinstance(reducer, Stage12Reducer)
        overlap = None if self.arriving is None else self.arriving.launched
        return zero12.parameter_gather(self.engine.optimizer, lambda: reducer.gather_parameters(overlap))

    def release_parameters(self) -> bool:
        return self.cache is not None and self.cache.release_for_step()

    def norm(self, stock: Callable[[], Any]) -> torch.Tensor:
        if self.reducer.norm is None:
            self.reducer.norm = self.reducer.combine_norms(stock)
        return self.reducer.norm

    @contextmanager
    def saving(self, path: Any, tag: str, save_latest: bool) -> Iterator[bool]:
        if self.engine.global_rank == 0:
            self.window.warn_if_open("save_checkpoint() was called")
        if self.scheduler is not None:
            self.scheduler.before_checkpoint()
        self._wait_for_parameters()
        with self._parameters_as_they_are():
            self._adopt_edits()  # a resumed run starts from the master weights
        steps, checksums = self.engine.global_steps, self.config.checkpoint_checksums
        save = EngineSave(Path(path), tag, steps, checksums, save_latest)
        verifiable = checkpoint_files.writes_at_once(self.engine)
        with self._checkpointing(save.what), engine_save(save, verifiable):
            if not verifiable:
                yield save_latest
                return
            with checkpoint_files.writing(self.engine, save.writing):
                yield False  # the save does, when all is written

    @contextmanager
    def loading(self, path: Any, tag: Any, optimizer_states: bool, module_only: bool) -> Iterator[str | None]:
        is_universal, is_stage_3 = universal.loads_universal(self.engine), self.scheduler is not None
        if is_universal and self._shards_over_groups:
            raise ValueError(
                "load_checkpoint() was to load a universal checkpoint into parameters that shard_over() gives to"
                " groups of ranks. Under one name it holds one parameter, of no group. Load the checkpoint that"
                " save_checkpoint() wrote, on as many ranks."
            )
        weights_in_shards = is_stage_3 and not module_only
        source = Source(
            Path(path), None if tag is None else str(tag), self.config.checkpoint_checksums,
            shards=optimizer_states or weights_in_shards,
            same_ranks=optimizer_states,
            latest=universal.LATEST if is_universal else LATEST,
            weights_of_latest=weights_in_shards and not optimizer_states and not is_universal,
            files=lambda directory, tag: checkpoint_files.files_to_load(self.engine, directory, tag, optimizer_states),
        )  # fmt: skip
        what = f"read the checkpoint in {path}"
        with self.activity(f"the attempt to {what}"):
            tag = verify(source)
        # Gradients of the parameters that are about to be replaced mean nothing for the new ones.
        self.window.abort("load_checkpoint() was called")
        failed: list[Exception] = []
        try:
            with self._checkpointing(what):
                yield tag
        except RankError:
            raise
        except Exception as error:
            failed.append(error)
        finally:
            self._parameters_written()
            if self.cache is not None and self.cache.host is not None:
                self.cache.host.expire()

        def loaded() -> tuple[str, None]:
            for error in failed:
                raise error
            return f"step {self.engine.global_steps}", None

        with self.activity(f"the attempt to {what}"):
            together(what, loaded, lambda: HALF_LOADED)

    def fragments_linked(self) -> None:
        fragments.intercept(self.reducer.params, self.coming)

    def in_stock_layout(self) -> None:
        self._wait_for_parameters()
        if self.states is not None:
            self.states.to_stock()

    def restoring(self, model_file: str, strict: bool, optimizer_state: bool) -> None:
        if universal.loads_universal(self.engine):
            trained = [param for engine in _engines for param in engine.reducer.params]
            universal.restore_rest(self.engine, trained, model_file, strict, optimizer_state)

    def client_state(self) -> dict[str, Any]:
        cohorts = self.frozen.state(self._names, zero.data_parallel_group(self.engine.optimizer))
        return {_VERSION: __version__} | ({_COHORTS: cohorts} if cohorts else {})

    def loaded(self, client_state: dict[str, Any], optimizer_states: bool) -> None:
        client_state.pop(_VERSION, None)
        cohorts = client_state.pop(_COHORTS, [])
        if optimizer_states:
            self.frozen.load(cohorts, self._names)

    def nothing_loaded(self, path: Any) -> None:
        if self.engine.global_rank == 0:
            warnings.warn(
                f"load_checkpoint() loaded nothing and returned (None, None): there is no file 'latest' in {path}. Give"
                " the directory that save_checkpoint() was called with, or a tag=.",
                stacklevel=4,
            )

    @contextmanager
    def _checkpointing(self, what: str) -> Iterator[None]:
        # What is trained is saved and loaded with the optimizer, whether it is frozen at the moment or not.
        with self.activity(f"the attempt to {what}"), as_trained(self.reducer.params):
            self.in_stock_layout()
            with self._parameters_as_they_are():
                if self.cache is not None:
                    self.cache.release_kept()
                yield

    def check_gradients(self, function: str) -> None:
        self.coming.check_gradients(function)

    def check_full_state_dict(self) -> None:
        if self._shards_over_groups:
            raise ValueError(
                "DeepSpeed collects a full state_dict on rank 0, which lacks the parameters that other groups of ranks"
                " shard by shard_over(). Use full_state() of the handle that attach() returned: each group's first"
                " rank has the group's."
            )

    def compiling(self) -> AbstractContextManager[None]:
        if self._required is not None:
            raise ValueError(
                "DeepCompile's graphs give every parameter a gradient, used or not, so that"
                " 'zero_optimization.ignore_unused_parameters' = false cannot be kept. Leave it out."
            )
        CompiledGradientHook.verify(self.config, self._shards_over_groups, self.race_check.is_checked)
        if self.unshard_on_read is not None:
            self.unshard_on_read.prepare_deepcompile()
        self.meter.counts_gathers = self.cache is None
        optimizer, window = self.engine.optimizer, self.window
        params = {compilation.deepcompile_id(optimizer, param): param for param in self.reducer.params}
        self._compiled = CompiledGradientHook(params, window.add_gradient, window.gradient_ready)
        return self._compiled.compiling()

    def destroyed(self) -> None:
        self.window.abort("the engine was destroyed")
        if self._compiled is not None:
            self._compiled.detach()
        self._wait_for_parameters()
        self._detach()

    # ---- helpers -------------------------------------------------------------------------------------------------

    def _wait_for_parameters(self) -> None:
        """Before DeepSpeed reads or writes parameters that are on their way (U5)."""
        if self.arriving is not None:
            self.arriving.wait_for_all()

    def _parameters_as_they_are(self) -> AbstractContextManager[None]:
        """Around DeepSpeed's own work on sharded parameters."""
        return nullcontext() if self.values is None else zero3.as_it_is()

    def _parameters_written(self) -> None:
        self._times_written += 1
        self._shards_written()
        if self.values is not None:
            self.values.stepped()

    def _shards_written(self) -> None:
        if self.scheduler is not None:
            self.scheduler.shards_written()

    def _adopt_edits(self) -> None:
        """Let a step or a checkpoint start from the parameters as the program has left them (N1)."""
        self._shards_written()
        reducer = self.reducer
        if isinstance(reducer, Stage12Reducer):
            restore_flat_parameters(self.engine.optimizer, reducer.groups, self._names)
        else:
            write_gathered_to_shards(reducer.params, self._names)
        self.masters.adopt(self._weights())

    def _weights(self) -> Iterator[Weights]:
        reducer = self.reducer
        if isinstance(reducer, Stage12Reducer) and self.states is not None:
            own = map(self.states.own, reducer.layouts)
            return weights_of_stage_1_2(self.engine.optimizer, zip(reducer.groups, own, strict=True))
        return zero3_optimizer.weights(self.engine.optimizer)

    def _master_weights(self) -> list[zero.MasterWeights]:
        if self.states is not None:
            return self.states.master_weights()
        return zero3_optimizer.master_weights(self.engine.optimizer)

    def _pieces(self) -> Pieces | None:
        """Return the pieces in which the coming step is to be made; ``None``: at once, and parameters follow it."""
        optimizer, reducer = self.engine.optimizer, self.reducer
        if zero.offloads(optimizer) or not can_step_by_part(zero.stepping_optimizer(self.engine)):
            return None
        pieces = reducer.pieces()
        return pieces if any(len(of_master) > 1 for _, of_master in pieces) else None

    def _states_made(self) -> None:
        if self.states is not None:
            zero12.link_states_anew(self.engine.optimizer)

    def _check_trained(self, thawed: list[Any]) -> None:
        """Raise where a parameter that was frozen when the engine was built is to be trained now (N1)."""
        trained = {id(param) for engine in _engines for param in engine.reducer.params}
        names = [repr(self._names[param]) for param in thawed if id(param) not in trained]
        if names:
            raise RuntimeError(
                f"backward() found that {listed(names)} required no gradient when the DeepSpeed engine was"
                " built and requires one now. ZeRO would never train it. Let it require a gradient while the engine is"
                " built and freeze it afterwards, or build the engine anew when it is thawed; a parameter that is not"
                " to be trained must stay frozen."
            )

    @property
    def _shards_over_groups(self) -> bool:
        return isinstance(self.reducer, Stage3Reducer) and self.reducer.over_groups

    def _keeps(self, param: Any) -> bool:
        return self.cache is not None and self.cache.holds(param)

    def activity(self, what: str) -> AbstractContextManager[None]:
        """Around what may communicate (W4)."""
        return self._rank_status.activity(what, self._position, self._progress)

    def _position(self) -> str:
        return f"{self.meter.steps} optimizer step(s) done, {self.window.backwards} backward(s) since"

    def _device_changed(self) -> None:
        zero.renew_streams(self.engine)
        self._wait_for_parameters()
        self.reducer.streams.renew()
        if self.arriving is not None:
            self.arriving.renew_stream()
        if self.scheduler is not None:
            self.scheduler.renew_streams()


def _is_constant(param: Any) -> bool:
    """Return whether no optimizer step changes ``param``."""
    return not param.requires_grad and not any(param in engine.trained for engine in _engines)
