"""``Trainer(strategy=ZeroSyncStrategy(stage=3))``: Lightning owns accumulation, ZeroSync owns synchronisation."""

from __future__ import annotations

import copy
import warnings
import weakref
from collections.abc import Generator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer
from typing_extensions import override

from zerosync_strategy import frontend
from zerosync_strategy.core.engine import patches
from zerosync_strategy.core.engine.contract import fetch, require
from zerosync_strategy.frontend import DeepSpeedEngine, StrategyArguments, ZeroSync
from zerosync_strategy.names import represent

from . import averages, callbacks, contract
from .deepspeed import DeepSpeedAnyDeviceStrategy
from .engines import (
    TAG,
    EvaluationOverrides,
    ShardedEvaluationOverrides,
    check_full_weights,
    count_saved,
    directory,
    divide,
    remove_others,
    verified_together,
)
from .library import (
    PACKAGE,
    DeepSpeedPrecision,
    DeepSpeedStrategy,
    GradClipAlgorithmType,
    LightningModule,
    LRSchedulerConfig,
    MisconfigurationException,
    Precision,
    Trainer,
)
from .precision import AFTER_BACKWARD, CLIP_BY_VALUE, ZeroSyncPrecision, check_local_gradients, overridden_hooks

_ARGUMENTS = StrategyArguments("ZeroSyncStrategy", DeepSpeedStrategy, MisconfigurationException)
# The engines that last trained or evaluated a module: their hooks are removed before another engine trains it.
_engines: weakref.WeakKeyDictionary[torch.nn.Module, list[weakref.ref[Any]]] = weakref.WeakKeyDictionary()


