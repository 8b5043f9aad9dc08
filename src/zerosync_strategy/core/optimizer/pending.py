"""User access to pending gradients, between backward and step: read, modify, clip, normalise.

Averaged gradients are in shards. ``full_gradients()`` gathers them onto the parameters. Afterwards each rank copies its
own part of the changes back. Unchanged elements keep their value in the shard, which may have a wider dtype.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn

from zerosync_strategy.core.comm.collectives import all_reduce
from zerosync_strategy.core.engine import zero, zero3, zero3_optimizer, zero12
from zerosync_strategy.core.engine.several import groups_of, shows_parameters
from zerosync_strategy.core.engine.types import DeepSpeedEngine
from zerosync_strategy.core.failures.rank_state import Doing
from zerosync_strategy.core.gradients.layout import ShardLayout
from zerosync_strategy.core.gradients.reducer import Reducer
from zerosync_strategy.core.gradients.window import Window, WindowState
from zerosync_strategy.core.optimizer.masters import StripedStates
from zerosync_strategy.core.optimizer.whole import WholeStepper

FULL_GRADIENTS = "full gradients"
"""The report's name for traffic of programs that read gradients."""

Section = Callable[[str], AbstractContextManager[None]]


class PendingGradients:
    """Access to the gradients of one engine's window, before the step.

    ``activity`` wraps what may communicate. ``apart`` wraps traffic that is counted separately from the step's.
    """

    def __init__(
        self, engine: DeepSpeedEngine, reducer: Reducer, window: Window, activity: Section, apart: Section
    ) -> None:
        self._engine, self._reducer, self._window = engine, reducer, window
        self._activity, self._apart = activity, apart
        self._configured_clip_norm: float | None = None  # while another clip norm is in force
        self._are_shown = False  # in full_gradients(): the step uses the gradients on the parameters

    def groups(self, stock: Sequence[MutableMapping[str, Any]]) -> Sequence[MutableMapping[str, Any]]:
        """Return DeepSpeed's parameter groups with the module's parameters."""
        return stock if shows_parameters(stock) else groups_of(stock, self._groups)

    @functools.cached_property
    def _groups(self) -> list[list[nn.Parameter]]:
        optimizer = self._engine.optimizer
        if zero.stage(self._engine) == 3:
            return zero3_optimizer.torch_groups(optimizer)
        return [zero12.params_in_order(optimizer, index) for index, _ in enumerate(optimizer.optimizer.param_groups)]

    def reduce(self) -> None:
        with self._activity(Doing.REDUCTION):
            self._window.reduce()

    def gradient_norm(self) -> torch.Tensor:
        """Return the norm of the window's gradients; see :meth:`ZeroSync.gradient_norm`."""
        self.reduce()
        if self._are_shown:
            self._take_back()
        if self._window.state is WindowState.CLOSED:
            return torch.zeros((), device=self._engine.device)
        return self._reducer.norm.value() / self._engine.optimizer.loss_scale

    def mean_over(self, items: float | torch.Tensor, losses_divided_by: float) -> None:
        """Count items over which the step takes the mean; see :meth:`ZeroSync.mean_over`."""
        if self._window.state is WindowState.REDUCED:
            raise RuntimeError(
                "mean_over() was called between the reduction of the gradients and the optimizer step that uses them."
                " Call it before the backward of the loss that it is about."
            )
        self._reducer.items.add(items, losses_divided_by)

    def dropped(self) -> None:
        """Forget what applies to gradients that ``zero_grad()`` drops."""
        self._are_shown = False  # the shown gradients are dropped with the shards
        if self._window.state is WindowState.REDUCED:
            self.restore_clip_norm()  # clip() applied to the dropped gradients

    # ---- clipping --------------------------------------------------------------------------------------------------

    def clip(self, max_norm: float) -> None:
        """Clip the gradients of this step only to ``max_norm``."""
        before = zero.swap_clip_norm(self._engine.optimizer, max_norm)
        if self._configured_clip_norm is None:
            self._configured_clip_norm = before
        if self._are_shown:
            self._clip_shown()

    @property
    def is_clipped(self) -> bool:
        return self._configured_clip_norm is not None

    def restore_clip_norm(self) -> None:
        if self._configured_clip_norm is not None:
            zero.swap_clip_norm(self._engine.optimizer, self._configured_clip_norm)
            self._configured_clip_norm = None

    def _clip_shown(self) -> None:
        """Clip the gradients shown on the parameters, and switch clipping in the step off. Collective."""
        if max_norm := zero.swap_clip_norm(self._engine.optimizer, 0.0):
            coefficient = (max_norm / (self.gradient_norm() + 1e-6)).clamp(max=1.0)
            for gradient in (param.grad for param in self._reducer.params if param.grad is not None):
                gradient.mul_(coefficient.to(gradient.device))

    # ---- all gradients, on the parameters --------------------------------------------------------------------------

    @contextmanager
    def full_gradients(self) -> Iterator[None]:
        """Show averaged gradients to code that reads or changes them; see :meth:`ZeroSync.full_gradients`."""
        self.reduce()
        if self._are_shown or self._window.state is WindowState.CLOSED:
            yield
            return
        with self._activity(Doing.GRADIENTS), self._apart(FULL_GRADIENTS):
            self._show()
        self._are_shown = True
        try:
            if self.is_clipped:
                self._clip_shown()  # clip() was called before
            with zero3.in_full_shapes(self._reducer.params):
                yield
            if self._are_shown:
                self._take_back()
        finally:
            if self._are_shown:  # from here on the gradients in the shards count
                for param in self._reducer.params:
                    param.grad = None
            self._are_shown = False

    @torch.no_grad()
    def _show(self) -> None:
        """Set every ``param.grad`` to the averaged gradient, without the loss scale. Collective."""
        for layout in self._reducer.layouts:
            first = layout.params[0]
            memory = layout.gather_shards(first.dtype, first.device, functools.partial(self._read_shard, layout))
            for param in layout.params:
                gradient = layout.gradient_in(memory, param).view(zero3.full_shape(param))
                with zero3.as_it_is(), zero3.in_full_shapes((param,)):
                    param.grad = gradient.clone()  # the program may keep it

    def _read_shard(self, layout: ShardLayout, into: torch.Tensor, offset: int) -> None:
        """Copy this rank's shard from ``offset`` on, without the loss scale."""
        parts = self._reducer.shards.parts(layout, offset, into.numel())
        for place, part in zip(into.split([part.numel() for part in parts]), parts, strict=True):
            place.copy_(self._unscaled(part, into.dtype))

    @torch.no_grad()
    def _take_back(self) -> None:
        """Copy this rank's part of the shown gradients into its shards; zeros for a gradient set to ``None``."""
        for param, own, target in self._reducer.shards.of_params():
            self._write(None if param.grad is None else param.grad.reshape(-1)[own.start : own.stop], target)
        self._reducer.shards.hand_over()
        self._reducer.norm.changed()

    def _write(self, part: torch.Tensor | None, target: torch.Tensor) -> None:
        if part is None:
            target.zero_()
            return
        scale, part = self._engine.optimizer.loss_scale, part.to(target.device)
        scaled = part if scale == 1 else part.float() * scale
        unchanged = part == self._unscaled(target, part.dtype)
        target.copy_(torch.where(unchanged, target, scaled.to(target.dtype)))

    def _unscaled(self, shard: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        scale = self._engine.optimizer.loss_scale
        return (shard if scale == 1 else shard.float() / scale).to(dtype)

    @contextmanager
    def local_gradients(self) -> Iterator[None]:
        """Let code read and change local gradients; see :meth:`ZeroSync.local_gradients`."""
        if self._window.last.began and self._reducer.keeps_gradients and self._window.state is WindowState.OPEN:
            raise RuntimeError(
                "local_gradients() was called after a backward that was taken for the last before the step, and the"
                " gradients are reduced already. Where more backwards follow, call zerosync.window.expect_last(False)"
                " before this one; or pass overlap_last=False, with which none is taken for the last."
            )
        with zero3.in_full_shapes(self._reducer.params):
            yield
        if self._window.state is WindowState.OPEN:
            self._window.changes.note(reduced=False)

    # ---- one gradient, by DeepSpeed's functions (engine/param_functions.py) ----------------------------------------

    def full_gradient(self, param: nn.Parameter, stock: Callable[[], torch.Tensor | None]) -> torch.Tensor | None:
        """Return the averaged gradient of ``param``; ``stock`` reads it from the shards. Collective."""
        if self._are_shown:
            return param.grad
        if self._window.state is WindowState.CLOSED:
            raise ValueError(
                "safe_get_full_grad() was called, but no backward ran since the last optimizer step, which has used the"
                " gradients up. Call it between backward and step."
            )
        with self._activity("safe_get_full_grad()"):
            is_local = self._reducer.keeps_gradients and not self._window.early_reductions
            averages = self._window.state is WindowState.OPEN and is_local
            if not averages:
                self._window.reduce()
            with self._apart(FULL_GRADIENTS):
                return self._average(param) if averages else stock()

    def check_reduced(self, function: str) -> None:
        """Raise a ``RuntimeError`` if DeepSpeed's ``function`` would not reach the gradients that the step uses."""
        if self._window.state is not WindowState.REDUCED:
            when = "they are still each rank's own" if self._window.state is WindowState.OPEN else "there are none"
            raise RuntimeError(
                f"{function} reaches the averaged gradients in ZeRO's shards, and {when}. Call it between backward and"
                " step, after engine.zerosync.reduce(); or use 'with zerosync.full_gradients():',"
                " where param.grad is the averaged gradient, to read and to change."
            )
        if zero.offloads(self._engine.optimizer) and "set" in function:
            raise RuntimeError(
                f"{function} does not reach an offloaded optimizer's norm of the gradients. Use 'with"
                " zerosync.full_gradients():', where param.grad is the averaged gradient, to read and to change."
            )
        self._reducer.norm.changed()

    def _average(self, param: nn.Parameter) -> torch.Tensor:
        """Return the average of a gradient that is local on every rank. The window stays open. Collective."""
        layout = next(layout for layout in self._reducer.layouts if any(each is param for each in layout.params))
        total = torch.zeros(zero3.full_shape(param), device=param.device)
        if param.grad is not None:
            total += param.grad
        all_reduce(total, layout.process_group, layout.counter)
        return total.div_(layout.divisor)


class FlatPendingGradients(PendingGradients):
    """Pending gradients of stages 1 and 2, where DeepSpeed's functions would expect shards in its own layout.

    ``whole`` steps an optimizer that needs whole parameters, and holds its states, each on the parameter's owner.
    """

    def __init__(self, *common: Any, states: StripedStates, whole: WholeStepper | None) -> None:
        super().__init__(*common)
        self._states, self._whole = states, whole

    def full_gradient(self, param: nn.Parameter, stock: Callable[[], torch.Tensor | None]) -> torch.Tensor | None:
        return super().full_gradient(param, lambda: self._states.layout_of(param).read(self._shard(param), param))

    def set_full_gradient(self, param: nn.Parameter, value: torch.Tensor) -> None:
        """Set this rank's part of the averaged gradient of ``param``."""
        self.check_reduced("safe_set_full_grad()")
        self._states.layout_of(param).write(value, self._shard(param), param)

    def full_master(self, param: nn.Parameter, key: str | None) -> torch.Tensor:
        """Return the master weights of ``param``, or its state ``key``. Collective."""
        with self._activity("safe_get_full_fp32_param()"):
            if key is not None and self._whole is not None:
                return self._whole.read_state(param, key)
            return self._states.read(param, key)

    def set_full_master(self, param: nn.Parameter, value: torch.Tensor, key: str | None) -> None:
        """Set this rank's part of what :meth:`full_master` returns."""
        if key is not None and self._whole is not None:
            self._whole.write_state(param, value, key)
        else:
            self._states.write(param, value, key)

    def _shard(self, param: nn.Parameter) -> torch.Tensor:
        return zero12.gradient_shard(self._reducer.optimizer, self._states.layout_of(param).group_index)
