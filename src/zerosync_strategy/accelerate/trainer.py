"""The Hugging Face Trainer: its optimizer and scheduler, several calls of ``train()``, callbacks, and saving.

Under DeepSpeed, stock transformers drops both at the beginning of ``train()``, and a second ``train()`` has no engine.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from accelerate.accelerator import Accelerator
from accelerate.utils.deepspeed import DeepSpeedOptimizerWrapper, DeepSpeedSchedulerWrapper

from zerosync_strategy.accelerate import contract
from zerosync_strategy.core.engine import patches
from zerosync_strategy.core.engine.contract import require
from zerosync_strategy.frontend import in_full_shapes, one_more, wait_for_save

_TRAINER = "_zerosync_trainer"  # attribute of an Accelerator: its Trainer


def install(plugin_class: type) -> None:
    """Replace transformers' ``deepspeed_init``; without a plugin of ``plugin_class``, it works as before.

    Raises:
        ContractError: ZeroSync does not know the internals of the installed transformers.
    """
    from transformers.integrations import deepspeed

    require(contract.TRAINER)
    if not patches.is_installed(patches.DEEPSPEED_INIT):
        stock = deepspeed.deepspeed_init
        ours = _replace(stock, plugin_class)
        _exchange(stock, ours)
        patches.install(patches.DEEPSPEED_INIT, lambda: _exchange(ours, stock))
    elif (trainer := sys.modules.get("transformers.trainer")) is not None:  # imported since
        _exchange(trainer.deepspeed_init, deepspeed.deepspeed_init)


def _exchange(found: object, other: object) -> None:
    """Replace ``found`` by ``other`` in the modules of transformers."""
    for name in ("transformers.integrations.deepspeed", "transformers.integrations", "transformers.trainer"):
        module = sys.modules.get(name)
        if module is not None and vars(module).get("deepspeed_init") is found:
            module.deepspeed_init = other  # type: ignore[attr-defined]


def is_trainers(config: object) -> bool:
    """Return whether a Trainer, which divides losses itself, has filled in the ``config`` of a plugin."""
    deepspeed = sys.modules.get("transformers.integrations.deepspeed")
    return deepspeed is not None and isinstance(config, deepspeed.HfTrainerDeepSpeedConfig)


def divides_losses(accelerator: Accelerator) -> bool:
    """Return whether ``accelerator`` belongs to a Trainer, which divides losses itself."""
    return getattr(accelerator, _TRAINER, None) is not None


def keeps_engine(accelerator: Accelerator) -> bool:
    """Return whether the Trainer of ``accelerator`` continues with its engine in a later ``train()``.

    Also where ``auto_find_batch_size`` begins anew after an out-of-memory error: the model and the moments go on.
    """
    trainer = getattr(accelerator, _TRAINER, lambda: None)()
    wrapped = accelerator.deepspeed_engine_wrapped
    zerosync = getattr(wrapped, "zerosync", None)
    if trainer is None or zerosync is None or not isinstance(trainer.optimizer, DeepSpeedOptimizerWrapper):
        return False
    if zerosync.report is None and _configured(accelerator):
        return False  # the schedule of the configuration may be for another number of steps
    return wrapped.engine.module is trainer.model


def _configured(accelerator: Accelerator) -> list[str]:
    """Return what DeepSpeed makes by its configuration."""
    return [name for name in ("optimizer", "scheduler") if name in accelerator.state.deepspeed_plugin.deepspeed_config]


def _gather_to_save(trainer: Any) -> None:
    """Gather all parameters while an overridden ``_save()`` saves a model that is none of transformers.

    It may read the module, as that of sentence-transformers, and each rank in its own order. Models of transformers and
    PEFT are saved from the state that the Trainer has gathered.
    """
    from transformers import PreTrainedModel, Trainer

    peft = sys.modules.get("peft")
    takes_state = (PreTrainedModel,) if peft is None else (PreTrainedModel, peft.PeftModel)
    stock = trainer._save
    if getattr(stock, "__func__", None) in (Trainer._save, None) or isinstance(trainer.model, takes_state):
        return

    @functools.wraps(stock)
    def save(*args: object, **options: object) -> None:
        with trainer.accelerator.deepspeed_engine_wrapped.zerosync.gathered_for_inference():
            stock(*args, **options)

    trainer._save = save


def _keep_last_complete(trainer: Any) -> None:
    """Keep one checkpoint more than ``save_total_limit`` while the newest is written in the background.

    The Trainer deletes older ones as soon as ``save_checkpoint`` returns. At the end, it deletes others and loads the
    best, and the program finds all complete.
    """
    if not trainer.accelerator.state.deepspeed_plugin.zerosync_config.checkpoint_background:
        return
    if "_save_checkpoint" in vars(trainer):
        return
    save = trainer._save_checkpoint

    @functools.wraps(save)
    def save_checkpoint(*args: object, **options: object) -> object:
        wait_for_save()
        with one_more(trainer.args, "save_total_limit"):
            return save(*args, **options)

    trainer._save_checkpoint = save_checkpoint
    for name in ("_load_best_model", "_finalize_training"):
        if hasattr(trainer, name):  # transformers 4.56 has the first one only
            setattr(trainer, name, _waiting_first(getattr(trainer, name)))


def _waiting_first(call: Callable[..., object]) -> Callable[..., object]:
    @functools.wraps(call)
    def waits(*args: object, **options: object) -> object:
        wait_for_save()
        return call(*args, **options)

    return waits


def _show_to_callbacks(trainer: Any) -> None:
    """Show averaged gradients to callbacks before the step, which they may change; free where none overrides it."""
    from transformers import TrainerCallback

    handler, base = trainer.callback_handler, TrainerCallback.on_pre_optimizer_step
    if "on_pre_optimizer_step" in vars(handler):
        return
    stock = handler.on_pre_optimizer_step

    @functools.wraps(stock)
    def on_pre_optimizer_step(*args: object, **options: object) -> object:
        overridden = any(type(each).on_pre_optimizer_step is not base for each in handler.callbacks)
        zerosync = trainer.accelerator.deepspeed_engine_wrapped.zerosync
        with zerosync.full_gradients() if overridden else nullcontext():
            return stock(*args, **options)

    handler.on_pre_optimizer_step = on_pre_optimizer_step


def _replace(stock: Callable[..., Any], plugin_class: type) -> Callable[..., object]:
    @functools.wraps(stock)
    def deepspeed_init(trainer: Any, num_training_steps: int, inference: bool = False) -> tuple[object, object]:
        plugin: Any = trainer.accelerator.state.deepspeed_plugin
        if inference or not isinstance(plugin, plugin_class):
            return stock(trainer, num_training_steps, inference)
        setattr(trainer.accelerator, _TRAINER, weakref.ref(trainer))
        _gather_to_save(trainer)
        _keep_last_complete(trainer)
        _show_to_callbacks(trainer)
        configured = _configured(trainer.accelerator)
        optimizer, scheduler = trainer.optimizer, trainer.lr_scheduler
        if keeps_engine(trainer.accelerator):
            if configured:
                raise ValueError(
                    "A second Trainer.train(), or one with another batch size (auto_find_batch_size), goes on with the"
                    f" engine of the first, but its {configured[0]!r} comes from the DeepSpeed configuration and has"
                    " been stepped. Leave it out of the configuration, or make a new Trainer."
                )
            trainer.model_wrapped = trainer.accelerator.deepspeed_engine_wrapped.engine
            return optimizer, scheduler
        if isinstance(optimizer, DeepSpeedOptimizerWrapper) and "optimizer" in configured:
            optimizer = None  # of an engine that has made no step
        if isinstance(scheduler, DeepSpeedSchedulerWrapper):
            scheduler = None  # of that engine, too
        for name, given in (("optimizer", optimizer), ("scheduler", scheduler)):
            if given is not None and name in configured:
                raise ValueError(
                    f"Trainer got the {name} {type(given).__name__}, and the DeepSpeed configuration has one, too."
                    " Leave out one of them."
                )
        trainer.model_wrapped = trainer.model  # not the engine of an earlier training
        with in_full_shapes(trainer.model.parameters()):  # for create_optimizer()
            made, made_scheduler = stock(trainer, num_training_steps, inference)
        if optimizer is not None:
            trainer.optimizer = made = optimizer
            if made_scheduler is not None:
                made_scheduler.optimizer = made
        return made, made_scheduler if scheduler is None else scheduler

    return deepspeed_init
