"""``Trainer(strategy=ZeroSyncStrategy(stage=3))``: Lightning owns accumulation, ZeroSync owns synchronisation."""

from __future__ import annotations

import copy
import inspect
import warnings
import weakref
from types import SimpleNamespace
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.core.optimizer import _init_optimizers_and_lr_schedulers
from lightning.pytorch.plugins.precision import DeepSpeedPrecision, Precision
from lightning.pytorch.strategies import DeepSpeedStrategy
from lightning.pytorch.utilities import GradClipAlgorithmType
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch.optim import LBFGS, Optimizer
from typing_extensions import override

from zerosync_strategy.core.attach import ZeroSync, attach
from zerosync_strategy.core.config import BLOCK, ZeroSyncConfig, suggest
from zerosync_strategy.core.interpose import interpose, restore
from zerosync_strategy.lightning.deepspeed import DeepSpeedAnyDeviceStrategy
from zerosync_strategy.lightning.precision import CLIP_BY_VALUE, ZeroSyncPrecision
from zerosync_strategy.lightning.registry import WRONG_TRAINER

_STOCK_OPTIONS = frozenset(inspect.signature(DeepSpeedStrategy.__init__).parameters) - {"self", "stage", "config"}
# The stock options that are no part of the DeepSpeed configuration, and so may stand beside config=.
_BESIDE_CONFIG = frozenset({
    "accelerator", "cluster_environment", "exclude_frozen_parameters", "hysteresis", "initial_scale_power",
    "load_full_weights", "logging_level", "loss_scale", "loss_scale_window", "min_loss_scale", "parallel_devices",
    "precision_plugin", "process_group_backend", "remote_device", "timeout",
})  # fmt: skip
# The engine that trained a module last: its hooks must go before the next engine's come.
_engines: weakref.WeakKeyDictionary[torch.nn.Module, Any] = weakref.WeakKeyDictionary()


