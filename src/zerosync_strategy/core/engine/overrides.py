"""The methods of DeepSpeed's objects that ZeroSync overrides, and what they call instead.

Each class here is interposed before DeepSpeed's own (``interpose.py``) and holds no state: it passes the call on to an
object that implements the protocol above it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch

from zerosync_strategy.core.engine import zero3_optimizer


class EngineHooks(Protocol):
    """What the methods of an attached engine and its optimizer call."""

    gradient_ready: Callable[[Any], None]
    """Autograd has added to the gradient of a parameter."""

    def forward(self) -> AbstractContextManager[None]:
        """Around a forward."""

    def backward(self, is_boundary: bool) -> AbstractContextManager[None]:
        """Around ``engine.backward``; ``is_boundary``: DeepSpeed's own accumulation makes a step follow."""

    def backward_begins(self) -> None:
        """From inside an autograd graph, before the first gradient."""

    def zero_grad(self) -> None:
        """The gradients of the window are dropped."""

    def postponing_step(self, context: str) -> AbstractContextManager[None]:
        """Around what runs inside of DeepSpeed's ``context``, in which a step is illegal."""

    def check_step(self) -> None:
        """Raise where ``engine.step()`` is illegal."""

    def end_engine_step(self) -> None:
        """At the end of ``engine.step()``."""

    def refuse_param_group(self) -> None:
        """Raise: parameters were added to the optimizer."""

    def step(self) -> AbstractContextManager[None]:
        """Around the ZeRO optimizer's own step."""

    def saving(self, path: Any, tag: str, save_latest: bool) -> AbstractContextManager[bool]:
        """Around ``save_checkpoint``; the value: whether DeepSpeed is to write the file ``latest``."""

    def loading(
        self, path: Any, tag: Any, optimizer_states: bool, module_only: bool
    ) -> AbstractContextManager[str | None]:
        """Around ``load_checkpoint``; the value: the tag to load."""

    def client_state(self) -> dict[str, Any]:
        """Return what a checkpoint is to hold beside the program's own state. Collective."""

    def loaded(self, client_state: dict[str, Any], optimizer_states: bool) -> None:
        """Take out of ``client_state`` what :meth:`client_state` has put there."""

    def restoring(self, model_file: str, strict: bool, optimizer_state: bool) -> None:
        """Inside of ``loading``: ``load_checkpoint`` has read ``model_file`` and what belongs to it."""

    def nothing_loaded(self, path: Any) -> None:
        """``load_checkpoint`` has found no checkpoint in the directory."""

    def check_full_state_dict(self) -> None:
        """Raise where DeepSpeed's own full ``state_dict`` would lack parameters."""

    def fragments_linked(self) -> None:
        """DeepSpeed has given the parameters its functions anew by which ``safe_get_...`` reach the shards."""

    def in_stock_layout(self) -> None:
        """DeepSpeed is about to read or write the optimizer's shards, in its own layout. Collective after a step."""

    def check_gradients(self, function: str) -> None:
        """Raise where the gradients in the shards are not those that the coming step uses."""

    def compiling(self) -> AbstractContextManager[None]:
        """Around DeepCompile's preparation of the engine."""

    def destroyed(self) -> None:
        """The engine is about to be destroyed: detach."""

    def gather_parameters(self) -> AbstractContextManager[None]:
        """Around ZeRO-1/2's step, which gathers parameters."""

    def release_parameters(self) -> bool:
        """Release what a ZeRO-3 step changes, before it; return whether that is all that is to be released now."""

    def norm(self, stock: Callable[[], Any]) -> torch.Tensor:
        """Return the norm of the window's gradients; ``stock`` computes DeepSpeed's own."""


class ModeOverrides:
    """Overrides of ``DeepSpeedEngine``: its mode is its module's. DeepSpeed's own says training for ever."""

    module: torch.nn.Module

    @property
    def training(self) -> bool:
        return self.module.training

    @training.setter
    def training(self, mode: bool) -> None:
        self.module.training = mode

    def train(self, mode: bool = True) -> Any:
        super().train(mode)  # type: ignore[misc]
        return self  # as every other module; DeepSpeed returns nothing

    def eval(self) -> Any:
        super().eval()  # type: ignore[misc]
        return self


