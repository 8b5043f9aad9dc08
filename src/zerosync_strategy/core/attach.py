"""Attaching to a live DeepSpeed engine, and letting go of it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist

from zerosync_strategy.core import contract
from zerosync_strategy.core.config import BLOCK, ZeroSyncConfig
from zerosync_strategy.core.eager_frames import EagerFrames
from zerosync_strategy.core.interpose import interpose, restore
from zerosync_strategy.core.report import StepReport
from zerosync_strategy.core.stages import Stage3Reducer, Stage12Reducer, gather_parameters
from zerosync_strategy.core.traffic import CollectiveCounter
from zerosync_strategy.core.unshard import HeldParameters
from zerosync_strategy.core.window import Window, WindowState


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
        TypeError, ValueError: the engine or an option is not one that ZeroSync supports.
        ContractError: DeepSpeed's internals are not those that ZeroSync knows (C1).
    """
    contract.verify(engine)
    if isinstance(engine, _EngineMethods):
        raise ValueError("attach() found this engine attached already. Use its handle, or detach() first.")
    if config is None:
        config = ZeroSyncConfig.resolve(contract.engine_config(engine).get(BLOCK), options)
    elif options:
        raise ValueError(f"attach() takes either config= or single options, got both: {', '.join(options)}.")
    return ZeroSync(engine, config)


class ZeroSync:
    """The handle of one attached engine. Made by :func:`attach`.

    Attributes:
        engine: the DeepSpeed engine.
        config: the options in force.
        window: the window of the coming optimizer step.
        parameters: those that the optimizer trains.
        report: what the last optimizer step cost, or ``None`` before the first.
        counter: counts the collectives for the report. Several engines in one process count each other's; ``stop()``
            and ``start()`` it around an engine's own steps to keep them apart.
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
        if config.trace_gathers and not stage_3:
            raise ValueError(
                "ZeroSync option 'trace_gathers' is for the gathers of ZeRO stage 3, found stage"
                f" {engine.zero_optimization_stage()}. Leave it out, or use stage 3."
            )
        self._reducer = (Stage3Reducer if stage_3 else Stage12Reducer)(optimizer, config)
        self.parameters = self._reducer.params
        self._parameters_floor = self._reducer.parameters_floor()
        self.window = Window(self._reducer, config.overlap_last)
        self._steps = 0
        self._clip_grad: float | None = None  # the configured norm, while another one is in force for the coming step
        self._held = HeldParameters(optimizer, config.held_bytes) if stage_3 else None
        self._eager = EagerFrames(engine, config.trace_gathers) if stage_3 and config.eager_frames else None
        self.counter = CollectiveCounter().start()
        for target, methods in ((engine, _EngineMethods), (optimizer, _Stage3Methods if stage_3 else _Stage12Methods)):
            target._zerosync = self
            interpose(target, methods)

    def reduce(self) -> None:
        """Reduce the window now, so that code between here and ``step()`` sees averaged gradients. Collective."""
        self.window.reduce()

    def abort(self, reason: str = "abort() was called") -> None:
        """Drop the gradients of the open window and close it, with a warning and without a collective (W3)."""
        self.window.abort(reason)

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

    def detach(self) -> None:
        """Give the engine back as it was.

        Raises:
            RuntimeError: a window is open; its gradients would be lost silently.
        """
        if not isinstance(self.engine, _EngineMethods):
            return
        if self.window.state is not WindowState.CLOSED:
            raise RuntimeError(
                f"detach() found a window with {self.window.backwards} backward(s) since the last optimizer step."
                " Call engine.step() to use their gradients or abort() to drop them first."
            )
        self._release()

    def _release(self) -> None:
        self._restore_clipping()
        self.counter.stop()
        if self._held is not None:
            self._held.detach()
        if self._eager is not None:
            self._eager.detach()
        for target in (self.engine, self.engine.optimizer):
            restore(target)
            del target._zerosync

    @contextmanager
    def _forward(self) -> Iterator[None]:
        """Around a forward of the engine."""
        with self._eager.forward(self._keeps) if self._eager is not None else nullcontext():
            yield

    def _release_gathered(self) -> None:
        if self._eager is not None:
            self._eager.release(self._keeps)

    def _keeps(self, param: Any) -> bool:
        return self._held is not None and self._held.holds(param)

    @contextmanager
    def _step(self) -> Iterator[None]:
        """Around the ZeRO optimizer's own step."""
        self.window.begin_step()
        try:
            with torch.profiler.record_function("zerosync::step"):
                yield
        finally:
            self._restore_clipping()
            if self._held is not None:
                self._reducer.streams.gathers_follow(contract.stage_3_gather_stream(self.engine.optimizer))
        self._steps += 1
        window = self.window
        self.report = StepReport(
            step=self._steps,
            backwards=window.backwards,
            reductions=window.reductions,
            early_reductions=window.early_reductions,
            floor_bytes=self._floor(window.backwards),
            peak_unreduced_bytes=self._reducer.peak_bytes,
            peak_unsharded_bytes=self._eager.peak_bytes if self._eager is not None else 0,
            peak_held_bytes=self._held.peak_bytes if self._held is not None else 0,
            seconds=window.seconds,
            collectives=self.counter.take(),
        )
        window.end_step()
        if self._held is not None:
            self._held.end_window()
        if self._eager is not None:
            self._eager.end_window()

    def _floor(self, backwards: int) -> int:
        floor = self._reducer.sent_floor
        stage_3 = self.engine.zero_optimization_stage() == 3
        for param, size in self._parameters_floor.items():
            once = not stage_3 or param.ds_persist or (self._held is not None and self._held.holds(param))
            floor += size if once else backwards * size
        return floor

    def _gradient_ready(self, param: torch.nn.Parameter) -> None:
        # DeepSpeed would reduce here. The gradient stays local instead.
        self.window.inside_graph()
        self._reducer.gradient_ready(param)

    def _restore_clipping(self) -> None:
        if self._clip_grad is not None:
            self.engine.optimizer.clip_grad, self._clip_grad = self._clip_grad, None

    def _warn_of_open_window(self, what: str) -> None:
        if self.window.state is not WindowState.CLOSED and self.engine.global_rank == 0:
            warnings.warn(
                f"{what} with {self.window.backwards} backward(s) since the last optimizer step. Their gradients are"
                " not in the checkpoint: this process keeps them for its next step, but a run that resumes from the"
                " checkpoint starts from the last step without them. Checkpoint right after a step to avoid this.",
                stacklevel=3,
            )


