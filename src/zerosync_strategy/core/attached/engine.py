"""An attached engine: its parts, and what DeepSpeed's overridden methods do with them.

The timeline of a step. All ranks send the same at each point:

==============  ============================  ==============================  =====================================
when            function                      gradients                       sent
==============  ============================  ==============================  =====================================
backward, step  ``ReductionPipeline.launch``  local, on the parameters        the reductions
issued          ``Stage.pass_issued``         on their way into the shards    comparisons of what ranks have gathered
reduced         ``StepObserver.reduced``      averages, in the shards         what observers sum
norm            ``Norm.begin``                averages, in the shards         one sum, again if they are changed
the program     ``PendingGradients``          read and changed                as it asks, if it reduces before a step
before update   ``Stage.before_update``       not read: perhaps on their way  states that a checkpoint has moved
update          ``Stepper.stepping``          clipped, then used up           on stages 1 and 2 the parameters
after update    ``Stage.after_update``        none                            running statistics
report          ``StepMeter.step_done``       none                            how much automatic budgets hold, once
==============  ============================  ==============================  =====================================
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Set
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn

from zerosync_strategy.core.attached.budgets import automatic_budgets, bounded, check_limit
from zerosync_strategy.core.attached.flat import FlatStage
from zerosync_strategy.core.attached.guards import Guards
from zerosync_strategy.core.attached.meter import PrintedReports, StepMeter, label_of
from zerosync_strategy.core.attached.sharded import ShardedStage
from zerosync_strategy.core.attached.stage import EngineParts, Stage
from zerosync_strategy.core.attached.statistics import RunningStatistics
from zerosync_strategy.core.checkpoints import background
from zerosync_strategy.core.checkpoints.background import StagingMemory, wait_for_save
from zerosync_strategy.core.comm.collectives import is_native, share_timeout
from zerosync_strategy.core.comm.journal import SentCounter, phase
from zerosync_strategy.core.comm.nodes import Topology, message_sizes
from zerosync_strategy.core.engine import compilation, engine_state, param_functions, patches, zero
from zerosync_strategy.core.engine.compat import allow_any_model, leave_out_ranges
from zerosync_strategy.core.engine.patches import interpose, replaced, restore
from zerosync_strategy.core.engine.types import DeepSpeedEngine
from zerosync_strategy.core.failures.misused_gradients import LocalChanges
from zerosync_strategy.core.failures.rank_state import Doing
from zerosync_strategy.core.failures.rank_status import Activity, rank_status
from zerosync_strategy.core.gradients.compiled import CompiledGradients
from zerosync_strategy.core.gradients.counts import LastBackward
from zerosync_strategy.core.gradients.reducer import Reducer
from zerosync_strategy.core.gradients.stage3 import PerParamShards
from zerosync_strategy.core.gradients.stage12 import FlatShards
from zerosync_strategy.core.gradients.unit_norms import UnitNorms
from zerosync_strategy.core.gradients.window import Window, WindowState
from zerosync_strategy.core.optimizer.edits import MasterWeights, guard_states, unguard_states
from zerosync_strategy.core.optimizer.whole import StatesByName, WholeStepper
from zerosync_strategy.core.options import ZeroSyncConfig
from zerosync_strategy.core.params.module_parameters import let_average
from zerosync_strategy.core.report import size_text

_numbers = itertools.count()


class AttachedEngine:
    """The parts of one attached engine, and what its overridden methods (``overrides.py``) do with them.

    Raises ``ValueError`` if an option needs another stage, or a process group another backend.

    Args:
        whole: the optimizer needs whole parameters, so each has an owner, the rank that steps it.

    Attributes:
        all: the attached engines of this process; ``number`` grows in the order in which they were attached.
        parts: the parts that all others use.
        stage: what the ZeRO stage does with parameters; it has ``masters``, ``stepper`` and ``pending``.
        by_name: saves and loads the optimizer's states by name; ``None``: they are by element.
        guards: raise on illegal calls.
        meter: measures each step, and adjusts automatic budgets.
    """

    all: ClassVar[weakref.WeakSet[AttachedEngine]] = weakref.WeakSet()

    def __init__(self, engine: DeepSpeedEngine, config: ZeroSyncConfig, whole: bool) -> None:
        # 1. Checks that may raise, on all ranks, before anything is changed.
        _check_options(engine, config, whole)
        reports = PrintedReports(config.report_every, config.report_file)
        # 2. The process: its patches, until the last engine is detached.
        self.number = next(_numbers)
        _patch_process(engine)
        self._rank_status = rank_status()
        # 3. Communication: sizes of messages, nodes, and the count of bytes.
        group = zero.data_parallel_group(engine.optimizer)
        config = bounded(engine, config, dist.get_world_size(group))
        sizes, topology = message_sizes(group, engine.device), Topology(config.node_size, group)
        counter = SentCounter(topology.between)
        # 4. Gradients: shards, reduction, window.
        names = {param: name for name, param in engine.module.named_parameters()}
        of_stage: Any = PerParamShards if zero.stage(engine) == 3 else FlatShards
        shards = of_stage(engine, config, topology, counter, whole)
        observers = [UnitNorms(shards, names)] if config.unit_norms else []  # may raise: before the module is changed
        reducer = Reducer(shards, config, names, sizes, observers)
        changes = LocalChanges(reducer.params, names)
        last = LastBackward(config.overlap_last, engine.gradient_accumulation_steps())
        if not shards.computes_norm and zero.stage(engine) < 3:
            last.expect_none()  # where DeepSpeed computes no norm, the host waits for nothing
        window = Window(reducer, last, self.activity, changes)
        compilation.keep_out_of_graphs(window.added)
        # 5. Parameters: the stage, with master weights and stepper.
        self.parts = parts = EngineParts(
            engine, config, names, reducer, window, MasterWeights(shards.streams),
            RunningStatistics.of(engine.module, group, counter), counter,
            StagingMemory() if config.checkpoint_background else None, self.activity, self.apart,
        )  # fmt: skip
        self.stage: Stage
        if isinstance(shards, PerParamShards):
            self.stage = ShardedStage(parts, shards, whole, sizes, topology, _is_constant)
        else:
            self.stage = FlatStage(parts, shards, whole)
        # 6. Budgets, reports and guards, which read all of these.
        stepper, of_module = self.stage.stepper, self.stage.of_module
        self.by_name = StatesByName(engine, stepper, names) if isinstance(stepper, WholeStepper) else None
        budgets = automatic_budgets(engine, config, reducer, of_module)
        self.meter = StepMeter(parts, of_module, budgets)
        self._printed = reports if reports.every and dist.get_rank() == 0 else None
        self.guards = Guards(parts)
        self._compiled: CompiledGradients | None = None  # set when DeepCompile compiles this engine
        self._undo = ExitStack()  # undoes :meth:`begin`, last things first

    # ---- attaching and detaching ---------------------------------------------------------------------------------

    def begin(self, *layers: tuple[Any, type]) -> None:
        """Interpose ``layers``, each an object of DeepSpeed and the overrides of its methods, and start."""
        parts, engine = self.parts, self.parts.engine
        group = zero.data_parallel_group(engine.optimizer)
        share_timeout({group, *(layout.process_group for layout in parts.reducer.layouts)})
        with ExitStack() as stack:
            undo = stack.callback
            undo(patches.remove_user, engine)
            undo(_forget_handle, engine)
            parts.counter.take()  # what was sent to set up is of no step
            for target, layer in layers:
                target._zerosync_attached = self
                interpose(target, layer)
                undo(_restore, target, layer)
            undo(unguard_states, zero.stepping_optimizer(engine))
            self.guard_states()
            self.fragments_linked()
            undo(param_functions.release_gradients, parts.reducer.params)
            parts.reducer.attach(lambda gradient: partial(parts.window.added, gradient))
            undo(parts.reducer.detach)
            undo(self.stage.detach)
            stack.enter_context(zero.time_by_the_host(engine))
            undo(self.stage.pending.restore_clip_norm)
            AttachedEngine.all.add(self)
            undo(AttachedEngine.all.discard, self)
            self._undo = stack.pop_all()

    def guard_states(self) -> None:
        """Make a use of the optimizer's states by parameter an error (N1)."""
        guard_states(zero.stepping_optimizer(self.parts.engine), self.parts.names)

    def fragments_linked(self) -> None:
        """Wrap the functions behind ``safe_get_...`` again, after DeepSpeed has replaced them."""
        param_functions.intercept_gradients(self.parts.reducer.params, self.stage.pending)

    def detach(self) -> None:
        """Restore the engine; raise ``RuntimeError`` if that is impossible."""
        if self.by_name is not None:
            raise RuntimeError(
                f"detach() found the optimizer {type(zero.stepping_optimizer(self.parts.engine)).__name__}, which needs"
                " whole parameters: DeepSpeed would step flat shards. Leave the engine attached, or build it anew."
            )
        if self._compiled is not None:
            raise RuntimeError(
                "detach() found an engine that DeepCompile has compiled; its graphs give their gradients to ZeroSync."
                " Leave it attached, or build the engine anew."
            )
        wait_for_save()
        self.stage.in_stock_layout()
        self._undo.close()
        self.stage.detached(destroyed=False)

    def destroyed(self) -> None:
        """Detach and drop the window, because the engine is about to be destroyed."""
        wait_for_save()
        self.parts.window.abort("the engine was destroyed")
        self._undo.close()
        self.stage.detached(destroyed=True)

    def summary(self) -> str:
        """Return what a step will send with these options, and what is held, in one line."""
        gradients = size_text(self.parts.reducer.gradients_floor().nbytes)
        once = "once" if self.parts.config.gradients.keeps_any else "after each backward"
        parameters = self.stage.sends(self.meter.all_once.nbytes)
        return f"each step, a rank sends {gradients} of gradients {once}, and {parameters}"

    # ---- backward ------------------------------------------------------------------------------------------------

    @contextmanager
    def backward(self, is_last: bool | None) -> Iterator[None]:
        """Around ``engine.backward``. ``is_last``: of DeepSpeed's own accumulation; ``None``: it has none."""
        with self.stage.backward():
            if is_last is not None:
                self.parts.window.expect_last(is_last)
            with self.activity(Doing.BACKWARD), self.parts.window.engine_backward():
                yield

    def graph_begins(self) -> None:
        if self.guards.infers:
            self.guards.refuse_in_inference("backward()")
        with self.stage.as_they_are():
            trains = self.guards.trains(
                param for attached in AttachedEngine.all for param in attached.parts.reducer.params
            )
            if self.stage.of_module is not None:
                self.stage.of_module.cache.backward_begins()
        if self.meter.budgets is not None:
            self.meter.budgets.forward_ended()
        if trains:  # else the loss passes through to other engines
            self.parts.window.enter_graph()

    def zero_grad(self) -> None:
        self.stage.pending.dropped()
        self.stage.stepper.reset()
        self.parts.window.zero_grad()

    def module_zeroed(self, params: Set[int]) -> None:
        """Drop all gradients if ``zero_grad()`` of a module with ``params``, by id, has removed them."""
        if self.guards.zeroed(params):
            self.zero_grad()

    # ---- the step ------------------------------------------------------------------------------------------------

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around the ZeRO optimizer's own step."""
        stage, window, guards, budgets = self.stage, self.parts.window, self.guards, self.meter.budgets
        if background.current is not None:
            background.current.step_begins()
        self.guard_states()
        with self.activity(Doing.STEP), stage.as_they_are():
            if guards.needs_every_gradient and window.state is not WindowState.CLOSED:
                guards.check_every_gradient()
            with self.activity(Doing.REDUCTION), window.closing(stage.pass_issued):
                if guards.needs_every_gradient:
                    guards.window_closed()
                if budgets is not None:
                    budgets.step_begins()
                stage.before_update()
            try:
                with phase("step"), stage.updating(), stage.stepper.stepping():
                    yield
            finally:
                stage.pending.restore_clip_norm()
                stage.written(by_step=True)
            stage.after_update()
            if self.parts.statistics is not None:
                self.parts.statistics.share()
            report = self.meter.step_done()
            if self._printed is not None:
                self._printed.note(report, lambda: label_of(self, self.all))

    def switch(self, mode: str, switch: Callable[[], None]) -> None:
        """Let the torch optimizer's own ``train()`` or ``eval()`` exchange the weights that it steps. Collective."""
        if mode == self.stage.stepper.mode:  # as in programs that call it before each backward
            switch()
            return
        call = f"optimizer.{mode}()"
        if self.guards.infers:
            self.guards.refuse_in_inference(call)
        with self.apart("exchanged weights"), self.activity(call), self.stage.as_they_are():
            self.stage.change_masters(lambda: self.stage.stepper.change(switch))
            self.stage.written(by_step=False)
        self.stage.stepper.mode = mode

    def states_loaded(self) -> None:
        engine: Any = self.parts.engine
        # Gradients were dropped. This run may accumulate over another number of backwards than the saved one.
        engine.micro_steps -= engine.micro_steps % engine.gradient_accumulation_steps()
        self.stage.stepper.mode = ""
        self.guard_states()
        self.stage.written(by_step=False)

    # ---- other calls of a program --------------------------------------------------------------------------------

    @contextmanager
    def gathered_for_inference(self) -> Iterator[None]:
        """Around forwards without backwards; see :meth:`ZeroSync.gathered_for_inference`."""
        if self.guards.infers:
            yield
            return
        with replaced(self.guards, "infers", True), self.stage.gathered():
            yield

    def compiling(self) -> AbstractContextManager[None]:
        if self.guards.needs_every_gradient:
            raise ValueError(
                "DeepCompile's graphs give every parameter a gradient, used or not, so that"
                " 'zero_optimization.ignore_unused_parameters' = false cannot be kept. Leave it out."
            )
        CompiledGradients.verify(self.parts.config, self.parts.reducer.shards.over_groups)
        optimizer = self.parts.engine.optimizer
        gradients = {compilation.deepcompile_id(optimizer, each.param): each for each in self.parts.reducer.gradients}
        self._compiled = CompiledGradients(gradients, self.parts.window.add)
        self.stage.compiling()
        self.meter.compiling()
        return self._compiled.compiling()

    def node_shards(self) -> list[torch.Tensor]:
        """Return the present node shards of gradients and parameters."""
        gradients = [shard for bucket in self.parts.reducer.buckets for shard in bucket.node_shard.values()]
        return gradients + self.stage.node_shards()

    @contextmanager
    def apart(self, section: str) -> Iterator[None]:
        """Around what is no part of a step: what is sent inside counts for the outermost ``section``."""
        with self.stage.reading(), self.parts.counter.apart(section):
            yield

    def activity(self, what: object) -> AbstractContextManager[None]:
        """Around what may communicate, for errors (W4)."""
        return Activity(self._rank_status, what, self._position, self.meter)

    def _position(self) -> str:
        return f"{self.meter.steps} optimizer step(s) done, {self.parts.window.backwards} backward(s) since"


