"""Overrides, under ``ZeroSyncStrategy``, of Lightning's callbacks that refuse DeepSpeed or are wrong with it."""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from zerosync_strategy.frontend import Stock, copy_problem, interpose, readable, restore

from .library import (
    WEIGHT_AVERAGING,
    BackboneFinetuning,
    BaseFinetuning,
    Callback,
    GradientAccumulationScheduler,
    LightningModule,
    MisconfigurationException,
    StochasticWeightAveraging,
    Timer,
    Trainer,
)
from .precision import overrides


class _Proxy:
    """A proxy of ``target``, with another class and the attributes in ``replaced``."""

    def __init__(self, target: object, **replaced: Any) -> None:
        vars(self).update(replaced, _target=target)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self._target, name, value)


def _without_deepspeed(trainer: Trainer) -> Any:
    """Return a proxy of ``trainer`` whose strategy is no DeepSpeed strategy by ``isinstance``."""
    return _Proxy(trainer, strategy=_Proxy(trainer.strategy))


class CallbackOverrides(Stock):
    """Overrides of a callback."""

    @property
    def state_key(self) -> str:
        """The key of the callback's state in checkpoints: Lightning's own, with the original name of the class."""
        key: str = super().state_key
        return key.removeprefix("ZeroSync")


class SchedulerOverrides(CallbackOverrides):
    """Stock refuses DeepSpeed, because DeepSpeed's engine accumulates. Under ZeroSync, Lightning accumulates."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(_without_deepspeed(trainer), pl_module)


class WeightAveragingOverrides(CallbackOverrides):
    """Stock reads and writes parameters that ZeRO-3 has sharded, and expects the whole module in a checkpoint."""

    _average_model: Any
    _zerosync_average: list[tuple[Tensor, Tensor]] | None = None  # the average, while its model has the current values

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            _check_copy(self, pl_module)
        super().setup(trainer, pl_module, stage)

    def _swap_models(self, pl_module: LightningModule) -> None:
        # In half precision, the module cannot hold the average exactly, so the average is kept separately.
        kept, self._zerosync_average = self._zerosync_average, None
        if kept is None:
            module = self._average_model.module
            self._zerosync_average = [(tensor, tensor.data) for tensor in (*module.parameters(), *module.buffers())]
            for tensor, data in self._zerosync_average:
                tensor.data = data.clone()
        with _writable(pl_module):
            super()._swap_models(pl_module)
        for tensor, data in kept or ():
            tensor.data = data

    def _copy_average_to_current(self, pl_module: LightningModule) -> None:
        with _writable(pl_module):
            super()._copy_average_to_current(pl_module)

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        # The engine has already loaded the module's own state at the time of the save.
        with _writable(pl_module):
            own = pl_module.state_dict()
            given = {"state_dict": own, "current_model_state": own} | checkpoint
            super().on_load_checkpoint(trainer, pl_module, given)


class StochasticWeightAveragingOverrides(CallbackOverrides):
    """Stock refuses DeepSpeed, uses parameters that ZeRO-3 has sharded, and expects states to be loaded earlier."""

    state_key: str

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            _check_copy(self, pl_module)
            super().setup(_without_deepspeed(trainer), pl_module, stage)

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        saved = checkpoint.get("callbacks", {}).get(self.state_key) or {}
        if saved.get("scheduler_state") is not None:  # of a scheduler that on_train_epoch_start() makes
            self._clear_schedulers(trainer)

    def update_parameters(self, average_model: LightningModule, model: LightningModule, *args: object) -> None:
        with readable(model.parameters()):
            super().update_parameters(average_model, model, *args)

    def transfer_weights(self, average_model: LightningModule, model: LightningModule) -> None:
        with _writable(model):
            super().transfer_weights(average_model, model)


class FinetuningOverrides(CallbackOverrides):
    """Stock refuses DeepSpeed, because it cannot add parameters to an optimizer. Here they are in it, frozen."""

    _restarting: bool
    _zerosync_froze: list[Parameter]

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        trained = [param for param in pl_module.parameters() if param.requires_grad]
        super().setup(_without_deepspeed(trainer), pl_module, stage)
        self._zerosync_froze = [param for param in trained if not param.requires_grad]

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._restarting = False  # the optimizer's groups are the engine's
        super().on_fit_start(trainer, pl_module)
        groups = [group["params"] for optimizer in trainer.optimizers for group in optimizer.param_groups]
        held = {param for params in groups for param in params}
        missing = sum(param not in held for param in self._zerosync_froze)
        problem = (
            f"{type(self).__name__.removeprefix('ZeroSync')} has frozen {missing} parameters that are not in the"
            " optimizer, to which ZeRO cannot add any once the engine is built. Give them to the optimizer in"
            " configure_optimizers(), as its last groups: while frozen, they are not stepped. What is never thawed,"
            " freeze in the module itself."
        )
        own = isinstance(self, BackboneFinetuning) and not overrides(self, BackboneFinetuning, "finetune_function")
        if missing and own:  # Lightning's own, which adds them
            raise MisconfigurationException(problem)
        if missing:  # a program's may add them, which is an error then
            warnings.warn(problem, stacklevel=1)


class TimerOverrides(CallbackOverrides):
    """Stock checks the elapsed time of a resumed run in ``on_fit_start()``, but here it is restored only later."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        timer: Any = self
        timer.on_fit_start(trainer)


_OVERRIDES: dict[type[Callback], type[CallbackOverrides]] = {
    GradientAccumulationScheduler: SchedulerOverrides,
    **dict.fromkeys(WEIGHT_AVERAGING, WeightAveragingOverrides),
    StochasticWeightAveraging: StochasticWeightAveragingOverrides,
    BaseFinetuning: FinetuningOverrides,
    Timer: TimerOverrides,
}


def adapt(trainer: Trainer) -> None:
    """Make the callbacks of ``trainer`` work as without DeepSpeed, until :func:`leave`."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        for stock, layer in _OVERRIDES.items():
            if isinstance(callback, stock) and not isinstance(callback, layer):
                interpose(callback, layer)


def thaws(trainer: Trainer) -> bool:
    """Return whether a callback may unfreeze parameters that are frozen when the training starts."""
    return any(isinstance(callback, BaseFinetuning) for callback in trainer.callbacks)  # type: ignore[attr-defined]


def leave(trainer: Trainer) -> None:
    """Restore the callbacks of ``trainer``."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        for layer in _OVERRIDES.values():
            if isinstance(callback, layer):
                restore(callback, layer)


def _check_copy(callback: object, pl_module: LightningModule) -> None:
    if problem := copy_problem(pl_module):
        raise MisconfigurationException(f"{type(callback).__name__.removeprefix('ZeroSync')} {problem}")


def _writable(pl_module: LightningModule) -> AbstractContextManager[None]:
    """While active, parameters have their full values on any stage, and written values persist. Collective."""
    from deepspeed import zero

    gathered: AbstractContextManager[None] = zero.GatheredParameters(list(pl_module.parameters()), modifier_rank=0)
    return gathered
