"""Attaching to a live DeepSpeed engine, and letting go of it."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from zerosync_strategy.core import contract
from zerosync_strategy.core.agreement import model_facts, require_same
from zerosync_strategy.core.collectives import share_timeout
from zerosync_strategy.core.config import BLOCK, ZeroSyncConfig
from zerosync_strategy.core.deepcompile import Collector
from zerosync_strategy.core.eager_frames import EagerFrames
from zerosync_strategy.core.full_state import full_state, load_full_state
from zerosync_strategy.core.gathers import Gathers
from zerosync_strategy.core.interpose import interpose, restore
from zerosync_strategy.core.methods import EngineMethods, Stage3Methods, Stage12Methods
from zerosync_strategy.core.report import StepReport
from zerosync_strategy.core.rollcall import roll_call
from zerosync_strategy.core.sharding import layout_problem
from zerosync_strategy.core.stages import Stage3Reducer, Stage12Reducer
from zerosync_strategy.core.traffic import EngineCounter
from zerosync_strategy.core.unshard import HeldParameters
from zerosync_strategy.core.window import Window, WindowState

if TYPE_CHECKING:
    from zerosync_strategy.racecheck.checker import Finding
    from zerosync_strategy.racecheck.in_place import InPlaceCheck

# Blocks of the DeepSpeed configuration that say what is sent.
_ALIKE = ("zero_optimization", "gradient_clipping", "bf16", "fp16", "communication_data_type", "data_types")
_attached: weakref.WeakSet[ZeroSync] = weakref.WeakSet()
_check: InPlaceCheck | None = None  # of all attached engines, while one of them asks for it


def attach(engine: Any, config: ZeroSyncConfig | None = None, **options: Any) -> ZeroSync:
    """Give a live DeepSpeed engine one gradient reduction per optimizer step.

    From now on any number of ``engine.backward(loss)`` or ``loss.backward()`` before ``engine.step()`` is one window:
    gradients stay local, and the step reduces them once.

    Args:
        engine: what ``deepspeed.initialize`` returned, with ZeRO stage 1, 2 or 3 and an optimizer.
        config: the options; by default those of a ``"zerosync"`` block in the engine's DeepSpeed configuration.
        **options: single options by name instead of ``config``, merged with the block.

    Returns:
        The handle: reports, abort, detach.

    Raises:
        TypeError, ValueError: the engine or an option is not one that ZeroSync supports, or the ranks' models or
            options are not alike.
        ContractError: DeepSpeed's internals are not those that ZeroSync knows (C1).
    """
    contract.verify(engine)
    if isinstance(engine, EngineMethods):
        raise ValueError("attach() found this engine attached already. Use its handle, or detach() first.")
    if config is None:
        config = ZeroSyncConfig.resolve(contract.engine_config(engine).get(BLOCK), options)
    elif options:
        raise ValueError(f"attach() takes either config= or single options, got both: {', '.join(options)}.")
    with roll_call().doing("attach()", lambda: "before the first optimizer step"):
        everyone = engine.optimizer.dp_process_group
        problem = layout_problem(engine.module, everyone) if engine.zero_optimization_stage() == 3 else ""
        require_same("attach()", {"sharding": problem or "as asked"} | _facts(engine, config), everyone)
        if problem:
            raise ValueError(f"attach() found that {problem}")
    return ZeroSync(engine, config)


def _facts(engine: Any, config: ZeroSyncConfig) -> dict[str, str]:
    """What the ranks' collectives follow from."""
    configured = contract.engine_config(engine)
    facts = {f"DeepSpeed's {name!r}": repr(configured.get(name)) for name in _ALIKE}
    facts |= {f"ZeroSync's {name!r}": repr(value) for name, value in vars(config).items()}
    return facts | model_facts(engine.module)


