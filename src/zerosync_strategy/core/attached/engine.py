"""What an attached engine has on every stage: its parts, and what DeepSpeed's overridden methods do with them."""

# ruff: noqa: B027  (a stage that lacks a part has nothing to do where the other one does something)

from __future__ import annotations

import itertools
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from zerosync_strategy.core.announcement import PrintedReports
from zerosync_strategy.core.attached.labels import label_of
from zerosync_strategy.core.attached.meter import StepMeter
from zerosync_strategy.core.budgets.automatic import AutomaticBudgets, check_limit
from zerosync_strategy.core.checkpoints.by_element import refuse_states_by_name
from zerosync_strategy.core.comm.collectives import is_native, phase, share_timeout
from zerosync_strategy.core.comm.messages import messages_of
from zerosync_strategy.core.comm.nodes import Topology
from zerosync_strategy.core.comm.traffic import EngineCounter
from zerosync_strategy.core.engine import compilation, fragments, patches, zero
from zerosync_strategy.core.engine.compat import allow_any_model
from zerosync_strategy.core.engine.cpu import leave_out_ranges
from zerosync_strategy.core.engine.interpose import interpose, replaced, restore
from zerosync_strategy.core.engine.saved_shards import SavedShards
from zerosync_strategy.core.failures.doing import Doing
from zerosync_strategy.core.failures.errors import AS_MANY, CONVERT
from zerosync_strategy.core.failures.rank_status import rank_status
from zerosync_strategy.core.gradients.checks import LocalChanges, RequiredGradients
from zerosync_strategy.core.gradients.compiled import CompiledGradients
from zerosync_strategy.core.gradients.local import keep_freed_memory
from zerosync_strategy.core.gradients.reducer import Reducer
from zerosync_strategy.core.gradients.window import Window, WindowState
from zerosync_strategy.core.optimizer.pending import PendingGradients
from zerosync_strategy.core.optimizer.stepper import Stepper
from zerosync_strategy.core.options.config import ZeroSyncConfig
from zerosync_strategy.core.params.edits import MasterWeights
from zerosync_strategy.core.params.scheduler import GatherScheduler
from zerosync_strategy.core.report import size_text

_numbers = itertools.count()


