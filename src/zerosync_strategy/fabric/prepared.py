"""``fabric.setup_module()`` first, ``fabric.setup_optimizers()`` later: a model that gets its engine later."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from types import SimpleNamespace
from typing import Any

from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from zerosync_strategy.core.engine import patches
from zerosync_strategy.frontend import leave_sharded


class PreparedModule(Module):
    """The module that ``fabric.setup_module()`` returns for a model.

    Until the model has an optimizer, it calls the model, and a backward that reaches the model's parameters raises.
    From :meth:`train_with` on, it calls the engine.

    Args:
        module: the model.
        sharding: DeepSpeed's engine without an optimizer, which shards the model; on stage 3 only.
    """

    engine: Any

    def __init__(self, module: Module, sharding: Any = None) -> None:
        super().__init__()
        self.module = module
        self._sharding = sharding
        self._refusals = [
            param.register_post_accumulate_grad_hook(_refuse_gradient)
            for param in module.parameters()
            if param.requires_grad
        ]
        self.__dict__["engine"] = None  # not a submodule, which would change the names of parameters

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return (self.engine or self.module)(*args, **kwargs)

    def stop_refusing(self) -> None:
        """Allow gradients and end the sharding of this module, before another engine is made for the model."""
        for refusal in self._refusals:
            refusal.remove()
        if self._sharding is not None:
            leave_sharded(self._sharding)
            self._sharding = None

    def train_with(self, engine: Any) -> None:
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
        def backward(self: Any, tensor: Tensor, *args: Any, model: Any = None, **kwargs: Any) -> None:
            if model is None and self._models_setup > 1 and isinstance(self._strategy, strategy):
                engines: list[Any] = [zerosync.engine for zerosync in self._strategy.zerosyncs]  # type: ignore[attr-defined]
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
