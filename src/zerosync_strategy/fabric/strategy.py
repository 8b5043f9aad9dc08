"""``Fabric(strategy=ZeroSyncFabricStrategy(stage=3))``: the program owns its loop, ZeroSync the synchronisation."""

from __future__ import annotations

import copy
import os
import weakref
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from typing_extensions import override

from zerosync_strategy import frontend
from zerosync_strategy.core.engine import patches
from zerosync_strategy.core.engine.contract import require
from zerosync_strategy.frontend import DeepSpeedEngine, StrategyArguments, ZeroSync
from zerosync_strategy.names import represent

from . import contract
from .calls import (
    BackwardSync,
    OptimizerOverrides,
    PreparedModule,
    allow_later_optimizers,
    clip_norm,
    find_model_of_backward,
    unwrap_prepared,
    zerosync_of,
)
from .checkpoints import load, load_weights, save
from .library import (
    PACKAGE,
    CPUAccelerator,
    CUDAAccelerator,
    DDPStrategy,
    DeepSpeedPrecision,
    DeepSpeedStrategy,
    MisconfigurationException,
    Precision,
    TorchCheckpointIO,
)

_ARGUMENTS = StrategyArguments("ZeroSyncFabricStrategy", DeepSpeedStrategy, MisconfigurationException)


