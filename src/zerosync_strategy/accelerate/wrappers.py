"""A prepared model, optimizer and Accelerator under ZeroSync: the step is taken in ``optimizer.step()``.

Accelerate decides when gradients are synchronised (``sync_gradients``): at every micro-batch, or in ``accumulate()`` at
every N-th and at the end of the data. This wrapper divides the loss by N; the engine itself never accumulates.

Under stock Accelerate with DeepSpeed, ``optimizer.step()`` does nothing, and a program may omit it. With ZeroSync, this
program would run backwards and train nothing. That is an error, whose remedy is the option ``step_on``.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from accelerate.accelerator import Accelerator
from accelerate.state import GradientState
from accelerate.utils import DummyOptim, DynamoBackend, get_int_from_env
from accelerate.utils.deepspeed import DeepSpeedEngineWrapper, DeepSpeedOptimizerWrapper

from zerosync_strategy import frontend
from zerosync_strategy.accelerate.plugin import ON_BACKWARD, ZeroSyncPlugin
from zerosync_strategy.accelerate.trainer import divides_losses, is_trainers, keeps_engine
from zerosync_strategy.core.engine import patches
from zerosync_strategy.core.options import AUTO
from zerosync_strategy.frontend import DeepSpeedEngine, Stock, ZeroSync

NOTHING_TO_CLIP = (
    "clip_grad_norm_() was given no parameters, so it clips nothing, as without DeepSpeed. A filter or generator is"
    " empty once an optimizer was made from it: pass a list, or model.parameters()."
)

_WORLD_SIZES = ["WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE"]


def prepare(accelerator: Accelerator, plugin: ZeroSyncPlugin, args: tuple[Any, ...], stock: Callable[..., Any]) -> Any:
    """Run ``accelerator.prepare(*args)`` under ``plugin``, by Accelerate's own ``stock`` preparation."""
    from deepspeed import DeepSpeedEngine

    plugin.patch_process()  # the end of an earlier training may have undone it
    _prepare_ranks(accelerator)
    optimizers = [item for item in args if isinstance(item, (torch.optim.Optimizer, DummyOptim))]
    model = next((item for item in args if isinstance(item, torch.nn.Module)), None)
    result: Any = None
    deepcompile = False

    def build() -> DeepSpeedEngine | None:
        nonlocal result, deepcompile
        with plugin.filled_in(args), _not_compiled_yet(accelerator, plugin) as deepcompile:
            result = stock(accelerator, *args)
        engine = next((item for item in result if isinstance(item, DeepSpeedEngine)), None)
        if engine is None or not (optimizers or "optimizer" in plugin.deepspeed_config):
            return None  # only a data loader, or a model for evaluation
        frontend.accumulate_outside(engine)
        return engine

    # The value with which the Accelerator was made; its first preparation, perhaps of a data loader, changes it.
    num_steps = vars(accelerator).setdefault("_zerosync_num_steps", accelerator.gradient_accumulation_steps)
    configured = plugin.deepspeed_config.get("gradient_accumulation_steps")
    if is_trainers(plugin.hf_ds_config) and isinstance(configured, int):
        accelerator.gradient_accumulation_steps = configured  # Accelerate does so itself, with a needless warning
    zerosync = None
    if model is None:
        build()
    else:
        zerosync = frontend.set_up(
            "accelerator.prepare()", model, plugin.zerosync_config, build, optimizers=optimizers,
            losses_divided_by=lambda: GradientState().num_steps,
        )  # fmt: skip
    if divides_losses(accelerator):  # Accelerate has taken the steps of the DeepSpeed configuration instead
        accelerator.gradient_accumulation_steps = num_steps
    if zerosync is None:
        return result
    engine = zerosync.engine
    place = StepPlace(zerosync, getattr(zerosync.config, "step_on", AUTO))
    zerosync.coming_norm = place.coming_norm
    vars(accelerator).setdefault("_zerosyncs", {})[zerosync] = place
    if deepcompile:
        kwargs = accelerator.state.dynamo_plugin.to_kwargs()
        engine.compile(backend=kwargs.pop("backend"), compile_kwargs=kwargs)
    if accelerator.deepspeed_engine_wrapped.engine is engine:
        accelerator.deepspeed_engine_wrapped = ZeroSyncEngineWrapper(zerosync, place)
    if not isinstance(accelerator, _AcceleratorOverrides):
        frontend.interpose(accelerator, _AcceleratorOverrides)
    for item in result:
        if isinstance(item, DeepSpeedOptimizerWrapper):
            frontend.interpose(item, _OptimizerOverrides)
            item.zerosync, item.place = zerosync, place
    return result