def _check_options(engine: DeepSpeedEngine, config: ZeroSyncConfig, whole: bool) -> None:
    """Raise ``ValueError`` if options and engine do not fit."""
    if whole:
        StatesByName.check_options(engine)
    if config.checkpoint_format == "distributed":
        check_distributed(engine)
    check_limit(engine.device, config)
    (ShardedStage if zero.stage(engine) == 3 else FlatStage).check_options(engine, config)
    check_backends(zero.process_groups(engine), engine.device)


def why_not_by_name(engine: DeepSpeedEngine) -> str:
    """Return what a checkpoint for any number of ranks cannot hold of ``engine``; empty if it can hold everything."""
    why = engine_state.why_not_distributed(engine)
    if not why and any(dist.get_world_size(group) != dist.get_world_size() for group in zero.process_groups(engine)):
        return (
            "parameters that not all ranks shard: shard_over(), tensor or pipeline parallelism, experts, MiCS, or"
            " 'sequence_parallel_size' without an mpu whose groups for ZeRO have all ranks"
        )
    if not why and any(not isinstance(key, torch.Tensor) for key in zero.stepping_optimizer(engine).state):
        return "an optimizer with states that are of no parameter"
    return why


def check_distributed(engine: DeepSpeedEngine) -> None:
    """Raise ``ValueError`` if a distributed checkpoint cannot hold what ``engine`` has."""
    if why := why_not_by_name(engine):
        raise ValueError(
            f"ZeroSync option 'checkpoint_format' got 'distributed', and found {why}. Leave one of them out."
        )