class ZeroSyncStrategy(DeepSpeedAnyDeviceStrategy):
    """DeepSpeed ZeRO-1/2/3 with one gradient reduction per optimizer step, however many backwards led to it.

    Args:
        stage: ZeRO stage 1, 2 or 3. Without it, the stage of ``config``, or 3.
        config: a DeepSpeed configuration, as a dictionary or the path of a JSON file; it may hold a ``"zerosync"``
            block of ZeroSync options. It is not changed.
        **options: any field of :class:`~zerosync_strategy.ZeroSyncConfig`, and any argument of Lightning's
            ``DeepSpeedStrategy``; of the latter, those that build a configuration exclude ``config``.

    Attributes:
        zerosync: the handle of the engine in training (reports, window), or ``None`` before ``fit``.

    Raises:
        MisconfigurationException: an unsupported stage; options that contradict each other.
        TypeError, ValueError: an unknown option, or a value of the wrong kind.
    """

    strategy_name = "zerosync"

    def __init__(self, stage: int | None = None, *, config: Any = None, **options: Any) -> None:
        ours = {name: options.pop(name) for name in ZeroSyncConfig.option_names() & options.keys()}
        for name in options:
            if name not in _STOCK_OPTIONS:
                known = _STOCK_OPTIONS | ZeroSyncConfig.option_names() | {"stage", "config"}
                raise TypeError(f"ZeroSyncStrategy got an unknown option {name!r}.{suggest(name, known)}")
        if config is not None and (ignored := options.keys() - _BESIDE_CONFIG):
            raise MisconfigurationException(
                f"ZeroSyncStrategy got config= and also {', '.join(sorted(ignored))}, which a given configuration would"
                " override. Put them into the configuration."
            )
        if stage is not None:
            _check_stage(stage, "stage")
        self.zerosync: ZeroSync | None = None
        super().__init__(stage=3 if stage is None else stage, config=copy.deepcopy(config), **options)

        assert isinstance(self.config, dict)
        block = self.config.pop(BLOCK, None)
        self.zerosync_config = ZeroSyncConfig.resolve(block, ours)
        configured = self.config.get("zero_optimization", {}).get("stage", 0)
        _check_stage(configured, "config['zero_optimization']['stage']")
        if stage is not None and configured != stage:
            raise MisconfigurationException(
                f"ZeroSyncStrategy got stage={stage}, but the DeepSpeed configuration says stage {configured}. Give the"
                " stage in one place."
            )
        self.stage = int(configured)

    def __repr__(self) -> str:
        # The Trainer of the other package prints this in its refusal.
        return f"{type(self).__name__}(stage={self.stage}): {WRONG_TRAINER}"

    # ---- Lightning owns accumulation -----------------------------------------------------------------------------

    @property
    @override
    def handles_gradient_accumulation(self) -> bool:
        """``False``: Lightning counts batches, divides the loss, and steps the tail of an epoch."""
        return False

    @override
    def _format_batch_size_and_grad_accum_config(self) -> None:
        assert isinstance(self.config, dict)
        # Lightning clips through clip_gradients() before each step; a norm in the user's own configuration stays.
        clip = self.config.setdefault("gradient_clipping", 0.0)
        super()._format_batch_size_and_grad_accum_config()
        if self.lightning_module is not None:
            self.config.update(gradient_accumulation_steps=1, gradient_clipping=clip)

    @property
    def _lightning_module(self) -> LightningModule | None:
        return self._connected

    @_lightning_module.setter
    def _lightning_module(self, module: LightningModule | None) -> None:
        # Lightning refuses a module that torch.compile() made, by this mark, with every DeepSpeed strategy.
        if module is not None and module._compiler_ctx is not None:
            module._compiler_ctx = None
        self._connected = module

    @property
    @override
    def precision_plugin(self) -> Precision:
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        if isinstance(plugin, DeepSpeedPrecision) and not isinstance(plugin, ZeroSyncPrecision):
            plugin = ZeroSyncPrecision(plugin.precision, self._handle)
        elif plugin is not None and not isinstance(plugin, ZeroSyncPrecision):
            raise MisconfigurationException(
                f"ZeroSyncStrategy sets up its own precision, got the plugin {type(plugin).__name__}. Use"
                " Trainer(precision=...)."
            )
        self._precision_plugin = plugin

    # ---- set-up --------------------------------------------------------------------------------------------------

    @override
    def setup(self, trainer: Trainer) -> None:
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, GradientAccumulationScheduler) and not isinstance(callback, _SchedulerMethods):
                interpose(callback, _SchedulerMethods)
        super().setup(trainer)

    @override
    def init_deepspeed(self) -> None:
        assert self.lightning_module is not None
        if self.lightning_module.trainer.gradient_clip_algorithm == GradClipAlgorithmType.VALUE:
            raise MisconfigurationException(CLIP_BY_VALUE)
        with warnings.catch_warnings():
            # Stock warns that an overridden configure_gradient_clipping does nothing. Here it clips.
            warnings.filterwarnings("ignore", message=".*configure_gradient_clipping.*will not actually clip.*")
            super().init_deepspeed()

    @override
    def _initialize_deepspeed_train(self, model: torch.nn.Module) -> None:
        previous = _engines.pop(model, None)
        if previous is not None:
            previous.destroy()  # else its hooks would reduce beside ours
        super()._initialize_deepspeed_train(model)

    @override
    def _init_optimizers(self) -> tuple[Optimizer, LRSchedulerConfig | None]:
        assert self.lightning_module is not None
        optimizers, schedulers = _init_optimizers_and_lr_schedulers(self.lightning_module)
        for what, found in (("optimizer", optimizers), ("learning-rate scheduler", schedulers)):
            if len(found) > 1:
                raise MisconfigurationException(
                    f"ZeroSyncStrategy supports one {what}, but configure_optimizers() returned {len(found)}. Put all"
                    " parameters into the parameter groups of one optimizer, with at most one scheduler."
                )
        if isinstance(optimizers[0], LBFGS):
            raise MisconfigurationException(
                "ZeroSyncStrategy got the optimizer LBFGS, which needs the whole model and several evaluations in one"
                " step; ZeRO partitions both. Use a first-order optimizer such as AdamW."
            )
        return optimizers[0], schedulers[0] if schedulers else None

    @override
    def _setup_model_and_optimizer(self, model: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        engine, optimizer = super()._setup_model_and_optimizer(model, *args, **kwargs)
        self.zerosync = attach(engine, self.zerosync_config)
        _engines[model] = engine
        return engine, optimizer

    def _handle(self) -> ZeroSync:
        if self.zerosync is None:
            raise MisconfigurationException("Gradients can be clipped and stepped in Trainer.fit() only.")
        return self.zerosync

    # ---- the end -------------------------------------------------------------------------------------------------

    @override
    def on_train_end(self) -> None:
        self._abort("training ended before the optimizer step that would have used them")
        super().on_train_end()

    @override
    def on_exception(self, exception: BaseException) -> None:
        self._abort(f"{type(exception).__name__} ended the training")
        super().on_exception(exception)

    @override
    def teardown(self) -> None:
        self._abort("the strategy was torn down")
        assert self.lightning_module is not None
        for callback in self.lightning_module.trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, _SchedulerMethods):
                restore(callback)
        super().teardown()

    def _abort(self, reason: str) -> None:
        if self.zerosync is not None:
            self.zerosync.abort(reason)


class _SchedulerMethods:
    """Lets ``GradientAccumulationScheduler`` run: it refuses DeepSpeed, where the engine owns accumulation."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        view = SimpleNamespace(strategy=None, accumulate_grad_batches=trainer.accumulate_grad_batches)
        super().on_train_start(view, pl_module)  # type: ignore[misc]


def _check_stage(stage: Any, name: str) -> None:
    if stage not in (1, 2, 3) or isinstance(stage, bool):
        raise MisconfigurationException(
            f"ZeroSyncStrategy needs ZeRO stage 1, 2 or 3, got {name}={stage!r}. Without ZeRO, use Lightning's"
            " DDPStrategy."
        )
