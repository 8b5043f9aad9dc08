"""The methods of DeepSpeed's engine and optimizer that ZeroSync overrides.

Each class is interposed before DeepSpeed's own (``engine/patches.py``), has no state, and calls the attached engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from zerosync_strategy.core.attached import checkpointing
from zerosync_strategy.core.attached.engine import AttachedEngine
from zerosync_strategy.core.engine import zero, zero3, zero3_optimizer
from zerosync_strategy.core.engine.engine_state import FrozenStay
from zerosync_strategy.core.engine.patches import ModeOverrides, Stock, replaced
from zerosync_strategy.core.engine.saved_files import SavedState
from zerosync_strategy.core.engine.types import Zero3Parameter

if TYPE_CHECKING:
    from zerosync_strategy.core.handle import ZeroSync


class EngineOverrides(ModeOverrides):
    """Overrides of ``DeepSpeedEngine``."""

    _zerosync_attached: AttachedEngine
    _zerosync: ZeroSync

    @property
    def zerosync(self) -> ZeroSync:
        """The handle, even if the program has not called ``attach()`` itself."""
        return self._zerosync

    def forward(self, *args: object, **kwargs: object) -> object:
        with self._zerosync_attached.stage.forward():
            return super().forward(*args, **kwargs)

    def backward(self, loss: object, *args: object, **kwargs: object) -> object:
        engine: Any = self
        is_last = engine.is_gradient_accumulation_boundary() if engine.gradient_accumulation_steps() > 1 else None
        if isinstance(loss, torch.Tensor) and loss.requires_grad and loss.grad_fn is None:
            loss = loss.clone()  # a cached loss is a leaf whose hook runs the real backwards; DeepSpeed needs a graph
        with self._zerosync_attached.backward(is_last):
            return super().backward(loss, *args, **kwargs)

    def _backward_prologue(self) -> None:
        self._zerosync_attached.graph_begins()
        super()._backward_prologue()
        zero.expect_end(self)

    def allreduce_gradients(self, *args: object, **kwargs: object) -> None:
        """Does nothing: the window decides when to reduce, and the gradients' own hooks report to it."""

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Around backwards, which send nothing anyway. Legal on every stage; a step inside is illegal."""
        attached = self._zerosync_attached
        with attached.guards.postponing_step("no_sync()"), attached.parts.window.last.more_follow():
            yield

    @contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        """DeepSpeed's explicit window: ours is open already, and the step after the block closes it."""
        with self._zerosync_attached.guards.postponing_step("coalesce_grad_reduction()"):
            yield

    def step(self, *args: object, **kwargs: object) -> object:
        self._zerosync_attached.guards.check_step()
        result = super().step(*args, **kwargs)
        self._zerosync_attached.parts.window.end_engine_step()
        return result

    def get_global_grad_norm(self) -> torch.Tensor | float | None:
        norm = self._zerosync.coming_norm()
        return super().get_global_grad_norm() if norm is None else norm

    def zero_grad(self) -> None:
        self._zerosync_attached.zero_grad()
        super().zero_grad()

    def save_checkpoint(
        self, save_dir: str | Path, tag: object = None, client_state: Mapping[str, object] | None = None,
        save_latest: bool = True, exclude_frozen_parameters: bool = False, **kwargs: object,
    ) -> bool:  # fmt: skip
        engine: Any = self
        if not save_dir:
            raise ValueError(f"save_checkpoint() takes the path of a directory, got {save_dir!r}.")
        tag = f"global_step{engine.global_steps}" if tag is None else str(tag)  # DeepSpeed's default
        attached, state = self._zerosync_attached, dict(client_state or {})
        if attached.parts.config.checkpoint_format == "distributed":
            return checkpointing.save_distributed(
                attached, save_dir, tag, state, save_latest, exclude_frozen_parameters
            )
        with checkpointing.saving(attached, save_dir, tag, save_latest) as names_latest:
            state |= checkpointing.own_entries(attached)
            return super().save_checkpoint(save_dir, tag, state, names_latest, exclude_frozen_parameters, **kwargs)

    def load_checkpoint(
        self, load_dir: str | Path, tag: Any = None, load_module_strict: bool = True,
        load_optimizer_states: bool = True, load_lr_scheduler_states: bool = True, load_module_only: bool = False,
        *args: object, **kwargs: object,
    ) -> tuple[str | None, dict[str, Any] | None]:  # fmt: skip
        states = load_optimizer_states and not load_module_only
        if zero.stage(self) == 3:  # DeepSpeed would return without the weights, which it has with the states alone
            load_optimizer_states = states
        options = (load_module_strict, load_optimizer_states, load_lr_scheduler_states, load_module_only)
        attached = self._zerosync_attached
        tag, reader = checkpointing.find(attached, load_dir, tag, states)
        if reader is not None:
            return checkpointing.load_by_name(attached, load_dir, tag, reader, load_module_strict, states, *options[2:])
        with checkpointing.loading(attached, load_dir):
            loaded = super().load_checkpoint(load_dir, tag, *options, *args, **kwargs)
        return checkpointing.loaded(attached, load_dir, loaded, states)

    def load_module_state_dict(
        self, checkpoint: dict[str, Any], strict: bool = True, *args: object, **kwargs: object
    ) -> None:
        if strict and not isinstance(self, FrozenStay):
            checkpointing.require_frozen(self.module, checkpoint["module"])
        super().load_module_state_dict(checkpoint, strict, *args, **kwargs)

    def _zero3_consolidated_16bit_state_dict(self, *args: object, **kwargs: object) -> dict[str, torch.Tensor]:
        checkpointing.check_full_state_dict(self._zerosync_attached)
        with self._zerosync_attached.apart("full weights"):
            state = super()._zero3_consolidated_16bit_state_dict(*args, **kwargs)
        # Except on the first rank, DeepSpeed returns None, and save_pretrained() would then read the module's own.
        return {} if state is None else state

    def get_deepcompile_backend(self, *args: object, **kwargs: object) -> object:
        with self._zerosync_attached.compiling():
            return super().get_deepcompile_backend(*args, **kwargs)

    def destroy(self) -> None:
        self._zerosync_attached.destroyed()  # this object is a plain engine from now on
        self.destroy()