@contextmanager
def _not_compiled_yet(accelerator: Accelerator, plugin: ZeroSyncPlugin) -> Iterator[bool]:
    """Keep DeepCompile, which must follow ``attach()``, out of Accelerate's preparation. Yield whether it is on."""
    dynamo = accelerator.state.dynamo_plugin
    asked = plugin.deepspeed_config.get("compile", {}).get("deepcompile", False)
    if not asked or dynamo.use_regional_compilation or dynamo.backend is DynamoBackend.NO:
        yield False
        return
    backend, dynamo.backend = dynamo.backend, DynamoBackend.NO
    try:
        yield True
    finally:
        dynamo.backend = backend


def _prepare_ranks(accelerator: Accelerator) -> None:
    """Prepare the device and the process group; without a launcher, make one of one rank: DeepSpeed looks for MPI.

    Raises:
        RuntimeError: Accelerate counts other processes than there are.
    """
    frontend.prepare_device(accelerator.device.type)
    if not dist.is_initialized() and get_int_from_env(_WORLD_SIZES, 1) == 1:
        os.environ.setdefault("LOCAL_RANK", "0")
        backend = "gloo" if accelerator.device.type == "cpu" else "nccl"
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
    if dist.is_initialized() and dist.get_world_size() != accelerator.num_processes:
        raise RuntimeError(
            f"Accelerate takes this process for one of {accelerator.num_processes}, but {dist.get_world_size()} run."
            " Accelerate's state was made before ZeroSyncPlugin. Make the plugin first, or import"
            " zerosync_strategy.accelerate first and name it in the launch configuration."
        )