class AttachedEngine(ABC):
    """The parts of one attached engine, and what its overridden methods (``overrides.py``) do with them.

    ``ValueError`` where an option needs another stage, or a process group another backend.

    Attributes:
        all: the attached engines of this process; ``number`` grows in the order in which they were.
        masters: what the optimizer steps.
        stepper: makes the step of the torch optimizer.
        budgets: those that set themselves; ``None``: none does.
        saved: the checkpoint that is being loaded, where each rank reads it by names; else DeepSpeed does.
        saves_by_name: the optimizer's states, each whole; else by element.
    """

    all: ClassVar[weakref.WeakSet[AttachedEngine]] = weakref.WeakSet()
    saves_by_name: ClassVar[bool] = False
    reducer_class: ClassVar[type[Reducer]]
    reducer: Reducer
    pending: PendingGradients
    meter: StepMeter
    budgets: AutomaticBudgets | None
    scheduler: GatherScheduler | None = None
    saved: SavedShards | None = None

    def __init__(self, engine: Any, config: ZeroSyncConfig) -> None:
        self.check_options(engine, config)
        check_backends(zero.process_groups(engine), engine.device)
        self.engine, self.config, self.number = engine, config, next(_numbers)
        self._patch_process()
        self._rank_status = rank_status()
        optimizer = engine.optimizer
        self.names = {param: name for name, param in engine.module.named_parameters()}
        group = zero.data_parallel_group(optimizer)
        self.messages, self.topology = messages_of(group, engine.device), Topology(config.node_size, group)
        self.reducer = self.reducer_class(engine, config, self.names, self.messages, self.topology)
        self.trained = frozenset(self.reducer.params)
        self.traffic = EngineCounter(self.topology)
        self.masters = MasterWeights(self.reducer.streams)
        self.stepper = self._make_stepper()
        changes = LocalChanges(self.reducer.params, self.names)
        self.window = Window(
            self.reducer, config.overlap_last, self.traffic, self.activity, self._window_backward_begins, changes
        )
        self._required = RequiredGradients(
            self.reducer.params, self.names, self.window.gradient_ready, zero.needs_every_gradient(engine)
        )
        compilation.keep_out_of_graphs(self.window.added)
        # DeepSpeed has left these out of what it reduces and steps, and nothing adds one later.
        self._untrained = [param for param in engine.module.parameters() if not param.requires_grad]
        self._param_groups = len(zero.stepping_optimizer(engine).param_groups)
        self.reports = PrintedReports(config.report_every, config.report_file) if dist.get_rank() == 0 else None
        self._compiled: CompiledGradients | None = None  # once DeepCompile compiles this engine
        self._postponing: list[str] = []  # DeepSpeed's contexts, entered and not left, in which no step is legal
        self._infers = False  # in gathered_for_inference()
        self._mode = ""  # the last that :meth:`switch` was called for, of weights that were not loaded since

    is_preparing = False  # DeepSpeed is, a forward

    # ---- attaching -----------------------------------------------------------------------------------------------

    @classmethod
    def check_options(cls, engine: Any, config: ZeroSyncConfig) -> None:
        """Raise a ``ValueError`` where an option is for another stage than that of ``engine``."""
        check_limit(engine.device, config)

    def _make_stepper(self) -> Stepper:
        return Stepper(self.reducer)

    def _patch_process(self) -> None:
        """Replace what is replaced in the whole process, until the last engine is detached (C2)."""
        patches.add_user(self.engine)
        allow_any_model()
        if self.engine.device.type == "cpu":
            keep_freed_memory()
            leave_out_ranges()

    def begin(self, *layers: tuple[Any, type]) -> None:
        """Interpose ``layers``, of an object of DeepSpeed and the overrides of its methods, and start."""
        optimizer = self.engine.optimizer
        share_timeout({
            zero.data_parallel_group(optimizer), *(layout.process_group for layout in self.reducer.layouts)
        })  # fmt: skip
        self.traffic.start()
        self._layers = layers
        for target, layer in layers:
            target._zerosync_attached = self
            interpose(target, layer)
        self.fragments_linked()
        ready = self._required.gradient_ready
        self.reducer.attach(lambda gradient: partial(self.window.added, ready, gradient))
        AttachedEngine.all.add(self)
        self._restore_timer = zero.time_by_the_host(self.engine)
        self._stop_counting = weakref.finalize(self.engine, self.traffic.stop)

    def node_shards(self) -> list[torch.Tensor]:
        """Return what is kept in shards of the node now."""
        return [shard for bucket in self.reducer.buckets for shard in bucket.node_shard.values()]

    def detach(self) -> None:
        """Give the engine back as it was; a ``RuntimeError`` where DeepCompile has compiled it."""
        if self._compiled is not None:
            raise RuntimeError(
                "detach() found an engine that DeepCompile has compiled; its graphs give their gradients to ZeroSync."
                " Leave it attached, or build the engine anew."
            )
        self.in_stock_layout()
        self._detach()

    def destroyed(self) -> None:
        """The engine is about to be destroyed: detach, and drop the window."""
        self.window.abort("the engine was destroyed")
        self.wait_for_parameters()
        self._detach()

    def _detach(self) -> None:
        AttachedEngine.all.discard(self)
        self.pending.restore_clip_norm()
        self._stop_counting()
        self._restore_timer()
        self._detach_parameters()
        self.reducer.detach()
        fragments.release(self.reducer.params)
        for target, layer in self._layers:
            restore(target, layer)
            del target._zerosync_attached
        del self.engine._zerosync, self.engine.optimizer._zerosync
        patches.remove_user(self.engine)

    def _detach_parameters(self) -> None:
        """Detach what a stage has of its own."""

    def summary(self) -> str:
        """Return what a step will send by these options, and what is held, in one line."""
        gradients = size_text(self.reducer.gradients_floor().nbytes)
        once = "once" if self.config.coalesce else "after each backward (coalesce=False)"
        return f"each step, a rank sends {gradients} of gradients {once}, and {self._sends_parameters()}"

    def _sends_parameters(self) -> str:
        return f"{size_text(self.meter.all_parameters_bytes)} of parameters once"

    # ---- parameters ----------------------------------------------------------------------------------------------

    def wait_for_parameters(self) -> None:
        """Wait for gathers in flight, before DeepSpeed reads or writes parameters (U5)."""

    def parameters_as_they_are(self) -> AbstractContextManager[None]:
        """Around DeepSpeed's own work on parameters: what it reads is not unsharded for it."""
        return nullcontext()

    def parameters_written(self, by_step: bool) -> None:
        """A step has written the parameters, or a checkpoint was loaded, perhaps half-way."""

    @abstractmethod
    def adopt_edits(self) -> None:
        """Let a step or a checkpoint start from the parameters as the program has left them (N1)."""

    @abstractmethod
    def change_masters(self, change: Callable[[], None]) -> None:
        """Let ``change`` change the weights that the optimizer steps, and all ranks have the parameters. Collective."""

    def switch(self, mode: str, switch: Callable[[], None]) -> None:
        """Let the torch optimizer's own ``train()`` or ``eval()`` exchange the weights that it steps. Collective."""
        if mode == self._mode:  # as a program calls it before each backward
            switch()
            return
        call = f"optimizer.{mode}()"
        self._refuse_in_inference(call)
        with self.traffic.apart("exchanged weights"), self.activity(call), self.parameters_as_they_are():
            self.change_masters(switch)
            self.parameters_written(by_step=False)
        self._mode = mode

    @abstractmethod
    def version(self) -> int:
        """Return a number that grows whenever a step or a checkpoint changes the parameters."""

    @property
    def shards_over_groups(self) -> bool:
        """Whether some parameters are sharded over fewer ranks than all."""
        return False

    # ---- forward and backward ------------------------------------------------------------------------------------

    @abstractmethod
    def forward(self) -> AbstractContextManager[None]:
        """Around a forward."""

    @contextmanager
    def backward(self, is_boundary: bool) -> Iterator[None]:
        """Around ``engine.backward``; ``is_boundary``: DeepSpeed's own accumulation makes a step follow."""
        if is_boundary:
            self.window.expect_last()
        with self.activity(Doing.BACKWARD), self.window.engine_backward():
            yield

    def backward_begins(self) -> None:
        """From inside an autograd graph, before the first gradient."""
        self._refuse_in_inference("backward()")
        if self.window.state is WindowState.CLOSED:
            self._required.reset()  # what a dropped window had
        trains = self._trains()
        if self.budgets is not None:
            self.budgets.forward_ended()
        if trains:  # else the loss only passes through
            self.window.enter_graph()

    def _trains(self) -> bool:
        """Return whether a backward, which begins, may give a gradient to a parameter of the optimizer."""
        if thawed := [param for param in self._untrained if param.requires_grad]:  # none may be left out silently (N1)
            trained = {id(param) for attached in AttachedEngine.all for param in attached.reducer.params}
            if names := [repr(self.names[param]) for param in thawed if id(param) not in trained]:
                raise RuntimeError(
                    f"backward() found that {zero.listed(names)} required no gradient when the DeepSpeed engine was"
                    " built and requires one now. ZeRO would never train it. Let it require a gradient while the engine"
                    " is built and freeze it afterwards, or build the engine anew when it is thawed; a parameter that"
                    " is not to be trained must stay frozen."
                )
        return any(param.requires_grad for param in self.reducer.params)

    def _window_backward_begins(self, opens: bool) -> None:
        self.stepper.backward_begins(opens)

    def zero_grad(self) -> None:
        self.pending.dropped()
        self.stepper.reset()
        self._required.reset()
        self.window.zero_grad()

    def module_zeroed(self, params: Set[int]) -> None:
        """``zero_grad()`` of a module with ``params``, by id, has removed their gradients.

        Raises:
            RuntimeError: those of some alone cannot be dropped any more.
        """
        own = set(map(id, self.reducer.params))
        if own <= params:
            self.zero_grad()
        elif self.window.has_reduced and not own.isdisjoint(params):
            raise RuntimeError(
                "module.zero_grad() was called for some of the parameters that an optimizer trains, and their gradients"
                " are in ZeRO's shards already, or in another dtype: they were to be reduced in the backward (an"
                " announced last one, coalesce=False, grad_memory_budget) or accumulated apart (grad_accum_dtype). Call"
                " zero_grad() of the whole model or of the optimizer, or leave these options out and set"
                " overlap_last=False."
            )

    # ---- the step ------------------------------------------------------------------------------------------------

    @contextmanager
    def postponing_step(self, context: str) -> Iterator[None]:
        """Around what runs inside of DeepSpeed's ``context``, in which a step is illegal."""
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

    def refuse_param_group(self) -> None:
        raise ValueError(
            "add_param_group() was called on the optimizer of a DeepSpeed engine, which lays out what it trains when it"
            " is built: the added parameters would never be stepped. Give the optimizer all parameters before that, in"
            " as many groups as will need options of their own, and freeze after it those that are to train later. (In"
            " Lightning, a BaseFinetuning callback may freeze them before.)"
        )

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around the ZeRO optimizer's own step."""
        with self.activity(Doing.STEP), self.parameters_as_they_are():
            self.wait_for_parameters()
            if self.window.state is not WindowState.CLOSED:
                self._required.check()
            with self.activity(Doing.REDUCTION):
                self._before_reduction()
                self.window.begin_step()
            if self.budgets is not None:
                self.budgets.step_begins()
            self._before_update()
            try:
                with phase("step"), self._updating(), self.stepper.stepping():
                    yield
            finally:
                self.pending.restore_clip_norm()
                self.parameters_written(by_step=True)
            self._after_update()
            report = self.meter.step_done(None if self.budgets is None else self.budgets.choice)
            if self.reports is not None:
                self.reports.note(report.step, lambda: report.line(label_of(self, self.all)))
            if self.budgets is not None:
                self.budgets.step_ended()

    def _before_reduction(self) -> None:
        """A step has begun; the gradients are about to be reduced."""

    @abstractmethod
    def _before_update(self) -> None:
        """The gradients are reduced; the optimizer is about to step."""

    def _updating(self) -> AbstractContextManager[None]:
        return nullcontext()

    @abstractmethod
    def _after_update(self) -> None:
        """The optimizer has stepped."""

    # ---- what others read and write ------------------------------------------------------------------------------

    def in_stock_layout(self) -> None:
        """DeepSpeed is about to read or write the optimizer's shards, in its own layout. Collective after a step."""

    @property
    def other_ranks(self) -> str:
        """What to do with a checkpoint that another number of ranks has saved; empty: load it."""
        return AS_MANY if any(each.saves_by_name for each in AttachedEngine.all) else CONVERT

    def before_save(self) -> None:
        self.wait_for_parameters()

    def examine(self, directory: Path, tag: str) -> None:
        """A verified checkpoint is about to be loaded, with the optimizer's states. Collective.

        A ``CheckpointError`` on every rank: this optimizer cannot have it.
        """
        refuse_states_by_name(self.engine, directory, tag)

    def release_held(self) -> None:
        """A checkpoint is about to read or write shards: release what is gathered of them."""

    def states_loaded(self) -> None:
        """A checkpoint was loaded, perhaps half-way."""
        self._mode = ""
        self.parameters_written(by_step=False)

    def fragments_linked(self) -> None:
        """DeepSpeed has given the parameters its functions anew by which ``safe_get_...`` reach the shards."""
        fragments.intercept(self.reducer.params, self.pending)

    @contextmanager
    def gathered_for_inference(self) -> Iterator[None]:
        """Around forwards without backwards; see :meth:`ZeroSync.gathered_for_inference`."""
        if self._infers:
            yield
            return
        with replaced(self, "_infers", True), self._gathered():
            yield

    def _gathered(self) -> AbstractContextManager[None]:
        """While active, all parameters are gathered. Collective."""
        return nullcontext()

    def _refuse_in_inference(self, what: str) -> None:
        if self._infers:
            raise RuntimeError(
                f"{what} was called inside of gathered_for_inference(), which releases parameters at its end. Call it"
                " after the block."
            )

    def compiling(self) -> AbstractContextManager[None]:
        if self._required.is_required:
            raise ValueError(
                "DeepCompile's graphs give every parameter a gradient, used or not, so that"
                " 'zero_optimization.ignore_unused_parameters' = false cannot be kept. Leave it out."
            )
        CompiledGradients.verify(self.config, self.shards_over_groups)
        optimizer = self.engine.optimizer
        gradients = {compilation.deepcompile_id(optimizer, each.param): each for each in self.reducer.gradients}
        self._compiled = CompiledGradients(gradients, self.window.add)
        return self._compiled.compiling()

    def activity(self, what: object) -> AbstractContextManager[None]:
        """Around what may communicate (W4)."""
        return self._rank_status.activity(what, self._position, self.meter)

    def _position(self) -> str:
        return f"{self.meter.steps} optimizer step(s) done, {self.window.backwards} backward(s) since"


def check_backends(process_groups: Iterable[Any], device: torch.device) -> None:
    """Raise where a backend cannot send point to point from ``device``: gloo would take its address for the host's."""
    for group in process_groups:
        if device.type != "cpu" and dist.get_world_size(group) > 1 and not is_native(group, device):
            raise ValueError(
                f"attach() found the process group of the ranks {dist.get_process_group_ranks(group)} with the backends"
                f" {dist.get_backend_config(group)!r}, and parameters on {device}, which gloo cannot send. Make the"
                " process group with 'nccl', or 'cpu:gloo,cuda:nccl', or train on the CPU."
            )
