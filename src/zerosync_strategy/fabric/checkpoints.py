"""Fabric's checkpoints: a directory, in which each model is a checkpoint of DeepSpeed with its optimizer.

A single model of a state is saved to the directory itself, as by Fabric's own DeepSpeed strategy. Several models are
saved to folders named by their keys in the state. All other entries of the state are saved with each model, under one
key of its checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from torch.nn import Module

from zerosync_strategy.frontend import (
    DeepSpeedEngine,
    SavedCheckpoint,
    checkpoint_of,
    handle_of,
    is_distributed,
    load_full,
    one_load,
    one_save,
    wait_for_save,
    weights_and_client_state,
    whole_checkpoint,
)

from .calls import PreparedModule, unwrap_prepared

TAG = "checkpoint"
"""Fabric's name of a model's checkpoint within its directory."""
_REST = "fabric_state"


def save(
    path: str | Path, state: dict[str, Any], convert: Callable[[dict[str, Any]], object], exclude_frozen: bool
) -> None:  # fmt: skip
    """Write ``state`` to the directory ``path``. Collective.

    Args:
        state: models that were set up with an optimizer, these optimizers, and anything that ``convert`` can convert.
        exclude_frozen: leave out frozen parameters.

    Raises:
        ValueError: ``state`` has no model, a model without an optimizer, or an optimizer without its model.
    """
    engines = _models_in(state, "fabric.save()")
    if untrained := [name for name, model in engines.items() if isinstance(model, PreparedModule)]:
        raise ValueError(
            f"fabric.save() found models that were set up without an optimizer: {', '.join(untrained)}. It saves what"
            " trains. Leave them out; they are as they were loaded."
        )
    optimizers = _optimizers_in(state, engines)
    rest = convert({name: value for name, value in state.items() if name not in engines | optimizers})
    with one_save():
        for name, engine in engines.items():
            with whole_checkpoint(engine.module, [engine._zerosync]):
                engine.save_checkpoint(
                    str(_directory(path, name, engines)), tag=TAG, client_state={_REST: rest},
                    exclude_frozen_parameters=exclude_frozen,
                )  # fmt: skip


def load(path: str | Path, state: Any, strict: bool, broadcast: Callable[[Any], Any]) -> dict[str, Any]:
    """Restore ``state`` from the directory ``path``, in place; return the other entries of the checkpoint. Collective.

    A model is restored with its optimizer if that is in ``state``. All other entries are those of the first rank.

    Raises:
        FileNotFoundError: the checkpoint does not exist.
        KeyError: with ``strict``, the checkpoint lacks an entry of ``state``.
        ValueError: ``state`` has no model, or an optimizer without its model.
    """
    wait_for_save()
    models = _models_in(state if isinstance(state, dict) else {}, "fabric.load()")
    optimizers = _optimizers_in(state, models)
    saved: dict[str, Any] = {}
    directories = {name: _found(path, name, models) for name in models}
    with _verified_together(directories, models, optimizers):
        for name, model in models.items():
            if isinstance(model, PreparedModule):
                _load_for_evaluation(model, directories[name], strict)
                continue
            with whole_checkpoint(model.module, [model._zerosync]):
                _, saved = model.load_checkpoint(
                    str(directories[name]), tag=TAG, load_module_strict=strict, load_lr_scheduler_states=False,
                    load_optimizer_states=_is_loaded(model.optimizer, optimizers),
                )  # fmt: skip
    # Under ZeRO-3, each rank has read its own entries. Without DeepSpeed, only the first rank saves them.
    rest: dict[str, Any] = broadcast(saved.get(_REST, saved))
    for name in state.keys() - models.keys() - optimizers.keys():
        if name not in rest:
            if strict:
                raise KeyError(
                    f"fabric.load() found no {name!r} in the checkpoint {path}, which has: {', '.join(sorted(rest))}."
                    " Leave it out of the state, or pass strict=False."
                )
            continue
        if hasattr(state[name], "load_state_dict"):
            state[name].load_state_dict(rest.pop(name))
        else:
            state[name] = rest.pop(name)
    return rest


def load_weights(module: Module, state: Mapping[str, object], strict: bool) -> None:
    """Call ``load_state_dict(state)`` of a model on any stage, whether it has an engine or not. Collective."""
    model = unwrap_prepared(module)
    zerosync = handle_of(model)
    if zerosync is not None:
        with zerosync.full_parameters():
            zerosync.engine.module.load_state_dict(state, strict=strict)
        return
    load_full(model.module, state, strict)


def _load_for_evaluation(model: PreparedModule, directory: Path, strict: bool) -> None:
    """Load a model without an optimizer. Under ZeRO-3, the weights are in the optimizer's part of the checkpoint."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    if is_distributed(directory / TAG):
        load_weights(model, weights_and_client_state(directory / TAG, model.module)[0], strict)
        return
    load_weights(model, get_fp32_state_dict_from_zero_checkpoint(str(directory), TAG), strict)