class Stage3EngineOverrides(EngineOverrides):
    """On ZeRO-3, DeepSpeed visits all modules before and after a forward, for hooks that are removed."""

    def _forward_prologue(self, *args: object, **kwargs: object) -> object:
        with replaced(self._zerosync_attached.guards, "is_preparing", True):
            return super()._forward_prologue(*args, **kwargs)

    def _forward_epilogue(self, *args: object, **kwargs: object) -> object:
        with replaced(self._zerosync_attached.guards, "is_preparing", True):
            return super()._forward_epilogue(*args, **kwargs)

    def zero_optimization_partition_weights(self) -> bool:
        return not self._zerosync_attached.guards.is_preparing and super().zero_optimization_partition_weights()


class OptimizerOverrides(Stock):
    """Overrides of a ZeRO optimizer on every stage."""

    _zerosync_attached: AttachedEngine

    def step(self, *args: object, **kwargs: object) -> object:
        with self._zerosync_attached.step():
            return super().step(*args, **kwargs)

    def zero_grad(self, *args: object, **kwargs: object) -> None:
        self._zerosync_attached.zero_grad()
        super().zero_grad(*args, **kwargs)

    @property
    def param_groups(self) -> Sequence[MutableMapping[str, Any]]:
        return self._zerosync_attached.stage.pending.groups(super().param_groups)

    def add_param_group(self, param_group: object) -> None:
        """Raises, because DeepSpeed would never step it."""
        self._zerosync_attached.guards.refuse_param_group()

    def has_overflow(self, *_: object, **__: object) -> bool:
        """Return whether the norm is infinite: no second pass over the gradients, no message, no wait."""
        return not self._zerosync_attached.parts.reducer.norm.value().isfinite()

    def finalize_gradient_accumulation_boundary(self) -> None:
        """Does nothing: unmanaged accumulation calls it in ``engine.step``, but the window acts before the step."""

    def zerosync_stock_finalize(self) -> None:
        super().finalize_gradient_accumulation_boundary()


class SwitchOverrides(Stock):
    """Overrides of a torch optimizer whose ``train()`` and ``eval()`` exchange the weights that it steps for others."""

    _zerosync_attached: AttachedEngine

    def train(self) -> None:
        self._zerosync_attached.switch("train", super().train)

    def eval(self) -> None:
        self._zerosync_attached.switch("eval", super().eval)


class ZeroSwitchOverrides:
    """Methods of a ZeRO optimizer if its torch optimizer has :class:`SwitchOverrides`."""

    optimizer: Any

    def train(self) -> None:
        self.optimizer.train()

    def eval(self) -> None:
        self.optimizer.eval()