class ZeroSyncStrategy(DeepSpeedAnyDeviceStrategy):
    """DeepSpeed ZeRO-1/2/3 with one gradient reduction per optimizer step, however many backwards led to it.

    Args:
        stage: ZeRO stage 1, 2 or 3. Without it, the stage of ``config``, or 3.
        config: a DeepSpeed configuration, as a dictionary or the path of a JSON file; it may hold a ``"zerosync"``
            block of ZeroSync options. It is not changed. Lightning or DeepSpeed decides values of ``"auto"``.
        **options: any field of :class:`~zerosync_strategy.ZeroSyncConfig`, and any argument of Lightning's
            ``DeepSpeedStrategy``. Arguments that build a configuration cannot be combined with ``config``. The
            signature names all options, for LightningCLI; ``None`` means that an option is not given.

    In manual optimization, ``configure_optimizers`` may return several optimizers. Each has its own engine, parameters
    and window.

    Attributes:
        zerosyncs: the handles of the engines in training (reports, windows), in the order of the optimizers; empty
            before ``fit``.

    Raises:
        MisconfigurationException: an unsupported stage; options that contradict each other.
        TypeError, ValueError: an unknown option, or a value of the wrong kind.
        ContractError: Lightning's internals are not the ones that ZeroSync knows (C1).
    """

    strategy_name = "zerosync"

    @_ARGUMENTS.name_all
    def __init__(self, stage: int | None = None, *, config: Any = None, **options: Any) -> None:
        require(contract.INTERNALS)
        ours, options = _ARGUMENTS.split(stage, config, options)
        self.zerosyncs: list[ZeroSync] = []
        self.gradient_hooks: frozenset[str] = frozenset()  # overridden by the program; during training
        self._parts: list[torch.nn.Module] = []  # what each optimizer trains
        super().__init__(stage=3 if stage is None else stage, config=copy.deepcopy(config), **options)
        assert isinstance(self.config, dict)
        self.zerosync_config, self.stage = _ARGUMENTS.read(self.config, stage, config, ours)
        if path := _ARGUMENTS.undecided(self.config):
            raise MisconfigurationException(
                f"ZeroSyncStrategy got {'.'.join(path)!r} = 'auto' in the DeepSpeed configuration, and Lightning has no"
                f" value for it. Set it, or leave {path[0]!r} out and return one from configure_optimizers()."
            )

    @property
    def zerosync(self) -> ZeroSync | None:
        """The handle of the only engine in training, or of the first of several; ``None`` before ``fit``."""
        return self.zerosyncs[0] if self.zerosyncs else None

    def __repr__(self) -> str:
        return represent(self, PACKAGE)

    # ---- Lightning owns accumulation -----------------------------------------------------------------------------

    @property
    @override
    def handles_gradient_accumulation(self) -> bool:
        """``False``: Lightning counts batches, divides the loss, and steps at the end of an epoch."""
        return False

    @override
    def _format_config(self) -> None:
        assert isinstance(self.config, dict)
        _ARGUMENTS.fill_in_precision(self.config, self.precision_plugin.precision)
        super()._format_config()

    @override
    def _format_batch_size_and_grad_accum_config(self) -> None:
        assert isinstance(self.config, dict)
        # Lightning clips by clip_gradients() before each step; a norm in the user's own configuration is kept.
        clip = self.config.setdefault("gradient_clipping", 0.0)
        super()._format_batch_size_and_grad_accum_config()
        if self.lightning_module is not None:
            self.config.update(gradient_accumulation_steps=1, gradient_clipping=clip)

    @override
    def _auto_select_batch_size(self) -> int:
        # Only DeepSpeed's log of the throughput uses it, so a hook of the program that makes a loader is not called.
        assert self.lightning_module is not None
        if self.lightning_module.trainer.fit_loop._data_source.is_module():
            return 1
        return super()._auto_select_batch_size()

    @property
    def _lightning_module(self) -> LightningModule | None:
        return self._connected

    @_lightning_module.setter
    def _lightning_module(self, module: LightningModule | None) -> None:
        # By this mark, Lightning refuses a module from torch.compile() with every DeepSpeed strategy.
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
            plugin = ZeroSyncPrecision(plugin.precision)  # type: ignore[arg-type]
        elif plugin is not None and not isinstance(plugin, ZeroSyncPrecision):
            raise MisconfigurationException(
                f"ZeroSyncStrategy sets up its own precision, got the plugin {type(plugin).__name__}. Use"
                " Trainer(precision=...)."
            )
        self._precision_plugin = plugin

    # ---- set-up --------------------------------------------------------------------------------------------------

    @contextmanager
    @override
    def model_sharded_context(self) -> Generator[None, None, None]:
        with frontend.building_model(super().model_sharded_context(), self.config, self.stage):
            yield

    @override
    def setup_environment(self) -> None:
        assert self.lightning_module is not None
        frontend.prepare_process(self)  # until teardown(); attached engines keep the replacements themselves
        callbacks.adapt(self.lightning_module.trainer)  # before their setup()
        super().setup_environment()

    @override
    def setup(self, trainer: Trainer) -> None:
        assert self.model is not None
        if problem := frontend.dtype_problem(self.model):  # Lightning's precision would make them real
            raise MisconfigurationException(f"ZeroSyncStrategy found that {problem}")
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
        assert isinstance(self.config, dict) and self.lightning_module is not None
        for reference in _engines.pop(model, ()):
            if (engine := reference()) is not None:
                frontend.leave_sharded(engine)  # otherwise its hooks would gather and reduce, too
        self.zerosyncs, self._parts = [], [model]
        self.gradient_hooks = overridden_hooks(self.lightning_module.trainer)
        if "optimizer" in self.config:
            super()._initialize_deepspeed_train(model)
        else:
            with frontend.in_full_shapes(model.parameters()):
                optimizers, self.lr_scheduler_configs = fetch(contract.INIT_OPTIMIZERS)(self.lightning_module)
            held = [param for each in optimizers for group in each.param_groups for param in group["params"]]
            with frontend.requiring_grad(held if callbacks.thaws(self.lightning_module.trainer) else [], True):
                self._parts = divide(model, optimizers, self.zerosync_config.elementwise_optimizer)
                self._check_precision()
                for module, optimizer in zip([model, *self._parts[1:]], optimizers, strict=True):
                    self._setup_model_and_optimizer(module, optimizer)
            self._set_deepspeed_activation_checkpointing()
            self.model = self.zerosyncs[0].engine
            self.optimizers = [zerosync.engine.optimizer for zerosync in self.zerosyncs]
            self._adopt_configured_schedulers()
        _engines[model] = [weakref.ref(zerosync.engine) for zerosync in self.zerosyncs]
        check_local_gradients(self.lightning_module.trainer, self.zerosyncs, self.gradient_hooks)
        if not self.lightning_module.automatic_optimization:
            frontend.keep_local_gradients(self.zerosyncs, AFTER_BACKWARD in self.gradient_hooks)

    def _check_precision(self) -> None:
        assert isinstance(self.config, dict)
        if len(self._parts) > 1 and self.config.get("fp16", {}).get("enabled"):
            raise MisconfigurationException(
                f"ZeroSyncStrategy got precision={self.precision_plugin.precision!r} and {len(self._parts)} optimizers."
                " Each engine would scale the loss in its own way, though one backward may concern several. Use"
                " 'bf16-mixed', 'bf16-true' or '32-true'."
            )

    def _adopt_configured_schedulers(self) -> None:
        """Make Lightning step a scheduler from the DeepSpeed configuration, too."""
        configured = [zerosync.engine.lr_scheduler for zerosync in self.zerosyncs if zerosync.engine.lr_scheduler]
        if configured and self.lr_scheduler_configs:
            raise MisconfigurationException(
                "Both the DeepSpeed configuration and configure_optimizers() give a learning-rate scheduler. Leave out"
                " one of them."
            )
        for zerosync in self.zerosyncs:
            zerosync.engine.lr_scheduler = None
        if configured:
            self.lr_scheduler_configs = [LRSchedulerConfig(scheduler, interval="step") for scheduler in configured]

    @override
    def _setup_model_and_optimizer(
        self, model: torch.nn.Module, optimizer: Optimizer | None, lr_scheduler: Any = None
    ) -> tuple[DeepSpeedEngine, Optimizer]:
        build_stock = super()._setup_model_and_optimizer

        def build() -> DeepSpeedEngine:
            engine, _ = build_stock(model, optimizer, lr_scheduler)
            if len(self._parts) > 1:
                first = self.zerosyncs[0].engine if self.zerosyncs else engine
                frontend.restrict(engine, self._parts[len(self.zerosyncs)], first)
            if self._excludes_frozen:
                frontend.interpose(engine, frontend.FrozenStay)
            return engine

        # Gradients are gathered for hooks, so all ranks must override the same ones.
        hooks = {"overridden hooks on gradients": ", ".join(sorted(self.gradient_hooks)) or "none"}
        zerosync = frontend.set_up(
            "ZeroSyncStrategy", model, self.zerosync_config, build, shown=optimizer, facts=hooks,
            losses_divided_by=self._losses_divided_by,
        )  # fmt: skip
        assert zerosync is not None
        self.zerosyncs.append(zerosync)
        return zerosync.engine, zerosync.engine.optimizer

    def _losses_divided_by(self) -> float:
        module = self.lightning_module
        assert module is not None
        return module.trainer.accumulate_grad_batches if module.automatic_optimization else 1

    @override
    def _initialize_deepspeed_inference(self, model: torch.nn.Module) -> None:
        self.zerosyncs = []
        config = self.config
        assert isinstance(config, dict)
        if without_parameters := next(model.parameters(), None) is None:  # ZeRO-3 needs the dtype of the first one
            self.config = {name: value for name, value in config.items() if name != "zero_optimization"}
        try:
            super()._initialize_deepspeed_inference(model)
        finally:
            self.config = config
        _engines.setdefault(model, []).append(weakref.ref(self.model))
        if self._excludes_frozen:
            frontend.interpose(self.model, frontend.FrozenStay)
        is_sharded = self.zero_stage_3 and not without_parameters
        frontend.interpose(self.model, ShardedEvaluationOverrides if is_sharded else EvaluationOverrides)
        if is_sharded:
            frontend.gather_for_evaluation(model.parameters())

    # ---- checkpoints ---------------------------------------------------------------------------------------------

    @property
    def _excludes_frozen(self) -> bool:
        return getattr(self, "exclude_frozen_parameters", False)  # from Lightning 2.5.1

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: object = None) -> None:
        if not dist.is_initialized():
            raise MisconfigurationException(
                "A checkpoint was to be saved before fit(). The DeepSpeed engine that saves it is made there: save in"
                " or after it, or save the module itself with torch.save(module.state_dict(), path)."
            )
        with frontend.activity("the attempt to save a checkpoint"):
            filepath = self.broadcast(filepath)
        checkpoint, averaged = averages.divide(checkpoint)
        with frontend.one_save():
            with self._whole_checkpoint():
                super().save_checkpoint(checkpoint, filepath, storage_options)
            for index, zerosync in enumerate(self.zerosyncs[1:], 1):
                place = str(directory(filepath, index))
                zerosync.engine.save_checkpoint(place, TAG, exclude_frozen_parameters=self._excludes_frozen)
            if self.is_global_zero:
                remove_others(filepath, len(self.zerosyncs))
                averages.save(averaged, filepath)

    @override
    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        assert self.lightning_module is not None
        how = {} if weights_only is None else {"weights_only": weights_only}  # an unknown argument in Lightning 2.5
        if self.load_full_weights and self.zero_stage_3:
            return super().load_checkpoint(checkpoint_path, **how)
        frontend.wait_for_save()
        saved = count_saved(checkpoint_path)
        if self.zerosyncs and saved != len(self.zerosyncs):
            raise MisconfigurationException(
                f"The checkpoint {checkpoint_path} has the state of {saved} optimizer(s), but configure_optimizers()"
                f" returned {len(self.zerosyncs)}. Return as many as in the run that saved it, in the same order."
            )
        with verified_together(self.zerosyncs, checkpoint_path, saved, self.zerosync_config, self.stage):
            with self._whole_checkpoint():
                client_state = super().load_checkpoint(checkpoint_path, **how)
            for index, zerosync in enumerate(self.zerosyncs[1:], 1):
                zerosync.engine.load_checkpoint(
                    str(directory(checkpoint_path, index)), load_lr_scheduler_states=False,
                    load_module_strict=self.lightning_module.strict_loading,
                )  # fmt: skip
        return client_state | averages.load(checkpoint_path)

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        assert self.lightning_module is not None
        if not (self.load_full_weights and self.zero_stage_3):
            if "state_dict" in checkpoint and averages.is_wanted(self.lightning_module.trainer):
                averages.give(self.lightning_module, checkpoint["state_dict"], strict)
            return
        state = checkpoint["state_dict"]
        check_full_weights(self.lightning_module, state, strict)
        super().load_model_state_dict(checkpoint, strict)
        for name, buffer in self.lightning_module.named_buffers():
            if name in state:
                buffer.copy_(state[name])  # Lightning loads buffers on the first rank only
        for zerosync in self.zerosyncs:
            # Otherwise the first step would restore the weights from which the optimizer was made.
            frontend.reload_master_weights(zerosync.engine.optimizer)

    @override
    def remove_checkpoint(self, filepath: str | Path) -> None:  # once the one that may take its place is complete
        frontend.after_save(lambda: super(ZeroSyncStrategy, self).remove_checkpoint(filepath))

    def _whole_checkpoint(self) -> AbstractContextManager[None]:
        """Around a save or load by the first engine, so that it includes the whole module."""
        assert self.lightning_module is not None
        if not (self.zero_stage_3 and self.zerosyncs):
            return nullcontext()
        return frontend.whole_checkpoint(self.lightning_module, self.zerosyncs)

    # ---- the end -------------------------------------------------------------------------------------------------

    @override
    def on_train_end(self) -> None:
        self._abort("training ended before the optimizer step that would have used them")
        with frontend.activity(frontend.Doing.END):  # a rank with fewer batches waits here, and gets the error
            self.barrier("zerosync_strategy.on_train_end")
        frontend.wait_for_save()
        super().on_train_end()

    @override
    def on_exception(self, exception: BaseException) -> None:
        self._abort(f"{type(exception).__name__} ended the training")
        frontend.report_failure(exception)
        super().on_exception(exception)

    @override
    def teardown(self) -> None:
        self._abort("the strategy was torn down")
        assert self.lightning_module is not None
        callbacks.leave(self.lightning_module.trainer)
        with frontend.as_it_is():  # moves ZeRO-3's parameters as they are, without values
            super().teardown()
        patches.remove_user(self)

    def _abort(self, reason: str) -> None:
        for zerosync in self.zerosyncs:
            zerosync.abort(reason)
