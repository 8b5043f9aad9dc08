"""The checkpoints that an attached engine saves and loads (W5, K1, K2)."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from zerosync_strategy.core.attached.by_name import refuse_states_by_name
from zerosync_strategy.core.attached.engine import AttachedEngine
from zerosync_strategy.core.checkpoints.background import wait_for_save
from zerosync_strategy.core.checkpoints.loads import Source, verify
from zerosync_strategy.core.checkpoints.manifests import LATEST, is_distributed
from zerosync_strategy.core.checkpoints.saves import EngineSave, engine_save
from zerosync_strategy.core.engine import checkpoint_files, zero
from zerosync_strategy.core.engine.several import requiring_grad
from zerosync_strategy.core.failures.agreement import together
from zerosync_strategy.core.failures.errors import (
    AS_MANY,
    CONVERT,
    HALF_LOADED,
    NOTHING_LOADED,
    NothingReplaced,
    RankError,
    frozen_left_out,
)
from zerosync_strategy.version import __version__

_VERSION = "zerosync_version"  # of the ZeroSync that saved a checkpoint
_COHORTS = "zerosync_cohorts"  # the state of Stepper
_LAST = "zerosync_last_backward"  # the state of LastBackward


def before_save(attached: AttachedEngine) -> None:
    """Called before any format is written. Collective."""
    wait_for_save()
    if attached.parts.engine.global_rank == 0:
        attached.parts.window.warn_if_open("save_checkpoint() was called")
    attached.guard_states()
    attached.weights.before_save()
    with attached.weights.as_they_are():
        attached.weights.adopt_edits()  # a resumed run starts from the master weights


@contextmanager
def saving(attached: AttachedEngine, path: Any, tag: str, save_latest: bool) -> Iterator[bool]:
    """Around DeepSpeed's ``save_checkpoint``; yields whether DeepSpeed is to write the file ``latest``."""
    engine = attached.parts.engine
    before_save(attached)
    save = EngineSave(Path(path), tag, engine.global_steps, attached.parts.config.checkpoint_checksums, save_latest)
    verifiable = checkpoint_files.writes_at_once(engine)
    with checkpointing(attached, save.what), engine_save(save, verifiable):
        if not verifiable:
            yield save_latest
            return
        with checkpoint_files.writing(engine, save.writing):
            yield False  # engine_save() writes it, when all is written


def client_state(attached: AttachedEngine) -> dict[str, Any]:
    """Return ZeroSync's entries for the client state of a checkpoint. Collective."""
    cohorts = attached.stepper.state(attached.parts.names, zero.data_parallel_group(attached.parts.engine.optimizer))
    return of_every_format(attached) | ({_COHORTS: cohorts} if cohorts else {})


def of_every_format(attached: AttachedEngine) -> dict[str, Any]:
    """Return those that each format has."""
    return {_VERSION: __version__, _LAST: attached.parts.window.last.state()}


def find(attached: AttachedEngine, path: Any, tag: Any, optimizer_states: bool) -> tuple[str | None, bool]:
    """Return the verified tag that ``load_checkpoint`` loads, and whether it is a distributed one. Collective."""
    wait_for_save()
    if checkpoint_files.loads_universal(attached.parts.engine) and not (tag and is_distributed(Path(path) / str(tag))):
        _check_universal(attached)
    source = source_of(attached, path, tag, optimizer_states)
    with attached.activity(f"the attempt to read the checkpoint in {path}"):
        tag = verify(source)
    return tag, tag is not None and is_distributed(Path(path) / tag)


def _check_universal(attached: AttachedEngine) -> None:
    """Raise ``ValueError`` if :func:`restore_universal` cannot restore all that DeepSpeed leaves out."""
    if attached.parts.reducer.shards.over_groups:
        raise ValueError(
            "load_checkpoint() was to load a universal checkpoint into parameters that shard_over() gives to"
            " groups of ranks. Under one name it holds one parameter, of no group. Load the checkpoint that"
            " save_checkpoint() wrote, on as many ranks."
        )
    if name := checkpoint_files.not_restored(attached.parts.engine.module, _trained()):
        raise ValueError(
            f"load_checkpoint() was to load a universal checkpoint, which would leave {name!r} as it was built: no"
            " optimizer has it, and ZeRO-3 keeps its shard on NVMe, quantized or twice (hpZ). Build the engine for it"
            " without 'offload_param' on NVMe, 'zero_quantized_weights', 'zero_quantized_nontrainable_weights' and"
            " 'zero_hpz_partition_size', or load the checkpoint that save_checkpoint() wrote, on as many ranks."
        )


@contextmanager
def loading(attached: AttachedEngine, path: Any, tag: str | None, optimizer_states: bool) -> Iterator[None]:
    """Around DeepSpeed's ``load_checkpoint`` of the verified ``tag``."""
    engine = attached.parts.engine
    what = f"read the checkpoint in {path}"
    with attached.activity(f"the attempt to {what}"):
        if optimizer_states and tag is not None and attached.by_name is not None:
            attached.by_name.examine(Path(path), tag)
        elif optimizer_states and tag is not None:
            refuse_states_by_name(engine, Path(path), tag)
    # Gradients of the present parameters are invalid for the loaded ones.
    attached.parts.window.abort("load_checkpoint() was called")
    failed: list[Exception] = []
    try:
        with checkpointing(attached, what):
            yield
    except RankError:
        raise
    except Exception as error:
        failed.append(error)
    finally:
        if attached.by_name is not None:
            attached.by_name.saved = None
        attached.states_loaded()

    def loaded() -> tuple[str, None]:
        for error in failed:
            raise error
        return f"step {engine.global_steps}", None

    with attached.activity(f"the attempt to {what}"):
        together(what, loaded, lambda: "" if any(isinstance(each, NothingReplaced) for each in failed) else HALF_LOADED)