class EngineOverrides(ModeOverrides):
    """Overrides of ``DeepSpeedEngine``."""

    _zerosync_hooks: EngineHooks

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with self._zerosync_hooks.forward():
            return super().forward(*args, **kwargs)  # type: ignore[misc]

    def backward(self, loss: Any, *args: Any, **kwargs: Any) -> Any:
        engine: Any = self
        is_boundary = engine.gradient_accumulation_steps() > 1 and engine.is_gradient_accumulation_boundary()
        if isinstance(loss, torch.Tensor) and loss.requires_grad and loss.grad_fn is None:
            loss = loss.clone()  # a cached loss is a leaf whose hook runs the real backwards; DeepSpeed wants a graph
        with self._zerosync_hooks.backward(is_boundary):
            return super().backward(loss, *args, **kwargs)  # type: ignore[misc]

    def _backward_prologue(self) -> None:
        self._zerosync_hooks.backward_begins()
        super()._backward_prologue()  # type: ignore[misc]

    def allreduce_gradients(self, *args: Any, **kwargs: Any) -> None:
        """Does nothing: the window decides what is reduced when, and the gradients' own hooks tell it."""

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Nothing is sent before the step in any case; legal on every stage. A step inside is illegal, as in stock."""
        with self._zerosync_hooks.postponing_step("no_sync()"):
            yield

    @contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        """DeepSpeed's explicit window: ours is open already, and the step after the block closes it."""
        with self._zerosync_hooks.postponing_step("coalesce_grad_reduction()"):
            yield

    def step(self, *args: Any, **kwargs: Any) -> Any:
        self._zerosync_hooks.check_step()
        result = super().step(*args, **kwargs)  # type: ignore[misc]
        self._zerosync_hooks.end_engine_step()
        return result

    def zero_grad(self) -> None:
        self._zerosync_hooks.zero_grad()
        super().zero_grad()  # type: ignore[misc]

    def save_checkpoint(
        self, save_dir: Any, tag: Any = None, client_state: Any = None, save_latest: bool = True,
        *args: Any, **kwargs: Any,
    ) -> Any:  # fmt: skip
        engine: Any = self
        if not save_dir:
            raise ValueError(f"save_checkpoint() takes the path of a directory, got {save_dir!r}.")
        tag = f"global_step{engine.global_steps}" if tag is None else str(tag)  # as DeepSpeed has it
        with self._zerosync_hooks.saving(save_dir, tag, save_latest) as names_latest:
            state = {**(client_state or {}), **self._zerosync_hooks.client_state()}
            return super().save_checkpoint(save_dir, tag, state, names_latest, *args, **kwargs)  # type: ignore[misc]

    def load_checkpoint(
        self, load_dir: Any, tag: Any = None, load_module_strict: bool = True, load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True, load_module_only: bool = False, **kwargs: Any,
    ) -> Any:  # fmt: skip
        states = load_optimizer_states and not load_module_only
        options = (load_module_strict, load_optimizer_states, load_lr_scheduler_states, load_module_only)
        with self._zerosync_hooks.loading(load_dir, tag, states, load_module_only) as tag:
            loaded = super().load_checkpoint(load_dir, tag, *options, **kwargs)  # type: ignore[misc]
            if loaded[0] is not None:
                self._zerosync_hooks.restoring(loaded[0], load_module_strict, load_optimizer_states)
        if loaded[0] is None:
            self._zerosync_hooks.nothing_loaded(load_dir)
        else:
            self._zerosync_hooks.loaded(loaded[1], states)
        return loaded

    def _zero3_consolidated_16bit_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        self._zerosync_hooks.check_full_state_dict()
        return super()._zero3_consolidated_16bit_state_dict(*args, **kwargs)  # type: ignore[misc]

    def get_deepcompile_backend(self, *args: Any, **kwargs: Any) -> Any:
        with self._zerosync_hooks.compiling():
            return super().get_deepcompile_backend(*args, **kwargs)  # type: ignore[misc]

    def destroy(self) -> None:
        self._zerosync_hooks.destroyed()  # this object is a plain engine from here on
        self.destroy()


class OptimizerOverrides:
    """Overrides of a ZeRO optimizer on every stage."""

    _zerosync_hooks: EngineHooks

    def step(self, *args: Any, **kwargs: Any) -> Any:
        with self._zerosync_hooks.step():
            return super().step(*args, **kwargs)  # type: ignore[misc]

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        self._zerosync_hooks.zero_grad()
        super().zero_grad(*args, **kwargs)  # type: ignore[misc]

    def add_param_group(self, param_group: Any) -> None:
        """Raises: DeepSpeed would never step it."""
        self._zerosync_hooks.refuse_param_group()

    def finalize_gradient_accumulation_boundary(self) -> None:
        """Does nothing: unmanaged accumulation asks for this in ``engine.step``; the window does it before the step."""

    def zerosync_stock_finalize(self) -> None:
        super().finalize_gradient_accumulation_boundary()  # type: ignore[misc]