def _models_in(state: Mapping[str, object], call: str) -> dict[str, DeepSpeedEngine]:
    """Return the models of ``state`` that were set up: engines, and models without an optimizer.

    Raises:
        ValueError: ``state`` has none.
    """
    from deepspeed import DeepSpeedEngine

    models = {name: unwrap_prepared(value) for name, value in state.items()}
    models = {name: value for name, value in models.items() if isinstance(value, (DeepSpeedEngine, PreparedModule))}
    if not models:
        raise ValueError(
            f"{call} found no model in the state that fabric.setup() has returned. Pass it: {{'model': model, ...}}."
        )
    return models


def _optimizers_in(state: Mapping[str, object], models: dict[str, DeepSpeedEngine]) -> dict[str, object]:
    """Return the entries of ``state`` that are optimizers of models."""
    found = {name: value for name, value in state.items() if name not in models and handle_of(value) is not None}
    for name, optimizer in found.items():
        if not any(getattr(model, "optimizer", None) is optimizer for model in models.values()):
            raise ValueError(
                f"The state has the optimizer {name!r} without its model. Under ZeRO they are saved and loaded"
                " together: add the model that was set up with it."
            )
    return found


def _found(path: str | Path, name: str, models: dict[str, DeepSpeedEngine]) -> Path:
    """Return the directory of the checkpoint of the model ``name``."""
    directory = _directory(path, name, models)
    if not (directory / TAG).is_dir() and (Path(path) / name / TAG).is_dir():
        directory = Path(path) / name  # one of several
    if not (directory / TAG).is_dir():
        raise FileNotFoundError(
            f"fabric.load() found no checkpoint of the model {name!r} in {directory}: no folder {TAG!r}. Give the"
            " path that fabric.save() was given, and the models under the names that they had there."
        )
    return directory


def _verified_together(
    directories: dict[str, Path], models: dict[str, DeepSpeedEngine], optimizers: Mapping[str, object]
) -> AbstractContextManager[None]:
    """Around the loading of models: checkpoints are verified first. One model with an optimizer does so itself."""
    trained = [model for model in models.values() if not isinstance(model, PreparedModule)]
    if len(models) == len(trained) == 1:
        return nullcontext()
    sources = []
    for name, model in models.items():
        zerosync = handle_of(model)
        sources.append(
            SavedCheckpoint(directories[name], TAG, checksums=True)
            if zerosync is None
            else checkpoint_of(zerosync, directories[name], TAG, _is_loaded(model.optimizer, optimizers))
        )
    return one_load(sources)


def _is_loaded(optimizer: object, optimizers: Mapping[str, object]) -> bool:
    return any(each is optimizer for each in optimizers.values())


def _directory(path: str | Path, name: str, models: dict[str, DeepSpeedEngine]) -> Path:
    return Path(path) if len(models) == 1 else Path(path) / name