def check_backends(process_groups: Iterable[dist.ProcessGroup], device: torch.device) -> None:
    """Raise if a backend cannot send point to point from ``device``: gloo would read a device address as the host's."""
    for group in process_groups:
        if device.type != "cpu" and dist.get_world_size(group) > 1 and not is_native(group, device):
            raise ValueError(
                f"attach() found the process group of the ranks {dist.get_process_group_ranks(group)} with the backends"
                f" {dist.get_backend_config(group)!r}, and parameters on {device}, which gloo cannot send. Make the"
                " process group with 'nccl', or 'cpu:gloo,cuda:nccl', or train on the CPU."
            )


def _patch_process(engine: DeepSpeedEngine) -> None:
    """Install the patches of the process, until the last engine is detached (C2)."""
    patches.add_user(engine)
    zero.use_current_names()
    allow_any_model()
    if engine.device.type == "cpu":
        leave_out_ranges()
    if zero.stage(engine) == 3:
        let_average()


def _is_constant(param: nn.Parameter) -> bool:
    return not param.requires_grad and not any(param in attached.guards.trained for attached in AttachedEngine.all)


def _restore(target: Any, layer: type) -> None:
    restore(target, layer)
    del target._zerosync_attached


def _forget_handle(engine: DeepSpeedEngine) -> None:
    for owner in (engine, engine.optimizer):
        vars(owner).pop("_zerosync", None)
