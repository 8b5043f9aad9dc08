"""What a program does with the gradients of the coming step: it reads, changes and clips them, and says what of."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from zerosync_strategy.core.engine import zero, zero3, zero12
from zerosync_strategy.core.gradients.changes import LocalChanges
from zerosync_strategy.core.gradients.full import hide_gradients, show_gradients, take_gradients_back
from zerosync_strategy.core.gradients.layout import FlatLayout
from zerosync_strategy.core.gradients.reducer import Reducer
from zerosync_strategy.core.gradients.stage12 import Stage12Reducer
from zerosync_strategy.core.gradients.window import Window, WindowState
from zerosync_strategy.core.optimizer.states import StripedStates, full_from, into_shard


class ComingStep:
    """The gradients of the window, as a program sees them before the step.

    Implements :class:`~engine.fragments.FragmentHooks`.

    Args:
        engine: the DeepSpeed engine.
        reducer, window: of its gradients.
        changes: of local gradients.
        states: in which order the optimizer has its shards; ``None`` on stage 3.
        activity: around what may communicate.
    """

    def __init__(
        self,
        engine: Any,
        reducer: Reducer,
        window: Window,
        changes: LocalChanges,
        states: StripedStates | None,
        activity: Callable[[str], AbstractContextManager[None]],
    ) -> None:
        self._engine = engine
        self._reducer = reducer
        self._window = window
        self._changes = changes
        self._states = states
        self._activity = activity
        self._configured_clip_norm: float | None = None  # while another one is in force
        self._shows_gradients = False  # in full_gradients(): what the parameters have is the gradient to step

    def reduce(self) -> None:
        """Reduce the window now. Collective."""
        with self._activity("the reduction"):
            self._window.reduce()

    def gradient_norm(self) -> torch.Tensor:
        """Return the norm of the window's gradients; see :meth:`ZeroSync.gradient_norm`."""
        self.reduce()
        if self._shows_gradients:
            take_gradients_back(self._reducer)
        if self._window.state is WindowState.CLOSED:
            return torch.zeros((), device=self._engine.device)
        return self._reducer.compute_norm() / zero.loss_scale(self._engine.optimizer)

    def mean_over(self, items: float | torch.Tensor, losses_divided_by: float) -> None:
        """Let the step be that of a mean over items; see :meth:`ZeroSync.mean_over`."""
        if self._window.state is WindowState.REDUCED:
            raise RuntimeError(
                "mean_over() was called between the reduction of the gradients and the optimizer step that uses them."
                " Call it before the backward of the loss that it is about."
            )
        self._reducer.items.add(items, losses_divided_by)

    def dropped(self) -> None:
        """``zero_grad()`` drops the gradients."""
        self._shows_gradients = False  # they are dropped with those in the shards
        if self._window.state is WindowState.REDUCED:
            self.restore_clip_norm()  # it was asked for the gradients that are dropped

    # ---- clipping --------------------------------------------------------------------------------------------------

    def clip(self, max_norm: float) -> None:
        """Clip the step, and only it, to ``max_norm``."""
        before = zero.swap_clip_norm(self._engine.optimizer, max_norm)
        if self._configured_clip_norm is None:
            self._configured_clip_norm = before
        if self._shows_gradients:
            self._clip_shown()

    @property
    def is_clipped(self) -> bool:
        """Whether the step is to be clipped to another norm than the configured one."""
        return self._configured_clip_norm is not None

    def restore_clip_norm(self) -> None:
        """From here on the configured norm is in force."""
        if self._configured_clip_norm is not None:
            zero.swap_clip_norm(self._engine.optimizer, self._configured_clip_norm)
            self._configured_clip_norm = None

    def _clip_shown(self) -> None:
        """Clip the gradients that the parameters show, instead of the step. Collective."""
        if max_norm := zero.swap_clip_norm(self._engine.optimizer, 0.0):
            coefficient = (max_norm / (self.gradient_norm() + 1e-6)).clamp(max=1.0)
            for gradient in (param.grad for param in self._reducer.params if param.grad is not None):
                gradient.mul_(coefficient.to(gradient.device))

    # ---- all gradients, on the parameters --------------------------------------------------------------------------

    @contextmanager
    def full_gradients(self) -> Iterator[None]:
        """Around code that sees and changes averaged gradients; see :meth:`ZeroSync.full_gradients`."""
        self.reduce()
        if self._shows_gradients or self._window.state is WindowState.CLOSED:
            yield
            return
        with self._activity("the gather of the gradients"):
            show_gradients(self._reducer)
        self._shows_gradients = True
        try:
            if self.is_clipped:
                self._clip_shown()  # it was asked for before
            with zero3.accepting_gradients(self._reducer.params):
                yield
            if self._shows_gradients:
                take_gradients_back(self._reducer)
        finally:
            if self._shows_gradients:
                hide_gradients(self._reducer)
            self._shows_gradients = False

    @contextmanager
    def local_gradients(self) -> Iterator[None]:
        """Around code that sees and changes local gradients; see :meth:`ZeroSync.local_gradients`."""
        with zero3.accepting_gradients(self._reducer.params):
            yield
        if self._window.state is WindowState.OPEN:
            self._changes.note()

    # ---- one gradient or master weight, by DeepSpeed's functions ---------------------------------------------------

    def full_gradient(self, param: Any, stock: Callable[[], Any]) -> Any:
        if self._shows_gradients:
            return param.grad
        if self._window.state is WindowState.CLOSED:
            raise ValueError(
                "safe_get_full_grad() was called, but no backward ran since the last optimizer step, which has used the"
                " gradients up. Call it between backward and step."
            )
        with self._activity("safe_get_full_grad()"):
            is_local = self._reducer.keeps_gradients and not self._window.early_reductions
            if self._window.state is WindowState.OPEN and is_local:
                return self._average(param)
            self._window.reduce()
            if self._states is None:
                return stock()
            layout, shard = self._gradient_shard(param)
            return full_from(shard, layout, layout.own_slices(param), param)

    def set_full_gradient(self, param: Any, value: torch.Tensor) -> None:
        self.check_gradients("safe_set_full_grad()")
        layout, shard = self._gradient_shard(param)
        into_shard(value, shard, layout.own_slices(param))

    def full_master(self, param: Any, key: str | None) -> torch.Tensor:
        assert self._states is not None
        with self._activity("safe_get_full_fp32_param()"):
            return self._states.read(param, key)

    def set_full_master(self, param: Any, value: torch.Tensor, key: str | None) -> None:
        assert self._states is not None
        self._states.write(param, value, key)

    def check_gradients(self, function: str) -> None:
        """Raise where the gradients in the shards are not those that the step uses."""
        if self._window.state is not WindowState.REDUCED:
            when = "they are still each rank's own" if self._window.state is WindowState.OPEN else "there are none"
            raise RuntimeError(
                f"{function} reaches the averaged gradients in ZeRO's shards, and {when}. Call it between backward and"
                " step, after reduce() of the handle that attach() returned; or use 'with zerosync.full_gradients():',"
                " where param.grad is the averaged gradient, to read and to change."
            )
        if zero.offloads(self._engine.optimizer) and "set" in function:
            raise RuntimeError(
                f"{function} does not reach an offloaded optimizer's norm of the gradients. Use 'with"
                " zerosync.full_gradients():', where param.grad is the averaged gradient, to read and to change."
            )
        self._reducer.norm = None

    def _gradient_shard(self, param: Any) -> tuple[FlatLayout, torch.Tensor]:
        reducer = self._reducer
        assert isinstance(reducer, Stage12Reducer)
        layout = next(layout for layout in reducer.layouts if param in layout.offsets)
        return layout, zero12.gradient_shard(reducer.optimizer, layout.group_index)

    def _average(self, param: Any) -> torch.Tensor:
        """Return the average of a gradient that is local on every rank. The window stays open. Collective."""
        from deepspeed import comm

        layout = next(layout for layout in self._reducer.layouts if any(each is param for each in layout.params))
        total = torch.zeros(zero3.full_shape(param), device=param.device)
        if param.grad is not None:
            total += param.grad
        comm.all_reduce(total, group=layout.process_group)
        return total.div_(layout.divisor)
