"""Calls of a program to Fabric that ZeRO changes: setting up a model before its optimizer, backwards, and clipping."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from zerosync_strategy import frontend
from zerosync_strategy.core.engine import patches
from zerosync_strategy.frontend import DeepSpeedEngine, Stock, ZeroSync, leave_sharded


class PreparedModule(Module):
    """The module that ``fabric.setup_module()`` returns for a model.

    Until the model has an optimizer, it calls the model, and a backward that reaches the model's parameters raises.
    From :meth:`train_with` on, it calls the engine.

    Args:
        module: the model.
        sharding: DeepSpeed's engine without an optimizer, which shards the model; on stage 3 only.
    """

    engine: DeepSpeedEngine | None

    def __init__(self, module: Module, sharding: DeepSpeedEngine | None = None) -> None:
        super().__init__()
        self.module = module
        self._sharding = sharding
        self._refusals = [
            param.register_post_accumulate_grad_hook(_refuse_gradient)
            for param in module.parameters()
            if param.requires_grad
        ]
        self.__dict__["engine"] = None  # not a submodule, which would change the names of parameters

    def forward(self, *args: object, **kwargs: object) -> object:
        return (self.engine or self.module)(*args, **kwargs)

    def stop_refusing(self) -> None:
        """Allow gradients and end the sharding of this module, before another engine is made for the model."""
        for refusal in self._refusals:
            refusal.remove()
        if self._sharding is not None:
            leave_sharded(self._sharding)
            self._sharding = None

    def train_with(self, engine: DeepSpeedEngine) -> None:
        """Call ``engine`` in each forward."""
        self.__dict__["engine"] = engine


def unwrap_prepared(value: Any) -> Any:
    """Return the engine of a :class:`PreparedModule` that has one; any other value unchanged."""
    return value.engine or value if isinstance(value, PreparedModule) else value


def allow_later_optimizers(package: str, strategy: type) -> None:
    """Make Fabric's ``setup_optimizers()`` in ``package`` call ``strategy``; stock refuses all DeepSpeed strategies."""

    def replacement(stock: Callable[..., None]) -> Callable[..., None]:
        @wraps(stock)
        def validate(self: Any, optimizers: Sequence[Optimizer]) -> None:
            if not isinstance(self._strategy, strategy):
                return stock(self, optimizers)
            self._validate_launched()
            if not optimizers:
                raise ValueError("fabric.setup_optimizers() got no optimizer. Pass the optimizer of each model.")

        return validate

    patches.replace(_of(package, patches.FABRIC, patches.OTHER_FABRIC), replacement)


def find_model_of_backward(package: str, strategy: type) -> None:
    """Allow ``fabric.backward(loss)`` with several models without ``model=``, as without DeepSpeed.

    In fp16, ``model=`` stays necessary, because each model scales its loss.
    """

    def replacement(stock: Callable[..., None]) -> Callable[..., None]:
        @wraps(stock)
        def backward(self: Any, tensor: Tensor, *args: object, model: object = None, **kwargs: object) -> None:
            if model is None and self._models_setup > 1 and isinstance(self._strategy, strategy):
                engines: list[DeepSpeedEngine] = [zerosync.engine for zerosync in self._strategy.zerosyncs]  # type: ignore[attr-defined]
                if engines and not any(engine.fp16_enabled() for engine in engines):
                    model = SimpleNamespace(_forward_module=engines[0])
            stock(self, tensor, *args, model=model, **kwargs)

        return backward

    patches.replace(_of(package, patches.FABRIC_BACKWARD, patches.OTHER_FABRIC_BACKWARD), replacement)


def _of(package: str, *found: patches.Patch) -> patches.Patch:
    (patch,) = (each for each in found if each.owner == f"{package}.Fabric")
    return patch


def _refuse_gradient(param: Tensor) -> None:
    raise RuntimeError(
        "A backward reached parameters of a model that was set up without an optimizer: their gradients would not be"
        " averaged over the ranks. Set up its optimizer by fabric.setup_optimizers(optimizer), or both together by"
        " fabric.setup(model, optimizer); or, if it is not to train, call model.requires_grad_(False) first."
    )


class OptimizerOverrides(Stock):
    """Overrides of a ZeRO optimizer."""

    def load_state_dict(self, *args: object, **kwargs: object) -> None:
        # DeepSpeed passes a list of shards, by keyword.
        if args and isinstance(args[0], Mapping):
            raise RuntimeError(
                "load_state_dict() of an optimizer under ZeRO was given the state of an optimizer without ZeRO, which"
                " it cannot shard. Load weights alone, or what fabric.save() has saved under ZeRO."
            )
        super().load_state_dict(*args, **kwargs)


class BackwardSync:
    """The control behind ``fabric.no_backward_sync``."""

    def no_backward_sync(self, module: Module, enabled: bool) -> AbstractContextManager[None]:
        """Suppress nothing. With ``enabled=False``, the next backward is the last, so it may reduce while it runs."""
        zerosync = frontend.handle_of(unwrap_prepared(module))
        if zerosync is not None:
            zerosync.window.expect_last(not enabled)
        return nullcontext()


def zerosync_of(optimizer: object) -> ZeroSync:
    """Return the handle of the engine of ``optimizer``; a ``RuntimeError`` if it has none."""
    zerosync = frontend.handle_of(optimizer)
    if zerosync is None:
        raise RuntimeError(
            f"The {type(optimizer).__name__} was not set up by fabric.setup(model, optimizer), which returns the"
            " optimizer to step and to clip."
        )
    return zerosync


def clip_norm(zerosync: ZeroSync, max_norm: float, norm_type: float, error_if_nonfinite: bool) -> Tensor:
    """See :meth:`ZeroSyncFabricStrategy.clip_gradients_norm`."""
    if norm_type != 2 or max_norm == 0 or zerosync.clips_next_step:
        with zerosync.full_gradients():
            return torch.nn.utils.clip_grad_norm_(
                zerosync.parameters, max_norm, norm_type=norm_type, error_if_nonfinite=error_if_nonfinite
            )
    norm = zerosync.gradient_norm()
    if error_if_nonfinite and not torch.isfinite(norm):
        raise RuntimeError(
            f"fabric.clip_gradients() found a norm of {norm.item()} and cannot clip to max_norm={max_norm}. Leave"
            " out the step, or pass error_if_nonfinite=False: DeepSpeed then skips it."
        )
    if not math.isinf(max_norm):
        zerosync.clip_next_step(max_norm)
    return norm