class ZeroSyncFabricStrategy(DeepSpeedStrategy):
    """DeepSpeed ZeRO-1/2/3 in a loop of one's own, with one gradient reduction per ``optimizer.step()``.

    Args:
        stage: ZeRO stage 1, 2 or 3. Without it, the stage of ``config``, or 3.
        config: a DeepSpeed configuration, as a dictionary or the path of a JSON file; it may hold a ``"zerosync"``
            block of ZeroSync options. It is not changed. It must not have an optimizer, a scheduler or accumulation,
            which the program provides.
        **options: any field of :class:`~zerosync_strategy.ZeroSyncConfig`, and any argument of Fabric's
            ``DeepSpeedStrategy``. Arguments that build a configuration cannot be combined with ``config``.

    Each ``fabric.setup(model, optimizer)`` makes an engine with its own window. Any number of
    ``fabric.backward(loss)``, inside ``no_backward_sync`` or not, leads to one reduction in ``optimizer.step()``.

    Attributes:
        zerosyncs: the handles of the engines that train (reports, windows), in the order of their ``setup``.

    Raises:
        MisconfigurationException: an unsupported stage; options that contradict each other.
        TypeError, ValueError: an unknown option, or a value of the wrong kind.
        ContractError: Fabric's internals are not the ones that ZeroSync knows (C1).
    """

    @_ARGUMENTS.name_all
    def __init__(self, stage: int | None = None, *, config: Any = None, **options: Any) -> None:
        require(contract.INTERNALS)
        ours, options = _ARGUMENTS.split(stage, config, options)
        self.zerosyncs: list[ZeroSync] = []
        self._prepared: weakref.WeakSet[PreparedModule] = weakref.WeakSet()
        self._patch_process()
        super().__init__(stage=3 if stage is None else stage, config=copy.deepcopy(config), **options)
        self._backward_sync_control = BackwardSync()  # type: ignore[assignment]
        assert isinstance(self.config, dict)
        self.zerosync_config, self.stage = _ARGUMENTS.read(self.config, stage, config, ours)
        for block in ("optimizer", "scheduler"):
            if block in self.config:
                raise MisconfigurationException(
                    f"ZeroSyncFabricStrategy got {block!r} in the DeepSpeed configuration, but in Fabric the program"
                    " makes it. Leave it out, and make the optimizer for fabric.setup(), and the scheduler for the"
                    " optimizer."
                )
        if (steps := self.config.setdefault("gradient_accumulation_steps", 1)) != 1:
            raise MisconfigurationException(
                f"ZeroSyncFabricStrategy got 'gradient_accumulation_steps' = {steps!r} in the DeepSpeed configuration,"
                " but in Fabric the program accumulates. Leave it out; divide the loss, and call optimizer.step()"
                " when the last backward has run."
            )

    @property
    def zerosync(self) -> ZeroSync | None:
        """The handle of the only engine that trains, or of the first of several; ``None`` before ``fabric.setup()``."""
        return self.zerosyncs[0] if self.zerosyncs else None

    def __repr__(self) -> str:
        return represent(self, PACKAGE)

    # ---- set-up --------------------------------------------------------------------------------------------------

    @property
    @override
    def precision(self) -> Precision:
        return super().precision

    @precision.setter
    def precision(self, plugin: Precision | None) -> None:
        if plugin is not None and not isinstance(plugin, DeepSpeedPrecision):
            raise MisconfigurationException(
                f"ZeroSyncFabricStrategy sets up its own precision, got the plugin {type(plugin).__name__}. Use"
                " Fabric(precision=...)."
            )
        self._precision = plugin

    def _patch_process(self) -> None:
        """Install the replacements in the process, again before each engine: they end with the last engine."""
        frontend.prepare_process()
        allow_later_optimizers(PACKAGE, ZeroSyncFabricStrategy)
        find_model_of_backward(PACKAGE, ZeroSyncFabricStrategy)

    @override
    def setup_environment(self) -> None:
        self._patch_process()
        if not isinstance(self.accelerator, (CUDAAccelerator, CPUAccelerator)):
            raise MisconfigurationException(
                f"ZeroSyncFabricStrategy runs on CUDA or on CPU, got {type(self.accelerator).__name__}. Use"
                " Fabric(accelerator='cuda') or Fabric(accelerator='cpu')."
            )
        if isinstance(self.accelerator, CUDAAccelerator):
            return super().setup_environment()
        if problem := frontend.prepare_device("cpu", getattr(self.precision, "precision", None)):
            raise MisconfigurationException(problem)
        DDPStrategy.setup_environment(self)  # skips the check of DeepSpeedStrategy

    @override
    def _setup_distributed(self) -> None:
        with frontend.building_engine(self):  # DeepSpeed makes the process group
            super()._setup_distributed()

    @override
    def _format_config(self) -> None:
        assert isinstance(self.config, dict) and isinstance(self.precision, DeepSpeedPrecision)
        _ARGUMENTS.fill_in_precision(self.config, self.precision.precision)
        self.config.setdefault("gradient_clipping", 0.0)  # the program clips; a configured norm is kept
        if batch := self.config.get("train_batch_size"):
            self.config.setdefault("train_micro_batch_size_per_gpu", batch // self.world_size)
        super()._format_config()

    @contextmanager
    @override
    def module_sharded_context(self) -> Iterator[None]:
        self._patch_process()
        with frontend.building_model(super().module_sharded_context(), self.config, self.stage):
            yield

    @override
    def setup_module_and_optimizers(
        self, module: Module, optimizers: list[Optimizer], *scheduler: Any
    ) -> tuple[Any, ...]:
        """Make an engine of ``module`` and its optimizer. The program steps its scheduler itself.

        Releases of Fabric that pass a scheduler, or ``None``, get it back.
        """
        if len(optimizers) != 1:
            raise ValueError(
                f"Fabric.setup() got {len(optimizers)} optimizers for one model. Under ZeRO an engine has one. Give it"
                " one optimizer with several parameter groups, or set up each part of the model as a model of its"
                " own, with its optimizer."
            )
        engine, zero_optimizer = self._train(module, optimizers[0], "Fabric.setup()")
        return engine, [zero_optimizer], *scheduler

    def _train(
        self, module: Module, optimizer: Optimizer, call: str, prepared: PreparedModule | None = None
    ) -> tuple[DeepSpeedEngine, Optimizer]:
        def build() -> DeepSpeedEngine:
            if prepared is not None:
                prepared.stop_refusing()
            engine, zero_optimizer = self._make_engine(module, optimizer)
            self._set_deepspeed_activation_checkpointing()
            if getattr(self, "exclude_frozen_parameters", False):  # Fabric 2.5.0 has none
                frontend.interpose(engine, frontend.FrozenStay)
            frontend.interpose(zero_optimizer, OptimizerOverrides)
            return engine

        zerosync = frontend.set_up(
            call, module, self.zerosync_config, build, optimizers=[optimizer], shown=optimizer,
            problem=self._problem_beside_others(module, prepared),
        )  # fmt: skip
        assert zerosync is not None
        self.zerosyncs.append(zerosync)
        self._deepspeed_engine = zerosync.engine
        return zerosync.engine, zerosync.engine.optimizer

    def _problem_beside_others(self, module: Module, prepared: PreparedModule | None = None) -> str:
        """Return why ``module`` cannot be set up in addition to the earlier models; empty if it can."""
        models = [zerosync.engine.module for zerosync in self.zerosyncs]
        models += [other.module for other in self._prepared if other is not prepared and other.engine is None]
        others = {id(param) for model in models for param in model.parameters()}
        if shared := [name for name, param in module.named_parameters() if id(param) in others]:
            return (
                f"parameters of the {type(module).__name__} belong to a model that was set up before: {shared[0]!r} is"
                f" one of {len(shared)}. ZeRO keeps each parameter with one engine. Set up one model that has both,"
                " with one optimizer."
            )
        assert isinstance(self.config, dict)
        if self.zerosyncs and self.config.get("fp16", {}).get("enabled"):
            return (
                "another model trains in fp16 already. Each engine would scale the loss in its own way, though one"
                " backward may concern several. Use 'bf16-mixed', 'bf16-true' or '32-true'."
            )
        return ""

    @override
    def setup_module(self, module: Module) -> Any:
        """Prepare ``module`` for evaluation, sharded on stage 3. A backward that reaches its parameters raises.

        Gradients may pass through it to a model that trains. After :meth:`setup_optimizer`, it trains itself.
        """
        self._patch_process()
        if problem := self._problem_beside_others(module):
            raise ValueError(f"Fabric.setup_module() found that {problem}")
        engine = None
        if self.stage == 3:
            engine, _ = self._make_engine(module)
            frontend.gather_for_evaluation(module.parameters())
        else:
            self._cast(module)
            for tensor in (*module.parameters(), *module.buffers()):
                torch.distributed.broadcast(tensor.detach(), 0)
        prepared = PreparedModule(module, engine)
        self._prepared.add(prepared)
        patches.add_user(prepared)
        return prepared

    @override
    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Make an engine of ``optimizer`` and of the model from ``fabric.setup_module()`` whose parameters it has.

        Raises:
            ValueError: its parameters belong to none of these models, to several, or to one with an optimizer.
        """
        call = "Fabric.setup_optimizers()"
        params = {id(param) for group in optimizer.param_groups for param in group["params"]}
        owners = [each for each in self._prepared if not params.isdisjoint(map(id, each.module.parameters()))]
        if len(owners) != 1:
            raise ValueError(
                f"{call} got an optimizer with parameters of {len(owners)} models that fabric.setup_module() has"
                " returned. Under ZeRO each model has one optimizer: make it from the parameters of one, after"
                " fabric.setup_module(model)."
            )
        (prepared,) = owners
        engine, zero_optimizer = self._train(prepared.module, optimizer, call, prepared)
        prepared.train_with(engine)
        patches.remove_user(prepared)
        return zero_optimizer

    def _cast(self, module: Module) -> None:
        """Convert ``module`` to the dtype that an engine would give it."""
        assert isinstance(self.config, dict)
        for block, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16)):
            if self.config.get(block, {}).get("enabled"):
                module.to(dtype)

    def _make_engine(self, module: Module, *optimizer: Any) -> tuple[DeepSpeedEngine, Optimizer]:
        self._patch_process()
        with frontend.building_engine(self):
            engine, zero_optimizer, *_ = self._initialize_engine(module, *optimizer)
        return engine, zero_optimizer

    # ---- the loop ------------------------------------------------------------------------------------------------

    @override
    def backward(
        self,
        tensor: Tensor,
        module: Module | None,
        gradient: Tensor | None = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: object = None,
    ) -> None:
        """Run a backward. It belongs to the window of each engine whose parameters it reaches."""
        module = unwrap_prepared(module)
        if frontend.handle_of(module) is None:
            raise RuntimeError(
                "fabric.backward() found a model that was set up without an optimizer. Set one up by"
                " fabric.setup_optimizers(optimizer), or give fabric.backward() the model that trains: model=..."
            )
        self._deepspeed_engine = module
        if create_graph or inputs is not None:
            raise ValueError(
                f"fabric.backward() got {'create_graph=True' if create_graph else 'inputs='}, which DeepSpeed's"
                " backward does not take. For gradients of gradients or of some tensors, use torch.autograd.grad()"
                " of what model.module computes: Fabric does not let it through the model that setup() has returned."
            )
        if gradient is not None:
            tensor = (tensor * gradient).sum()
        with ExitStack() as stack:
            if len(self.zerosyncs) > 1:
                for zerosync in self.zerosyncs:
                    stack.enter_context(zerosync.awaiting_backward())
            super().backward(tensor, module, retain_graph=bool(retain_graph))

    @override
    def optimizer_step(self, optimizer: object, closure: Any = None, **kwargs: object) -> object:
        """Reduce the window of ``optimizer`` and step it; return the result of ``closure``."""
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        zerosync = zerosync_of(optimizer)
        zerosync.window.check_zeroed()
        zerosync.engine.step(**kwargs)
        return result

    @override
    def clip_gradients_norm(
        self,
        module: Module,
        optimizer: object,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        """Clip the averaged gradients of the next step; return their norm before clipping, a scalar.

        Norms other than L2, ``max_norm=0`` and a second clipping gather the full gradients.

        Raises:
            RuntimeError: the norm is not finite and ``error_if_nonfinite``, on every rank.
        """
        return clip_norm(zerosync_of(optimizer), max_norm, norm_type, error_if_nonfinite)

    @override
    def clip_gradients_value(self, module: Module, optimizer: object, clip_val: float) -> None:
        """Clip each element of the averaged gradients of the next step; gathers the full gradients."""
        zerosync = zerosync_of(optimizer)
        with zerosync.full_gradients():
            torch.nn.utils.clip_grad_value_(zerosync.parameters, clip_val)

    # ---- checkpoints ---------------------------------------------------------------------------------------------

    @override
    def save_checkpoint(
        self, path: str | Path, state: dict[str, Any], storage_options: object = None, filter: object = None
    ) -> None:
        """Save models, each with its optimizer, and the other entries of ``state``; see ``checkpoints.py``.

        If ``state`` has only tensors, as ``model.state_dict()``, the first rank writes full tensors to one file.
        """
        given = {"storage_options": storage_options, "filter": filter}
        if named := [f"{name}=" for name, value in given.items() if value is not None]:
            raise TypeError(
                f"fabric.save() got {' and '.join(named)}, but DeepSpeed writes the files. Leave it out, and what is"
                " not to be saved out of the state."
            )
        if state and all(isinstance(value, Tensor) for value in state.values()):  # a state_dict()
            whole = {name: frontend.in_full(value) for name, value in state.items()}
            if self.is_global_zero:
                TorchCheckpointIO().save_checkpoint(whole, path)
            return
        exclude_frozen = getattr(self, "exclude_frozen_parameters", False)
        save(self.broadcast(path), state, self._convert_rest, exclude_frozen)

    def _convert_rest(self, state: dict[str, Any]) -> dict[str, Any]:
        return self._convert_stateful_objects_in_state(state, filter={})

    @override
    def load_checkpoint(
        self, path: str | Path, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load models, with the optimizers that are in ``state``, and its other entries.

        A file, as Fabric saves it without DeepSpeed, has weights only.
        """
        path = self.broadcast(path)
        if os.path.isfile(path):
            how = {} if weights_only is None else {"weights_only": weights_only}  # an unknown argument in Fabric 2.5
            return DDPStrategy.load_checkpoint(self, path, state, strict, **how)
        return load(path, state, strict, self.broadcast)

    @override
    def load_module_state_dict(self, module: Module, state_dict: Mapping[str, object], strict: bool = True) -> None:
        load_weights(module, state_dict, strict)

    @override
    def get_optimizer_state(self, optimizer: Optimizer) -> dict[str, Tensor]:
        if frontend.handle_of(optimizer) is not None:
            raise RuntimeError(
                "state_dict() of an optimizer under ZeRO is this rank's shard alone. Save it with its model:"
                " fabric.save(path, {'model': model, 'optimizer': optimizer})."
            )
        return super().get_optimizer_state(optimizer)
