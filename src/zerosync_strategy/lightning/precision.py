"""Precision under DeepSpeed: where Lightning closes the window, clips, and runs the program's hooks on gradients."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.optim import Optimizer
from typing_extensions import override

from zerosync_strategy.frontend import ZeroSync, handle_of

from .library import (
    Callback,
    DeepSpeedPrecision,
    GradClipAlgorithmType,
    GradientAccumulationScheduler,
    LightningModule,
    MisconfigurationException,
    Steppable,
    Trainer,
)

AFTER_BACKWARD = "on_after_backward"
BEFORE_STEP = "on_before_optimizer_step"
CLIPPING = "configure_gradient_clipping"


def overridden_hooks(trainer: Trainer) -> frozenset[str]:
    """Return the hooks on gradients that the module overrides, or (but for clipping) a callback."""
    module, callbacks = trainer.lightning_module, trainer.callbacks  # type: ignore[attr-defined]
    found = {name for name in (AFTER_BACKWARD, BEFORE_STEP, CLIPPING) if overrides(module, LightningModule, name)}
    for callback in callbacks:
        found |= {name for name in (AFTER_BACKWARD, BEFORE_STEP) if overrides(callback, Callback, name)}
    return frozenset(found)


def overrides(target: object, base: type, name: str) -> bool:
    """Return whether ``target`` overrides the method ``name`` of ``base``."""
    return getattr(getattr(target, name), "__func__", None) is not getattr(base, name)


def check_local_gradients(trainer: Trainer, zerosyncs: Sequence[ZeroSync], hooks: frozenset[str]) -> None:
    """Check that an overridden ``on_after_backward`` finds gradients, if the program accumulates.

    Raises:
        MisconfigurationException: a backward leaves no gradients on the parameters.
    """
    if AFTER_BACKWARD not in hooks or all(zerosync.keeps_gradients for zerosync in zerosyncs):
        return
    scheduled = any(isinstance(each, GradientAccumulationScheduler) for each in trainer.callbacks)  # type: ignore[attr-defined]
    if trainer.lightning_module.automatic_optimization and trainer.accumulate_grad_batches == 1 and not scheduled:
        return  # every backward is the last of its window
    raise MisconfigurationException(
        "on_after_backward() is overridden, and would find no gradients in param.grad: coalesce=False,"
        " grad_memory_budget or a 'data_types.grad_accum_dtype' other than the parameters' takes them away in every"
        " backward. Leave that option out, or use on_before_optimizer_step(), which finds the averaged gradients."
    )


@contextmanager
def others_unchanged(zerosyncs: Sequence[ZeroSync], own: ZeroSync) -> Iterator[None]:
    """Around hooks before the step of ``own``: gradients of other optimizers are not averaged yet, and must not change.

    Raises:
        MisconfigurationException: such a gradient was changed.
    """
    others = [param for zerosync in zerosyncs if zerosync is not own for param in zerosync.parameters]
    before = [(param.grad, _version(param.grad)) for param in others]
    yield
    for param, (gradient, version) in zip(others, before, strict=True):
        if param.grad is not gradient or _version(gradient) != version:
            raise MisconfigurationException(
                "on_before_optimizer_step() changed gradients of parameters that another optimizer trains. Those are"
                " not averaged over the ranks before that optimizer's own step. Change only the gradients of the"
                " optimizer that the hook is given."
            )


def _version(gradient: torch.Tensor | None) -> int:
    return -1 if gradient is None else int(gradient._version)


CLIP_BY_VALUE = (
    "ZeRO cannot clip gradients by value: each rank holds a partition. Got gradient_clip_algorithm='value'; use 'norm'."
)


NO_STEP = (
    "StochasticWeightAveraging runs an epoch without backwards, for the statistics of batch normalisation, and"
    " Lightning steps at its end with the gradients of the step before it, which ZeRO does not keep. ZeroSync leaves"
    " that step out: the parameters are their average."
)


class ZeroSyncPrecision(DeepSpeedPrecision):
    """``DeepSpeedPrecision`` that reduces before ``on_before_optimizer_step`` and clips the next step by norm.

    Hooks that the program has overridden see averaged gradients on the parameters, as under DDP (N1).
    """

    _closing: ZeroSync | None = None
    """The handle whose window's last backward runs, if Lightning knows that it is the last."""

    @override
    def backward(  # type: ignore[override]
        self, tensor: torch.Tensor, model: LightningModule, optimizer: Steppable | None, *args: object, **kwargs: object
    ) -> None:
        """Run the backward of all engines by the first one, whose hooks gather the parameters."""
        zerosyncs = model.trainer.strategy.zerosyncs  # type: ignore[attr-defined]
        if model.automatic_optimization and self._closing is None:
            for zerosync in zerosyncs:
                zerosync.window.expect_last(False)
        with ExitStack() as stack:
            if len(zerosyncs) > 1:
                for zerosync in zerosyncs:
                    stack.enter_context(zerosync.awaiting_backward())
            if overrides(model, LightningModule, "backward"):  # with DeepSpeed, Lightning warns and ignores it
                engine: Any = model.trainer.model
                model.backward(engine.scale(tensor) if engine.fp16_enabled() else tensor, *args, **kwargs)
            else:
                super().backward(tensor, model, optimizer, *args, **kwargs)

    @override
    def post_backward(self, tensor: torch.Tensor, module: LightningModule) -> torch.Tensor:  # type: ignore[override]
        strategy: Any = module.trainer.strategy
        with ExitStack() as stack:
            if self._closing is not None:
                stack.enter_context(self._gradients_for(module, self._closing, AFTER_BACKWARD))
            elif AFTER_BACKWARD in strategy.gradient_hooks:
                for zerosync in strategy.zerosyncs:
                    stack.enter_context(zerosync.local_gradients())
            return super().post_backward(tensor, module)

    @override
    def optimizer_step(  # type: ignore[override]
        self, optimizer: Steppable, model: LightningModule, closure: Callable[[], object], **kwargs: object
    ) -> object:
        zerosync = _zerosync_of(optimizer)
        if model.automatic_optimization and model.trainer.fit_loop._skip_backward:
            warnings.warn(NO_STEP, stacklevel=1)
            return closure()
        if model.automatic_optimization:
            zerosync.window.expect_last()  # the closure's backward: Lightning calls this after accumulation only
            self._closing = zerosync
        try:
            result = closure()
        finally:
            self._closing = None
        if not model.automatic_optimization:
            zerosync.window.check_zeroed()
        no_backward = not zerosync.has_backward  # else the closure or the program itself ran one
        zerosync.reduce()
        hooks = (BEFORE_STEP, CLIPPING) if model.automatic_optimization else (BEFORE_STEP,)
        with self._gradients_for(model, zerosync, *hooks):
            self._after_closure(model, optimizer)
        if result is None and no_backward and model.automatic_optimization:
            raise MisconfigurationException(
                "training_step() returned None, so no backward ran, and DeepSpeed cannot leave out its step. Return a"
                " loss, or use manual optimization and leave out optimizer.step()."
            )
        zerosync.engine.step(**kwargs)
        return result

    @contextmanager
    def _gradients_for(self, model: LightningModule, zerosync: ZeroSync, *hooks: str) -> Iterator[None]:
        """Around calls of ``hooks``: if one is overridden, the parameters have their averaged gradients."""
        strategy: Any = model.trainer.strategy
        if strategy.gradient_hooks.isdisjoint(hooks):
            yield
            return
        with zerosync.full_gradients(), others_unchanged(strategy.zerosyncs, zerosync):
            yield

    @override
    def clip_gradients(
        self,
        optimizer: Optimizer,
        clip_val: int | float = 0.0,
        gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
    ) -> None:
        if gradient_clip_algorithm == GradClipAlgorithmType.VALUE:
            raise MisconfigurationException(CLIP_BY_VALUE)
        if clip_val > 0:
            _zerosync_of(optimizer).clip_next_step(float(clip_val))


def _zerosync_of(optimizer: object) -> ZeroSync:
    zerosync = handle_of(optimizer)
    if zerosync is None:
        raise MisconfigurationException("Gradients can be clipped and stepped in Trainer.fit() only.")
    return zerosync
