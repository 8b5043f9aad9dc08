"""Fabric's checkpoints: a directory, in which each model is a checkpoint of DeepSpeed with its optimizer.

The only model of a state lies in the directory itself, as Fabric's own DeepSpeed strategy has it; several lie in
folders that have their names in the state. What else is in the state lies beside each model, under one key.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from torch.nn import Module

from zerosync_strategy.frontend import (
    Source,
    handle_of,
    loads_universal,
    one_load,
    one_save,
    source,
    whole_checkpoint,
)

from .prepared import PreparedModule, unwrap_prepared

TAG = "checkpoint"
"""The name of a model's checkpoint within its directory, as Fabric has it."""
_REST = "fabric_state"


def save(
    path: Any, state: dict[str, Any], convert: Callable[[dict[str, Any]], Any], exclude_frozen: bool
) -> None:  # fmt: skip
    """Write ``state`` to the directory ``path``. Collective.

    Args:
        state: models that were set up with an optimizer, those optimizers, and anything that ``convert`` can convert.
        exclude_frozen: leave out frozen parameters.

    Raises:
        ValueError: no model; one without an optimizer; an optimizer without its model.
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


def load(path: Any, state: Any, strict: bool, broadcast: Callable[[Any], Any]) -> dict[str, Any]:
    """Restore ``state`` from the directory ``path``, in place; return what of the checkpoint is not in it. Collective.

    Models are restored with their optimizers if these are in ``state``, and all else as the first rank has saved it.

    Raises:
        FileNotFoundError: there is no such checkpoint.
        KeyError: with ``strict``, the checkpoint lacks what ``state`` asks for.
        ValueError: ``state`` has no model, or an optimizer without its model.
    """
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
    # Under ZeRO-3 each rank has read what it saved itself. Without DeepSpeed, the first rank alone saves.
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


def load_weights(module: Module, state: dict[str, Any], strict: bool) -> None:
    """``module.load_state_dict(state)`` on any stage, for a model that was set up or not. Collective."""
    from deepspeed import zero

    model = unwrap_prepared(module)
    zerosync = handle_of(model)
    if zerosync is not None:
        with zerosync.full_parameters():
            zerosync.engine.module.load_state_dict(state, strict=strict)
        return
    with zero.GatheredParameters(list(model.parameters()), modifier_rank=0):
        model.module.load_state_dict(state, strict=strict)


def _load_for_evaluation(model: PreparedModule, directory: Path, strict: bool) -> None:
    """Load a model without an optimizer; under ZeRO-3, the weights are in the optimizer's part of a checkpoint."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    load_weights(model, get_fp32_state_dict_from_zero_checkpoint(str(directory), TAG), strict)


def _models_in(state: dict[str, Any], call: str) -> dict[str, Any]:
    """Return the models of ``state`` that were set up: engines, and models without an optimizer.

    Raises:
        ValueError: there is none.
    """
    from deepspeed import DeepSpeedEngine

    models = {name: unwrap_prepared(value) for name, value in state.items()}
    models = {name: value for name, value in models.items() if isinstance(value, (DeepSpeedEngine, PreparedModule))}
    if not models:
        raise ValueError(
            f"{call} found no model in the state that fabric.setup() has returned. Pass it: {{'model': model, ...}}."
        )
    return models


def _optimizers_in(state: dict[str, Any], models: dict[str, Any]) -> dict[str, Any]:
    """Return the entries of ``state`` that are optimizers of models."""
    found = {name: value for name, value in state.items() if name not in models and handle_of(value) is not None}
    for name, optimizer in found.items():
        if not any(getattr(model, "optimizer", None) is optimizer for model in models.values()):
            raise ValueError(
                f"The state has the optimizer {name!r} without its model. Under ZeRO they are saved and loaded"
                " together: add the model that was set up with it."
            )
    return found


def _found(path: Any, name: str, models: dict[str, Any]) -> Path:
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
    directories: dict[str, Path], models: dict[str, Any], optimizers: dict[str, Any]
) -> AbstractContextManager[None]:
    """Around the loading of several models, or of one without an optimizer; another one verifies it by itself."""
    trained = [model for model in models.values() if not isinstance(model, PreparedModule)]
    if len(models) == len(trained) == 1 or any(map(loads_universal, trained)):
        return nullcontext()
    sources = []
    for name, model in models.items():
        zerosync = handle_of(model)
        sources.append(
            Source(directories[name], TAG, checksums=True)
            if zerosync is None
            else source(zerosync, directories[name], TAG, _is_loaded(model.optimizer, optimizers))
        )
    return one_load(sources)


def _is_loaded(optimizer: Any, optimizers: dict[str, Any]) -> bool:
    return any(each is optimizer for each in optimizers.values())


def _directory(path: Any, name: str, models: dict[str, Any]) -> Path:
    return Path(path) if len(models) == 1 else Path(path) / name