class ZeroSync:
    """The handle of one attached engine. Made by :func:`attach`.

    Attributes:
        engine: the DeepSpeed engine.
        config: the options in force.
        window: the window of the coming optimizer step.
        parameters: those that the optimizer trains.
        report: what the last optimizer step cost, or ``None`` before the first.
        counter: counts the collectives for the report, apart from those of other engines in this process.
    """

    def __init__(self, engine: Any, config: ZeroSyncConfig) -> None:
        self.engine = engine
        self.config = config
        self.report: StepReport | None = None
        optimizer = engine.optimizer
        stage_3 = engine.zero_optimization_stage() == 3
        if config.held_bytes != 0 and not stage_3:
            raise ValueError(
                "ZeroSync option 'param_memory_budget' holds the gathered parameters of ZeRO stage 3, found stage"
                f" {engine.zero_optimization_stage()}. Leave it out, or use stage 3."
            )
        if not stage_3 and any(map(contract.partition_is_asked_for, engine.module.parameters())):
            raise ValueError(
                "shard_over() shards parameters of ZeRO stage 3, found stage"
                f" {engine.zero_optimization_stage()}. Use stage 3, or leave it out."
            )
        if config.trace_gathers and not stage_3:
            raise ValueError(
                "ZeroSync option 'trace_gathers' is for the gathers of ZeRO stage 3, found stage"
                f" {engine.zero_optimization_stage()}. Leave it out, or use stage 3."
            )
        self._reducer = (Stage3Reducer if stage_3 else Stage12Reducer)(optimizer, config)
        self.parameters = self._reducer.params
        self._parameters_floor = self._reducer.parameters_floor()
        self.window = Window(self._reducer, config.overlap_last)
        self._check = _check_of(config)
        self._steps = 0
        self._clip_grad: float | None = None  # the configured norm, while another one is in force for the coming step
        self._held: HeldParameters | None = None
        self._gathers: Gathers | None = None
        self._eager: EagerFrames | None = None
        if stage_3:
            self._held = HeldParameters.of(optimizer, config.held_bytes)
            self._gathers = Gathers.of(engine, self._reducer.streams, config.unshard_streams)
            if config.eager_frames:
                self._eager = EagerFrames.of(engine, self._gathers, config.trace_gathers)
        self._collector: Collector | None = None  # once DeepCompile compiles this engine
        self._roll_call = roll_call()
        share_timeout({optimizer.dp_process_group, *(p.process_group for p in self._reducer.partitions)})
        self.counter = EngineCounter().start()
        for target, methods in ((engine, EngineMethods), (optimizer, Stage3Methods if stage_3 else Stage12Methods)):
            target._zerosync = self
            interpose(target, methods)
        if self._check is not None:
            for other in [] if self._check.running else _attached:
                self._check.join(other, 0)
            self._check.join(self, config.racecheck)
        _attached.add(self)

    @property
    def findings(self) -> list[Finding] | None:
        """What ``racecheck`` has found until now on this rank; ``None`` where this engine is not checked."""
        return None if self._check is None else self._check.findings

    def end_racecheck(self, reason: str = "end_racecheck() was called") -> None:
        """Check no further step, and report. Does nothing where the check has ended, or there is none."""
        if self._check is not None:
            self._check.leave(self, reason)

    def device_changed(self) -> None:
        """The device has gained streams or lost them; the race checker calls this."""
        contract.renew_streams(self.engine)
        self._reducer.streams.renew()
        if self._gathers is not None:
            self._gathers.renew()

    def reduce(self) -> None:
        """Reduce the window now, so that code between here and ``step()`` sees averaged gradients. Collective."""
        with self._doing("the reduction"):
            self.window.reduce()

    def abort(self, reason: str = "abort() was called") -> None:
        """Drop the gradients of the open window and close it, with a warning and without a collective (W3)."""
        self.window.abort(reason)

    @contextmanager
    def awaiting_backward(self) -> Iterator[None]:
        """Around a backward that another engine runs, and that may bring gradients to this one too.

        Without it, such a backward is one of this engine's window as well; but a graph that runs inside another one
        counts by itself, and an exception leaves the incomplete gradients in the window.
        """
        with self.window.engine_backward(begins=False):
            yield
        self.counter.claim()

    def gradient_norm(self) -> torch.Tensor:
        """The L2 norm of this window's gradients, averaged over the ranks. Reduces the window. Collective.

        Returns:
            A scalar on the engine's device, the same on every rank; infinite if a gradient is not finite, and 0 if no
            backward ran since the last step. The coming step uses it and does not compute it again.
        """
        self.reduce()
        if self.window.state is WindowState.CLOSED:
            return torch.zeros((), device=self.engine.device)
        return self._reducer.compute_norm() / self.engine.optimizer.loss_scale

    def clip_next_step(self, max_norm: float) -> None:
        """Clip the coming optimizer step, and only it, to this global gradient norm; 0 leaves it unclipped.

        Raises:
            ValueError: ``max_norm`` is negative or not a number.
        """
        if not max_norm >= 0:
            raise ValueError(f"clip_next_step() takes a norm of 0 or more, got max_norm={max_norm!r}.")
        if self._clip_grad is None:
            self._clip_grad = self.engine.optimizer.clip_grad
        self.engine.optimizer.clip_grad = float(max_norm)

    def full_state(self) -> dict[str, torch.Tensor]:
        """Stage 3: this rank's share of the parameters in full, on the CPU. Collective; see ``core/full_state.py``.

        Returns:
            By name, those parameters of which this is the first of the ranks that shard them: without
            :func:`~zerosync_strategy.shard_over`, all on rank 0 and none elsewhere.
        """
        return full_state(self.engine)

    def load_full_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Stage 3: set the parameters to what :meth:`full_state` gave this rank. Collective.

        Raises:
            ValueError: on every rank, if a parameter is missing or has another shape on some rank.
        """
        self.abort("load_full_state() was called")
        load_full_state(self.engine, state)

    def detach(self) -> None:
        """Give the engine back as it was.

        Raises:
            RuntimeError: a window is open; its gradients would be lost silently.
        """
        if not isinstance(self.engine, EngineMethods):
            return
        if self.window.state is not WindowState.CLOSED:
            raise RuntimeError(
                f"detach() found a window with {self.window.backwards} backward(s) since the last optimizer step."
                " Call engine.step() to use their gradients or abort() to drop them first."
            )
        if self._collector is not None:
            raise RuntimeError(
                "detach() found an engine that DeepCompile has compiled; its graphs give their gradients to ZeroSync."
                " Leave it attached, or build the engine anew."
            )
        self._release()

    def _release(self) -> None:
        if self._collector is not None:
            self._collector.detach()
        self.end_racecheck("the engine was let go")
        _attached.discard(self)
        self._restore_clipping()
        self.counter.stop()
        for gathering in (self._eager, self._gathers, self._held):  # the last that came goes first
            if gathering is not None:
                gathering.detach()
        for target in (self.engine, self.engine.optimizer):
            restore(target)
            del target._zerosync

    def _forward(self) -> AbstractContextManager[None]:
        """Around a forward of the engine."""
        return self._eager.forward(self._keeps) if self._eager is not None else nullcontext()

    def _release_gathered(self) -> None:
        if self._eager is not None:
            self._eager.release(self._keeps)

    def _keeps(self, param: Any) -> bool:
        return self._held is not None and self._held.holds(param)

    @contextmanager
    def _step(self) -> Iterator[None]:
        """Around the ZeRO optimizer's own step."""
        with self._doing("the optimizer step"):
            with self._doing("the reduction"):
                if self._gathers is not None:
                    self._gathers.close()
                self.window.begin_step()
            try:
                with torch.profiler.record_function("zerosync::step"):
                    yield
            except BaseException as error:
                self.end_racecheck(f"step() raised {type(error).__name__}")
                raise
            finally:
                self._restore_clipping()
                if self._gathers is not None:
                    self._gathers.follow_step()
            self._steps += 1
            self.report = self._reported()
            self.window.end_step()
            if self._held is not None:
                self._held.end_window(self._parameters_floor)  # all that the step has released
            if self._gathers is not None:
                self._gathers.unsharded.end_window()
            if self._check is not None:
                self._check.stepped(self)

    def _reported(self) -> StepReport:
        window = self.window
        return StepReport(
            step=self._steps,
            backwards=window.backwards,
            reductions=window.reductions,
            early_reductions=window.early_reductions,
            floor_bytes=self._floor(window.backwards),
            peak_unreduced_bytes=self._reducer.peak_bytes,
            peak_unsharded_bytes=self._gathers.unsharded.peak if self._gathers is not None else 0,
            peak_held_bytes=self._held.peak_bytes if self._held is not None else 0,
            seconds=window.seconds,
            collectives=self.counter.take(),
        )

    def _doing(self, what: str) -> AbstractContextManager[None]:
        """Around what may communicate (W4)."""
        return self._roll_call.doing(what, self._position)

    def _position(self) -> str:
        return f"{self._steps} optimizer step(s) done, {self.window.backwards} backward(s) since"

    def _floor(self, backwards: int) -> int:
        floor = self._reducer.sent_floor
        stage_3 = self.engine.zero_optimization_stage() == 3
        if stage_3 and self._collector is not None:
            return floor  # DeepCompile's graphs gather past what counts
        for param, size in self._parameters_floor.items():
            once = not stage_3 or param.ds_persist or (self._held is not None and self._held.holds(param))
            floor += size if once else backwards * size
        return floor

    def _gradient_ready(self, param: torch.nn.Parameter) -> None:
        # DeepSpeed would reduce here. The gradient stays local instead.
        self.window.inside_graph()
        with self._doing("a backward") if self._reducer.streaming else nullcontext():
            self.counter.claim()  # parameters that were gathered on the way to this gradient
            self._reducer.gradient_ready(param)
            self.counter.claim()  # what it has completed and sent

    def _gradient_from_graph(self, param: torch.nn.Parameter, gradient: torch.Tensor) -> None:
        self._reducer.collect(param, gradient)
        self._gradient_ready(param)

    def _deepcompiling(self) -> AbstractContextManager[None]:
        """Around DeepCompile's preparation of this engine."""
        over_groups = isinstance(self._reducer, Stage3Reducer) and self._reducer.over_groups
        Collector.verify(self.config, over_groups, self._check is not None)
        if self._eager is not None:
            self._eager.deepcompile()
        params = {contract.deepcompile_id(self.engine.optimizer, param): param for param in self.parameters}
        self._collector = Collector(params, self._gradient_from_graph, self._gradient_ready)
        return self._collector.compiling()

    def _restore_clipping(self) -> None:
        if self._clip_grad is not None:
            self.engine.optimizer.clip_grad, self._clip_grad = self._clip_grad, None


def _check_of(config: ZeroSyncConfig) -> InPlaceCheck | None:
    """The check that an engine takes part in: because it asks for that, or because one is running."""
    global _check
    if _check is not None and _check.running:
        return _check
    if not config.racecheck:
        return None
    from zerosync_strategy.racecheck.in_place import InPlaceCheck  # only now: no other training needs it

    _check = InPlaceCheck()
    return _check