class Stage12Overrides(OptimizerOverrides):
    """Overrides of the optimizer of ZeRO-1 and ZeRO-2."""

    _zerosync_attached: Any  # whose stage is a FlatStage

    def state_dict(self, *args: object, **kwargs: object) -> object:
        self._zerosync_attached.stage.in_stock_layout()
        return super().state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> object:
        self._zerosync_attached.stage.in_stock_layout()
        return super().load_state_dict(*args, **kwargs)

    def _link_all_hp_params(self) -> None:
        super()._link_all_hp_params()
        self._zerosync_attached.fragments_linked()

    def refresh_fp32_params(self) -> None:
        self._zerosync_attached.stage.in_stock_layout()
        super().refresh_fp32_params()

    def scaled_global_norm(self, *_: object, **__: object) -> torch.Tensor:
        return self._zerosync_attached.parts.reducer.norm.value()


class WholeOverrides(OptimizerOverrides):
    """Overrides of both stages when each parameter has an owner."""

    _zerosync_attached: Any  # whose stepper is a WholeStepper, and whose states are by name

    def state_dict(self, *args: object, **kwargs: object) -> object:
        return self._zerosync_attached.by_name.save(lambda: super(WholeOverrides, self).state_dict(*args, **kwargs))

    def load_state_dict(
        self, state_dict_list: list[SavedState], load_optimizer_states: bool = True,
        load_from_fp32_weights: bool = False, checkpoint_folder: object = None, *args: Any, **kwargs: Any,
    ) -> object:  # fmt: skip
        def load(state: object) -> object:
            given = (state, load_optimizer_states, load_from_fp32_weights, None, *args)
            return super(WholeOverrides, self).load_state_dict(*given, **kwargs)

        return self._zerosync_attached.by_name.load(state_dict_list, load_optimizer_states, load)


class WholeStage12Overrides(WholeOverrides, Stage12Overrides):
    """Overrides of the optimizer of ZeRO-1 and ZeRO-2 when each parameter has an owner."""

    def _optimizer_step(self, group_no: int) -> None:
        self._zerosync_attached.stage.stepper.step_group(group_no)

    def _lazy_init_hp_params_optimizer_state(self) -> None:
        """Does nothing: parameters must not refer to states in flat shards."""

    def _link_all_hp_params(self) -> None:
        """Does nothing, for the same reason: their links to our states stay."""

    def update_lp_params(self) -> None:
        """Does nothing: all ranks have the parameters that the owners have read."""

    def _restore_from_bit16_weights(self) -> None:
        self._zerosync_attached.stage.adopt_edits()


class Stage3Overrides(OptimizerOverrides):
    """Overrides of the optimizer of ZeRO-3."""

    _zerosync_attached: Any  # whose stage is a ShardedStage

    def zero_grad(self, *args: object, **kwargs: object) -> None:
        with torch._C.DisableTorchFunctionSubclass():  # it needs no values of parameters at rest
            super().zero_grad(*args, **kwargs)

    def _optimizer_step(self, sub_group_id: int) -> None:
        joint = self._zerosync_attached.stage.joint_step
        super()._optimizer_step(sub_group_id) if joint is None else joint.ready(sub_group_id)

    def _partition_all_parameters(self) -> None:
        self._zerosync_attached.stage.release()

    def _get_norm_groups(self) -> list[torch.Tensor]:
        return [self._zerosync_attached.parts.reducer.norm.value()]

    def zerosync_stock_norms(self) -> list[torch.Tensor]:
        return super()._get_norm_groups()

    def unscale_and_clip_grads(self, *args: Any) -> None:
        """Does nothing without loss scale and clipping."""
        if zero3_optimizer.scales_gradients(self):
            super().unscale_and_clip_grads(*args)

    # Called by DeepSpeed's safe_get_... and safe_set_..., which fail on full tensors if the rank's shard has padding.

    def get_local_fp32_grad_for_param(self, param: Zero3Parameter) -> torch.Tensor | None:
        self._zerosync_attached.stage.pending.check_reduced("safe_get_local_grad()")
        return super().get_local_fp32_grad_for_param(param)

    def set_local_grad_for_param(self, value: torch.Tensor, param: Zero3Parameter) -> None:
        self._zerosync_attached.stage.pending.check_reduced("safe_set_local_grad()")
        super().set_local_grad_for_param(value, param)

    def set_fp32_grad_for_param(self, value: torch.Tensor, param: Zero3Parameter) -> None:
        self._zerosync_attached.stage.pending.check_reduced("safe_set_full_grad()")
        super().set_local_grad_for_param(zero3.shard_of(param, value), param)

    def update_fp32_grad_for_param_vectorized(
        self, update_func: Callable[..., torch.Tensor], param_list: list[Zero3Parameter]
    ) -> None:
        self._zerosync_attached.stage.pending.check_reduced("safe_update_full_grad_vectorized()")
        super().update_fp32_grad_for_param_vectorized(update_func, param_list)

    def set_full_hp_param(self, value: torch.Tensor, param: Zero3Parameter, optim_state_key: str | None = None) -> None:
        super().set_local_hp_param(zero3.shard_of(param, value), param, optim_state_key)
        if optim_state_key is None:
            zero3_optimizer.take_master_weights(self, param)

    def set_local_hp_param(
        self, value: torch.Tensor, param: Zero3Parameter, optim_state_key: str | None = None
    ) -> None:
        super().set_local_hp_param(value, param, optim_state_key)
        if optim_state_key is None:
            zero3_optimizer.take_master_weights(self, param)