class ZeroSyncEngineWrapper(DeepSpeedEngineWrapper):
    """The wrapper that ``accelerator.backward`` and ``accelerator.clip_grad_norm_`` call.

    Attributes:
        zerosync: the handle of the engine.
        place: where the program steps.
    """

    def __init__(self, zerosync: ZeroSync, place: StepPlace) -> None:
        super().__init__(zerosync.engine)
        self.zerosync = zerosync
        self.place = place
        self.gradient_state = GradientState()
        self._accumulates = False  # a backward without synchronisation has run; so one with it is a window's last

    def backward(
        self, loss: torch.Tensor, sync_gradients: bool = True, scale_wrt_gas: bool = True, **kwargs: object
    ) -> None:
        """Run a backward; with ``scale_wrt_gas``, of the loss divided by the number of accumulation steps."""
        self.place.backward_begins(sync_gradients)
        if scale_wrt_gas:
            loss = loss / self.gradient_state.num_steps
        self._accumulates |= not sync_gradients
        if self._accumulates:
            self.zerosync.window.expect_last(sync_gradients)
        self.engine.backward(loss, scale_wrt_gas=False, **kwargs)
        self.place.backward_ended(sync_gradients)
        if sync_gradients and self.place.on_backward:
            self.engine.step()

    def clip_grad_norm(
        self, parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float, norm_type: float
    ) -> torch.Tensor | float | None:
        """Clip the next step to ``max_norm``; return the norm before clipping, or ``None`` in mid-accumulation.

        Raises:
            ValueError: ``norm_type`` is not 2, or ``parameters`` lack some that the optimizer trains.
        """
        if norm_type != 2:
            raise ValueError(f"Under ZeRO, clip_grad_norm_() takes norm_type=2, got {norm_type!r}.")
        given = {parameters} if isinstance(parameters, torch.Tensor) else set(parameters)
        if not given:
            warnings.warn(NOTHING_TO_CLIP, stacklevel=3)
            max_norm = math.inf
        elif missing := set(self.zerosync.parameters) - given:
            raise ValueError(
                f"Under ZeRO, clip_grad_norm_() clips all parameters of the optimizer together, but {len(missing)} of"
                f" {len(self.zerosync.parameters)} were not among those given. Pass model.parameters()."
            )
        if self.place.on_backward:
            if max_norm not in (self.engine.gradient_clipping(), math.inf):
                raise ValueError(
                    f"clip_grad_norm_() got max_norm={max_norm!r}, but with step_on='backward' the step is already"
                    f" taken, clipped to gradient_clipping={self.engine.gradient_clipping()!r}. Set 'gradient_clipping'"
                    " in the configuration, or step_on='optimizer'."
                )
            return self.get_global_grad_norm()
        norm = self.zerosync.gradient_norm() if self.gradient_state.sync_gradients else None
        self.zerosync.clip_next_step(0.0 if math.isinf(max_norm) else max_norm)
        return norm

    def clip_grad_value(self, parameters: torch.Tensor | Iterable[torch.Tensor], clip_value: float) -> None:
        """Clip each element of the averaged gradients.

        Raises:
            ValueError: no averaged gradients exist: in mid-accumulation, or with ``step_on="backward"``.
        """
        if not self.gradient_state.sync_gradients or self.place.on_backward:
            raise ValueError(
                "clip_grad_value_() clips the gradients of the coming step, averaged over the ranks, and there are none"
                " in mid-accumulation, or with step_on='backward'. Call it where accelerator.sync_gradients is true,"
                " with step_on='optimizer'."
            )
        with self.zerosync.full_gradients():
            torch.nn.utils.clip_grad_value_(parameters, clip_value)


class _OptimizerOverrides(Stock):
    """Overrides of a prepared optimizer."""

    zerosync: ZeroSync
    place: StepPlace
    optimizer: Any
    gradient_state: GradientState

    def step(self, closure: Callable[[], object] | None = None) -> object:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.place.program_steps()
        # Without a gradient, no step is made, as in PyTorch.
        if self.gradient_state.sync_gradients and self.zerosync.has_backward:
            self.zerosync.window.check_zeroed()
            self.zerosync.engine.step()
        return loss

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        if self.gradient_state.sync_gradients and not self.place.on_backward:
            self.optimizer.zero_grad()


class _AcceleratorOverrides(Stock):
    """Overrides of an Accelerator that has prepared a model."""

    deepspeed_engine_wrapped: Any
    deepspeed_plugin: ZeroSyncPlugin
    gradient_state: GradientState
    _zerosyncs: dict[ZeroSync, StepPlace]

    def clip_grad_norm_(
        self, parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float, norm_type: float = 2
    ) -> torch.Tensor | float | None:
        wrapped = self.deepspeed_engine_wrapped
        if not isinstance(wrapped, ZeroSyncEngineWrapper):
            return super().clip_grad_norm_(parameters, max_norm, norm_type)
        return wrapped.clip_grad_norm(parameters, max_norm, norm_type)

    def clip_grad_value_(self, parameters: torch.Tensor | Iterable[torch.Tensor], clip_value: float) -> None:
        wrapped = self.deepspeed_engine_wrapped
        if not isinstance(wrapped, ZeroSyncEngineWrapper):
            return super().clip_grad_value_(parameters, clip_value)
        wrapped.clip_grad_value(parameters, clip_value)

    def save_state(self, *args: object, **kwargs: object) -> object:
        frontend.wait_for_save()
        in_background = self.deepspeed_plugin.zerosync_config.checkpoint_background
        kept = frontend.one_more(self.project_configuration, "total_limit") if in_background else nullcontext()
        with kept, frontend.one_save():  # schedulers and states of random generators are part of the checkpoint
            return super().save_state(*args, **kwargs)

    def free_memory(self, *objects: object) -> object:
        kept = self.deepspeed_engine_wrapped if keeps_engine(self) else None
        if kept is not None:
            kept.zerosync.abort("training began anew")
            self.deepspeed_engine_wrapped = None  # else stock would destroy its engine
        released = super().free_memory(*objects)
        self.deepspeed_engine_wrapped = kept
        if not divides_losses(self):  # a Trainer may continue
            patches.remove_user(self.deepspeed_plugin)
        return released

    def end_training(self) -> None:
        for place in self._zerosyncs.values():
            place.check_end(self.gradient_state.num_steps)
        for zerosync in self._zerosyncs:
            zerosync.abort("training ended before the step that would have used them")
            zerosync.end()  # Accelerate destroys the process group
        self._zerosyncs.clear()
        plugin = self.deepspeed_plugin
        super().end_training()
        patches.remove_user(plugin)


