"""Attaching to a live DeepSpeed engine, and letting go of it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from zerosync_strategy.core import contract
from zerosync_strategy.core.collectives import CollectiveCounter
from zerosync_strategy.core.config import BLOCK, ZeroSyncConfig
from zerosync_strategy.core.interpose import interpose, restore
from zerosync_strategy.core.reduction import Stage3Reducer, Stage12Reducer
from zerosync_strategy.core.report import StepReport
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
        report: what the last optimizer step cost, or ``None`` before the first.
    """

    def __init__(self, engine: Any, config: ZeroSyncConfig) -> None:
        self.engine = engine
        self.config = config
        self.report: StepReport | None = None
        optimizer = engine.optimizer
        stage_3 = engine.zero_optimization_stage() == 3
        self.window = Window((Stage3Reducer if stage_3 else Stage12Reducer)(optimizer), config.coalesce)
        self._steps = 0
        self._clip_grad: float | None = None  # the configured norm, while another one is in force for the coming step
        self._counter = CollectiveCounter().start()
        for target, methods in ((engine, _EngineMethods), (optimizer, _Stage3Methods if stage_3 else _Stage12Methods)):
            target._zerosync = self
            interpose(target, methods)

    def reduce(self) -> None:
        """Reduce the window now, so that code between here and ``step()`` sees averaged gradients. Collective."""
        self.window.reduce()

    def abort(self, reason: str = "abort() was called") -> None:
        """Drop the gradients of the open window and close it, with a warning and without a collective (W3)."""
        self.window.abort(reason)

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
        self._counter.stop()
        for target in (self.engine, self.engine.optimizer):
            restore(target)
            del target._zerosync

    @contextmanager
    def _step(self) -> Iterator[None]:
        """Around the ZeRO optimizer's own step."""
        self.window.begin_step()
        try:
            with torch.profiler.record_function("zerosync::step"):
                yield
        finally:
            self._restore_clipping()
        self._steps += 1
        self.report = StepReport(self._steps, self.window.backwards, self.window.reductions, self._counter.take())
        self.window.end_step()

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

    def backward(self, loss: Any, *args: Any, **kwargs: Any) -> Any:
        with self._zerosync.window.engine_backward():
            return super().backward(loss, *args, **kwargs)  # type: ignore[misc]

    def _backward_prologue(self) -> None:
        self._zerosync.window.inside_graph()
        super()._backward_prologue()  # type: ignore[misc]

    def allreduce_gradients(self, *args: Any, **kwargs: Any) -> None:
        # The end of a backward. Unmanaged accumulation calls it from step() as well, where the window closes itself.
        self._zerosync.window.backward_done()

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
    def process_gradients(self, param: torch.nn.Parameter, i: int) -> None:
        self._zerosync.window.inside_graph()  # the gradient stays where autograd accumulates it


class _Stage3Methods(_OptimizerMethods):
    def reduce_ready_partitions_and_remove_grads(self, param: torch.nn.Parameter) -> None:
        self._zerosync.window.inside_graph()  # the gradient stays where autograd accumulates it