class Stage12Overrides(OptimizerOverrides):
    """Overrides of the optimizer of ZeRO-1 and ZeRO-2."""

    def step(self, *args: Any, **kwargs: Any) -> Any:
        with self._zerosync_hooks.gather_parameters():
            return super().step(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        self._zerosync_hooks.in_stock_layout()
        return super().state_dict(*args, **kwargs)  # type: ignore[misc]

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        self._zerosync_hooks.in_stock_layout()
        return super().load_state_dict(*args, **kwargs)  # type: ignore[misc]

    def _link_all_hp_params(self) -> None:
        super()._link_all_hp_params()  # type: ignore[misc]
        self._zerosync_hooks.fragments_linked()

    def refresh_fp32_params(self) -> None:
        self._zerosync_hooks.in_stock_layout()
        super().refresh_fp32_params()  # type: ignore[misc]

    def setup_buckets(self) -> None:
        """Makes no buffers for DeepSpeed's own reductions: of ``reduce_bucket_size`` elements, two with overlap."""
        optimizer: Any = self
        asked, optimizer.contiguous_gradients = optimizer.contiguous_gradients, False
        try:
            super().setup_buckets()  # type: ignore[misc]
        finally:
            optimizer.contiguous_gradients = asked

    def process_gradients(self, param: torch.nn.Parameter, i: int) -> None:
        self._zerosync_hooks.gradient_ready(param)

    def scaled_global_norm(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        stock = super().scaled_global_norm  # type: ignore[misc]
        return self._zerosync_hooks.norm(lambda: stock(*args, **kwargs))


class Stage3Overrides(OptimizerOverrides):
    """Overrides of the optimizer of ZeRO-3."""

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        with torch._C.DisableTorchFunctionSubclass():  # what it asks of parameters at rest is not their values
            super().zero_grad(*args, **kwargs)

    def reduce_ready_partitions_and_remove_grads(self, param: torch.nn.Parameter) -> None:
        self._zerosync_hooks.gradient_ready(param)

    def _partition_all_parameters(self) -> None:
        if not self._zerosync_hooks.release_parameters():
            super()._partition_all_parameters()  # type: ignore[misc]

    def _get_norm_groups(self) -> list[torch.Tensor]:
        return [self._zerosync_hooks.norm(super()._get_norm_groups)]  # type: ignore[misc]

    def has_overflow(self, *args: Any, **kwargs: Any) -> Any:
        with zero3_optimizer.overflow_check_on_callers_stream(self):
            return super().has_overflow(*args, **kwargs)  # type: ignore[misc]

    def unscale_and_clip_grads(self, *args: Any) -> None:
        """Does nothing where there is nothing to multiply by."""
        optimizer: Any = self
        if optimizer.loss_scale != 1 or optimizer.clip_grad > 0:
            super().unscale_and_clip_grads(*args)  # type: ignore[misc]

    # What DeepSpeed's functions safe_get_... and safe_set_... call.

    def get_local_fp32_grad_for_param(self, param: Any) -> Any:
        self._zerosync_hooks.check_gradients("safe_get_local_grad()")
        return super().get_local_fp32_grad_for_param(param)  # type: ignore[misc]

    def set_local_grad_for_param(self, value: torch.Tensor, param: Any) -> None:
        self._zerosync_hooks.check_gradients("safe_set_local_grad()")
        super().set_local_grad_for_param(value, param)  # type: ignore[misc]

    def set_fp32_grad_for_param(self, value: torch.Tensor, param: Any) -> None:
        self._zerosync_hooks.check_gradients("safe_set_full_grad()")
        super().set_fp32_grad_for_param(value, param)  # type: ignore[misc]

    def update_fp32_grad_for_param_vectorized(self, update_func: Callable[..., Any], param_list: list[Any]) -> None:
        self._zerosync_hooks.check_gradients("safe_update_full_grad_vectorized()")
        super().update_fp32_grad_for_param_vectorized(update_func, param_list)  # type: ignore[misc]

    def set_full_hp_param(self, value: torch.Tensor, param: Any, optim_state_key: str | None = None) -> None:
        super().set_full_hp_param(value, param, optim_state_key)  # type: ignore[misc]
        if optim_state_key is None:
            zero3_optimizer.take_master_weights(self, param)

    def set_local_hp_param(self, value: torch.Tensor, param: Any, optim_state_key: str | None = None) -> None:
        super().set_local_hp_param(value, param, optim_state_key)  # type: ignore[misc]
        if optim_state_key is None:
            zero3_optimizer.take_master_weights(self, param)


class GatherHooks(Protocol):
    """What schedules the gathers of a ZeRO-3 engine."""

    def issue(self, params: Iterable[Any], gather: Callable[[list[Any]], None]) -> None:
        """Call ``gather`` for parts of ``params``, each of one process group."""

    def module_begins(self, module: Any, forward: bool) -> None:
        """The forward of ``module`` begins, or a backward comes to it."""

    def module_fetched(self, module: Any) -> None:
        """The parameters of ``module`` are there, for the current stream to use."""

    def module_ends(self, module: Any) -> None:
        """The forward of ``module`` has ended, or a backward has passed it."""


class GatherOverrides:
    """Overrides of DeepSpeed's parameter coordinator: the order of gathers."""

    _zerosync_gathers: GatherHooks

    def fetch_sub_module(self, current_submodule: Any, forward: bool) -> None:
        self._zerosync_gathers.module_begins(current_submodule, forward)
        super().fetch_sub_module(current_submodule, forward)  # type: ignore[misc]
        self._zerosync_gathers.module_fetched(current_submodule)

    def release_sub_module(self, submodule: Any, *args: Any, **kwargs: Any) -> None:
        super().release_sub_module(submodule, *args, **kwargs)  # type: ignore[misc]
        self._zerosync_gathers.module_ends(submodule)

    # One leading underscore: a method that is private to DeepSpeed's class, under the name that Python gives it.
    def _PartitionedParameterCoordinator__all_gather_params(self, params: Iterable[Any], forward: bool) -> None:
        stock = super()._PartitionedParameterCoordinator__all_gather_params  # type: ignore[misc]
        self._zerosync_gathers.issue(params, lambda of_group: stock(of_group, forward))


class ReleaseHooks(Protocol):
    """What keeps parameters of a ZeRO-3 engine gathered."""

    @property
    def has_no_order(self) -> bool:
        """Whether DeepSpeed gathers for no module, and so need not compare over the ranks in which order they run."""

    def order_forgotten(self) -> None:
        """DeepSpeed records anew in which order modules run."""

    def fetching(self, module: Any) -> None:
        """The parameters of ``module`` are about to be gathered."""

    def release(self, param: Any) -> bool:
        """Release ``param`` if nothing uses it, or keep it. Return whether DeepSpeed has nothing left to do."""

    def releasing_all(self) -> AbstractContextManager[None]:
        """Around the release of all parameters, of which none is kept."""


class ReleaseOverrides:
    """Overrides of DeepSpeed's parameter coordinator: what is released."""

    _zerosync_releases: ReleaseHooks

    def _invalidate_trace(self) -> None:
        super()._invalidate_trace()  # type: ignore[misc]
        self._zerosync_releases.order_forgotten()

    def reset_step(self) -> None:
        if not self._zerosync_releases.has_no_order:
            super().reset_step()  # type: ignore[misc]

    def fetch_sub_module(self, current_submodule: Any, forward: bool) -> None:
        self._zerosync_releases.fetching(current_submodule)
        super().fetch_sub_module(current_submodule, forward)  # type: ignore[misc]

    def release_and_reset_all(self, module: Any) -> None:
        with self._zerosync_releases.releasing_all():
            super().release_and_reset_all(module)  # type: ignore[misc]

    # One leading underscore: a method that is private to DeepSpeed's class, under the name that Python gives it.
    def _PartitionedParameterCoordinator__release_param(self, param: Any, free_data: bool = True) -> None:
        if not free_data or not self._zerosync_releases.release(param):
            super()._PartitionedParameterCoordinator__release_param(param, free_data)  # type: ignore[misc]


class InferenceOverrides:
    """Overrides of what gathers ZeRO-3 parameters where there is no optimizer."""

    def _restore_from_bit16_weights(self) -> None:
        """Does nothing: DeepSpeed 0.19.8 asks for it, and only an optimizer has it."""