class WholeStage3Overrides(WholeOverrides, Stage3Overrides):
    """Overrides of the optimizer of ZeRO-3 when each parameter has an owner."""

    def _prepare_sub_group(self, sub_group_id: int, *_: object) -> None:
        self._zerosync_attached.stage.stepper.take_gradients(sub_group_id)

    def unscale_and_clip_grads(self, sub_group_id: int, total_norm: torch.Tensor) -> None:
        if zero3_optimizer.scales_gradients(self):
            factor = zero3_optimizer.step_factor(self, total_norm)
            self._zerosync_attached.stage.stepper.scale_gradients(sub_group_id, factor)

    def _optimizer_step(self, sub_group_id: int) -> None:
        self._zerosync_attached.stage.stepper.step_group(sub_group_id)

    def _set_fp32_optimizer_param_groups(self) -> None:
        """Does nothing: the torch optimizer has its parameters already."""

    def _clear_fp32_optimizer_param_groups(self) -> None:
        """Does nothing: it keeps them."""

    def get_full_hp_param(self, param: Zero3Parameter, optim_state_key: str | None = None) -> torch.Tensor | None:
        if optim_state_key is None:
            return super().get_full_hp_param(param)
        return self._zerosync_attached.stage.stepper.read_state(param, optim_state_key)

    def set_full_hp_param(self, value: torch.Tensor, param: Zero3Parameter, optim_state_key: str | None = None) -> None:
        if optim_state_key is None:
            super().set_full_hp_param(value, param)
        else:
            self._zerosync_attached.stage.stepper.write_state(param, value, optim_state_key)

    def get_local_fp32_param(self, param: Zero3Parameter, optim_state_key: str | None = None) -> torch.Tensor | None:
        if optim_state_key is not None:
            _refuse_local("safe_get_local_optimizer_state()")
        return super().get_local_fp32_param(param)

    def set_local_hp_param(
        self, value: torch.Tensor, param: Zero3Parameter, optim_state_key: str | None = None
    ) -> None:
        if optim_state_key is not None:
            _refuse_local("safe_set_local_optimizer_state()")
        super().set_local_hp_param(value, param)

    def get_fp32_grad_for_param(self, param: Zero3Parameter) -> torch.Tensor | None:
        return self._zerosync_attached.stage.stepper.read_gradient(param) if param.requires_grad else None

    def set_fp32_grad_for_param(self, value: torch.Tensor, param: Zero3Parameter) -> None:
        self._zerosync_attached.stage.pending.check_reduced("safe_set_full_grad()")
        self._zerosync_attached.stage.stepper.write_gradient(param, value)

    def update_fp32_grad_for_param_vectorized(
        self, update_func: Callable[..., torch.Tensor], param_list: list[Zero3Parameter]
    ) -> None:
        self._zerosync_attached.stage.pending.check_reduced("safe_update_full_grad_vectorized()")
        for param in param_list:
            value = update_func(self._zerosync_attached.stage.stepper.read_gradient(param), param)
            self._zerosync_attached.stage.stepper.write_gradient(param, value)

    def get_local_fp32_grad_for_param(self, param: Zero3Parameter) -> NoReturn:
        _refuse_local("safe_get_local_grad()")

    def set_local_grad_for_param(self, value: torch.Tensor, param: Zero3Parameter) -> NoReturn:
        _refuse_local("safe_set_local_grad()")


def _refuse_local(function: str) -> NoReturn:
    """Raise, because a rank has no shard of a gradient or a state."""
    raise ValueError(
        f"{function} found an optimizer that needs whole parameters, whose gradients and states are not sharded."
        f" Use {function.replace('local', 'full')}."
    )
