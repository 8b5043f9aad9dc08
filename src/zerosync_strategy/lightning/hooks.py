"""Lightning's hooks by which a program reads or changes gradients, and checks of their use (N1)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from zerosync_strategy.frontend import ZeroSync

from .library import Callback, GradientAccumulationScheduler, LightningModule, MisconfigurationException, Trainer

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


def overrides(target: Any, base: type, name: str) -> bool:
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
    """Wrap hooks before the step of ``own``: gradients of other optimizers are not averaged yet, and must not change.

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


def _version(gradient: Any) -> int:
    return -1 if gradient is None else int(gradient._version)