def source_of(attached: AttachedEngine, path: Any, tag: Any, optimizer_states: bool) -> Source:
    """Return what ``load_checkpoint`` with these arguments has to verify."""
    engine = attached.parts.engine
    is_universal = checkpoint_files.loads_universal(engine)
    weights_in_shards = zero.stage(engine) == 3
    other_ranks = _remedy_for_other_ranks(attached)
    return Source(
        Path(path), None if tag is None else str(tag), attached.parts.config.checkpoint_checksums,
        shards=optimizer_states or weights_in_shards,
        other_ranks=other_ranks if optimizer_states else "",
        latest=checkpoint_files.LATEST_UNIVERSAL if is_universal else LATEST,
        weights_of_latest=weights_in_shards and not optimizer_states and not is_universal,
        files=lambda directory, tag: checkpoint_files.files_to_load(
            engine, directory, tag, optimizer_states, None if other_ranks else 0
        ),
    )  # fmt: skip


def _remedy_for_other_ranks(attached: AttachedEngine) -> str:
    if attached.by_name is not None:
        return attached.by_name.other_ranks
    return AS_MANY if any(each.by_name is not None for each in AttachedEngine.all) else CONVERT


def reads_by_name(attached: AttachedEngine) -> bool:
    """Return whether each rank reads the checkpoint that is being loaded by names; else DeepSpeed reads it."""
    return attached.by_name is not None and attached.by_name.saved is not None


def require_frozen(module: torch.nn.Module, state: Mapping[str, Any]) -> None:
    """Raise :class:`NothingReplaced` if ``state`` has all of ``module`` except its frozen parameters."""
    missing = checkpoint_files.frozen_missing(module, state)
    if missing and missing.keys() == module.state_dict().keys() - state.keys():
        raise NothingReplaced(f"{frozen_left_out(next(iter(missing)))}. {NOTHING_LOADED}")


def restore_universal(attached: AttachedEngine, model_file: str, strict: bool, optimizer_state: bool) -> None:
    """Restore what DeepSpeed leaves out of a universal checkpoint, inside :func:`loading`."""
    if checkpoint_files.loads_universal(attached.parts.engine):
        is_universal = optimizer_state and not reads_by_name(attached)
        checkpoint_files.restore_rest(attached.parts.engine, _trained(), model_file, strict, is_universal)


def _trained() -> set[torch.nn.Parameter]:
    """Return the parameters of all optimizers, including several over one module."""
    return {param for each in AttachedEngine.all for param in each.parts.reducer.params}


def loaded(attached: AttachedEngine, path: Any, found: tuple[Any, Any], optimizer_states: bool) -> tuple[Any, Any]:
    """Return what DeepSpeed's ``load_checkpoint`` has ``found``, without our entries, which are loaded."""
    _, state = found
    if state is None:
        _warn_of_nothing_loaded(attached, path)
        return found
    cohorts = state.pop(_COHORTS, [])
    take_last(attached, state)
    if optimizer_states:
        attached.stepper.load(cohorts, attached.parts.names)
    return found


def take_last(attached: AttachedEngine, state: dict[str, Any]) -> None:
    """Remove the entries of every format from ``state``, and load them."""
    state.pop(_VERSION, None)
    if (last := state.pop(_LAST, None)) is not None:  # so that a run that goes on reduces in the same backwards
        attached.parts.window.last.load(last)


def _warn_of_nothing_loaded(attached: AttachedEngine, path: Any) -> None:
    """Warn that ``load_checkpoint`` has found no checkpoint in the directory."""
    if attached.parts.engine.global_rank == 0:
        warnings.warn(
            f"load_checkpoint() loaded nothing and returned (None, None): there is no file 'latest' in {path}. Give"
            " the directory that save_checkpoint() was called with, or a tag=.",
            stacklevel=4,
        )


def check_full_state_dict(attached: AttachedEngine) -> None:
    """Raise if DeepSpeed's own full ``state_dict`` would lack parameters."""
    if attached.parts.reducer.shards.over_groups:
        raise ValueError(
            "DeepSpeed collects a full state_dict on rank 0, which lacks the parameters that other groups of ranks"
            " shard by shard_over(). Use engine.zerosync.full_state(): each group's first"
            " rank has the group's."
        )


@contextmanager
def checkpointing(attached: AttachedEngine, what: str, stock: bool = True) -> Iterator[None]:
    """Around what reads or writes shards; with ``stock`` in DeepSpeed's layout, else in that of a step. Collective."""
    # Trained parameters are saved and loaded with the optimizer, even if they are frozen now.
    apart, trained = attached.parts.traffic.apart("checkpoints"), requiring_grad(attached.parts.reducer.params, True)
    with apart, attached.activity(f"the attempt to {what}"), trained:
        if stock:
            attached.weights.in_stock_layout()
        else:
            attached.weights.in_step_layout()
        with attached.weights.as_they_are():
            attached.weights.release_held()
            yield