REMEDY = (
    "If the program relies on the step that stock Accelerate takes in backward(), set step_on to 'backward', in the"
    " 'zerosync' block of the DeepSpeed configuration or in ZeroSyncPlugin; if it adds up gradients on purpose, to"
    " 'optimizer'."
)


class StepPlace:
    """Where a program steps one engine.

    Args:
        zerosync: the handle of the engine.
        asked: the option ``step_on``.

    Attributes:
        on_backward: ``accelerator.backward()`` steps whenever gradients are synchronised.
    """

    def __init__(self, zerosync: ZeroSync, asked: str) -> None:
        self._zerosync = zerosync
        self.on_backward = asked == ON_BACKWARD
        self._undecided = asked == AUTO
        self._accumulates = False
        self._complete = False  # the last backward synchronised gradients
        self._norm_is_read = False  # of the window that is complete

    def backward_begins(self, synchronises: bool) -> None:
        """Check a beginning ``accelerator.backward()``.

        Raises:
            RuntimeError: it begins the next window after a complete one, and the program has never stepped.
        """
        made, is_reduced = self._zerosync.window.backwards, not self._zerosync.window.unused
        begins_next = is_reduced or (self._accumulates and not synchronises)
        if self._never_stepped and self._complete and made and begins_next:
            raise RuntimeError(
                f"accelerator.backward() begins the next window of accumulation, and the program has not called"
                f" optimizer.step() after the {made} backward(s) of the one before: it would"
                f" train nothing. Call optimizer.step() where accelerator.sync_gradients is true. {REMEDY}"
            )

    def backward_ended(self, synchronises: bool) -> None:
        self._complete = synchronises
        self._accumulates |= not synchronises
        self._norm_is_read = False

    def coming_norm(self) -> torch.Tensor | None:
        """Return the norm of the step that completes the window, which stock Accelerate has taken; else ``None``."""
        if not (self._complete and self._zerosync.window.backwards and self._zerosync.has_backward):
            return None
        self._norm_is_read = True
        return self._zerosync.gradient_norm()

    def program_steps(self) -> None:
        """Record a call of ``optimizer.step()``: the program steps by itself."""
        self._undecided = self._complete = False

    @property
    def _never_stepped(self) -> bool:
        return self._undecided and self._zerosync.report is None

    def check_end(self, num_steps: int) -> None:
        """Check at the end of the training that the program has stepped.

        Raises:
            RuntimeError: it never stepped, and ran more backwards than the ``num_steps`` of one window, or read the
                norm of a step.
        """
        made, unused = self._zerosync.window.backwards, self._zerosync.window.unused
        if self._never_stepped and self._complete and (unused > num_steps or (self._norm_is_read and made)):
            raise RuntimeError(
                f"end_training() was called after {made} backwards and no optimizer step: nothing was trained. Call"
                f" optimizer.step(). {REMEDY}"
            )