class _EngineMethods:
    """What an attached ``DeepSpeedEngine`` does differently. State is in its ZeroSync handle alone."""

    _zerosync: ZeroSync

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with self._zerosync._forward():
            return super().forward(*args, **kwargs)  # type: ignore[misc]

    def backward(self, loss: Any, *args: Any, **kwargs: Any) -> Any:
        window = self._zerosync.window
        engine: Any = self
        if engine.gradient_accumulation_steps() > 1 and engine.is_gradient_accumulation_boundary():
            window.expect_last()
        if isinstance(loss, torch.Tensor) and loss.requires_grad and loss.grad_fn is None:
            loss = loss.clone()  # a cached loss is a leaf whose hook runs the real backwards; DeepSpeed wants a graph
        try:
            with window.engine_backward():
                return super().backward(loss, *args, **kwargs)  # type: ignore[misc]
        except BaseException:
            self._zerosync._release_gathered()
            raise

    def _backward_prologue(self) -> None:
        self._zerosync.window.inside_graph()
        super()._backward_prologue()  # type: ignore[misc]

    def allreduce_gradients(self, *args: Any, **kwargs: Any) -> None:
        """The window decides what is reduced when; it is asked through the gradients' own hooks."""

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Nothing is sent before the step in any case; legal on every stage."""
        yield

    @contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        """Upstream's explicit window: ours is open already, and the step closes it."""
        yield

    def zero_grad(self) -> None:
        self._zerosync.window.zero_grad()
        super().zero_grad()  # type: ignore[misc]

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        self._zerosync._warn_of_open_window("save_checkpoint() was called")
        return super().save_checkpoint(*args, **kwargs)  # type: ignore[misc]

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        # Gradients of the parameters that are about to be replaced mean nothing for the new ones.
        self._zerosync.abort("load_checkpoint() was called")
        return super().load_checkpoint(*args, **kwargs)  # type: ignore[misc]

    def destroy(self) -> None:
        self._zerosync.abort("the engine was destroyed")
        self._zerosync._release()
        self.destroy()


class _OptimizerMethods:
    """What an attached ZeRO optimizer does differently, on every stage."""

    _zerosync: ZeroSync

    def step(self, *args: Any, **kwargs: Any) -> Any:
        with self._zerosync._step():
            return super().step(*args, **kwargs)  # type: ignore[misc]

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        self._zerosync.window.zero_grad()
        super().zero_grad(*args, **kwargs)  # type: ignore[misc]

    def finalize_gradient_accumulation_boundary(self) -> None:
        """Unmanaged accumulation asks for this in ``engine.step``; the window does it in ``optimizer.step``."""

    def zerosync_stock_finalize(self) -> None:
        super().finalize_gradient_accumulation_boundary()  # type: ignore[misc]


class _Stage12Methods(_OptimizerMethods):
    def step(self, *args: Any, **kwargs: Any) -> Any:
        if dist.get_backend() == "nccl":
            return super().step(*args, **kwargs)
        with contract.stage_1_and_2_parameter_gather(gather_parameters):
            return super().step(*args, **kwargs)

    def process_gradients(self, param: torch.nn.Parameter, i: int) -> None:
        self._zerosync._gradient_ready(param)

    def scaled_global_norm(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        reducer = self._zerosync._reducer
        if reducer.norm is None:
            reducer.norm = super().scaled_global_norm(*args, **kwargs)  # type: ignore[misc]
        return reducer.norm


class _Stage3Methods(_OptimizerMethods):
    def reduce_ready_partitions_and_remove_grads(self, param: torch.nn.Parameter) -> None:
        self._zerosync._gradient_ready(param)

    def _get_norm_groups(self) -> list[torch.Tensor]:
        reducer = self._zerosync._reducer
        if reducer.norm is None:
            norms = torch.stack([torch.as_tensor(norm) for norm in super()._get_norm_groups()])  # type: ignore[misc]
            # DeepSpeed marks the norm of a group with an infinity or a NaN by -1.
            reducer.norm = torch.where((norms >= 0).all(), norms.norm(), torch.inf)
        return [reducer.norm]
