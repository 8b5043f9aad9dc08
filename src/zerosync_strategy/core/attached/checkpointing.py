"""The checkpoints that an attached engine saves and loads (W5, K1, K2): DeepSpeed's, and distributed ones (K3)."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from zerosync_strategy.core.attached.contents import Contents, client_state
from zerosync_strategy.core.attached.engine import AttachedEngine, why_not_by_name
from zerosync_strategy.core.checkpoints.background import bytes_of, wait_for_save
from zerosync_strategy.core.checkpoints.loads import SavedCheckpoint, verify
from zerosync_strategy.core.checkpoints.manifests import is_distributed
from zerosync_strategy.core.checkpoints.readers import DCPReader, Reader, StockReader
from zerosync_strategy.core.checkpoints.saves import DistributedSave, EngineSave, engine_save
from zerosync_strategy.core.comm.collectives import largest
from zerosync_strategy.core.engine import engine_state, saved_files, zero
from zerosync_strategy.core.engine.several import requiring_grad
from zerosync_strategy.core.failures.agreement import together
from zerosync_strategy.core.failures.errors import (
    HALF_LOADED,
    HALF_READ,
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
    """Prepare the engine for a save in any format. Collective."""
    wait_for_save()
    if attached.parts.engine.global_rank == 0:
        attached.parts.window.warn_if_open("save_checkpoint() was called")
    attached.guard_states()
    attached.stage.before_save()
    with attached.stage.as_they_are():
        attached.stage.adopt_edits()  # a resumed run starts from the master weights


@contextmanager
def saving(attached: AttachedEngine, path: str | Path, tag: str, save_latest: bool) -> Iterator[bool]:
    """Around DeepSpeed's ``save_checkpoint``; yields whether DeepSpeed is to write the file ``latest``."""
    engine = attached.parts.engine
    before_save(attached)
    save = EngineSave(Path(path), tag, engine.global_steps, attached.parts.config.checkpoint_checksums, save_latest)
    verifiable = engine_state.writes_at_once(engine)
    with checkpointing(attached, save.what), engine_save(save, verifiable):
        if not verifiable:
            yield save_latest
            return
        with engine_state.writing(engine, save.writing):
            yield False  # engine_save() writes it, when all is written


def own_entries(attached: AttachedEngine) -> dict[str, object]:
    """Return ZeroSync's entries for the client state of a checkpoint. Collective."""
    parts = attached.parts
    cohorts = attached.stage.stepper.state(parts.names, zero.data_parallel_group(parts.engine.optimizer))
    return _of_every_format(attached) | ({_COHORTS: cohorts} if cohorts else {})


def _of_every_format(attached: AttachedEngine) -> dict[str, object]:
    """Return the entries that both formats have."""
    return {_VERSION: __version__, _LAST: attached.parts.window.last.state()}


def find(
    attached: AttachedEngine, path: str | Path, tag: object, optimizer_states: bool
) -> tuple[str | None, type[Reader] | None]:
    """Return the verified tag to load, and the class of its reader; ``None``: DeepSpeed reads it. Collective."""
    wait_for_save()
    if engine_state.loads_universal(attached.parts.engine):
        raise ValueError(
            "load_checkpoint() found 'checkpoint.load_universal' = true in DeepSpeed's configuration. Any number of"
            " ranks loads the checkpoint that save_checkpoint() wrote: leave the option out, and load that one. If"
            " there is only a converted one, load it before attach()."
        )
    what = f"read the checkpoint in {path}"
    with attached.activity(f"the attempt to {what}"):
        tag = verify(saved_checkpoint(attached, path, tag, optimizer_states))
        if tag is None:
            return None, None
        if is_distributed(folder := Path(path) / tag):
            return tag, DCPReader
        if not _any_ranks(attached):
            return tag, None
        is_other = together(what, lambda: _is_of_others(attached, folder, optimizer_states), lambda: NOTHING_LOADED)
        # Another rank may find that it owned other parameters.
        return tag, StockReader if largest([is_other], None)[0] else None


def _is_of_others(attached: AttachedEngine, folder: Path, optimizer_states: bool) -> tuple[str, bool]:
    """Return the kind of a checkpoint of DeepSpeed's, as text, and whether DeepSpeed cannot load it on this rank."""
    kind, by_name = saved_files.kind_of(folder), attached.by_name
    if kind is None:
        return "", False
    stage_3 = zero.stage(attached.parts.engine) == 3
    is_other = kind.ranks != dist.get_world_size() or kind.on_stage_3 != stage_3
    if not optimizer_states:  # on other stages, the module's file has all; on stage 3 DeepSpeed reads those of `latest`
        return repr(kind), kind.on_stage_3 or stage_3
    is_other = is_other or kind.by_name != (by_name is not None)
    if by_name is not None and not is_other:
        is_other = saved_files.names_of(folder, dist.get_rank()) != by_name.own_names()
    return repr(kind), is_other


def _any_ranks(attached: AttachedEngine) -> bool:
    """Return whether a checkpoint of DeepSpeed's can be read by name."""
    engine = attached.parts.engine
    return engine_state.is_readable(engine) and not why_not_by_name(engine)


@contextmanager
def loading(attached: AttachedEngine, path: str | Path) -> Iterator[None]:
    """Around DeepSpeed's ``load_checkpoint``."""
    engine = attached.parts.engine
    what = f"read the checkpoint in {path}"
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
        attached.states_loaded()

    def loaded() -> tuple[str, None]:
        for error in failed:
            raise error
        return f"step {engine.global_steps}", None

    with attached.activity(f"the attempt to {what}"):
        together(what, loaded, lambda: "" if any(isinstance(each, NothingReplaced) for each in failed) else HALF_LOADED)


def saved_checkpoint(
    attached: AttachedEngine, path: str | Path, tag: object, optimizer_states: bool
) -> SavedCheckpoint:
    """Return what ``load_checkpoint`` with these arguments has to verify."""
    engine, any_ranks = attached.parts.engine, _any_ranks(attached)
    weights_in_shards = zero.stage(engine) == 3
    return SavedCheckpoint(
        Path(path), None if tag is None else str(tag), attached.parts.config.checkpoint_checksums,
        shards=optimizer_states or weights_in_shards,
        any_ranks=any_ranks or not optimizer_states,
        weights_of_latest=weights_in_shards and not optimizer_states and not any_ranks,
        files=lambda folder: engine_state.files_to_load(engine, folder, optimizer_states, any_ranks),
    )  # fmt: skip


def require_frozen(module: torch.nn.Module, state: Mapping[str, object]) -> None:
    """Raise :class:`NothingReplaced` if ``state`` has all of ``module`` except its frozen parameters."""
    missing = engine_state.frozen_missing(module, state)
    if missing and missing.keys() == module.state_dict().keys() - state.keys():
        raise NothingReplaced(f"{frozen_left_out(next(iter(missing)))}. {NOTHING_LOADED}")


def loaded(
    attached: AttachedEngine, path: str | Path, found: tuple[str | None, dict[str, Any] | None], optimizer_states: bool
) -> tuple[str | None, dict[str, Any] | None]:
    """Return ``found``, the result of DeepSpeed's ``load_checkpoint``, after loading and removing our entries."""
    _, state = found
    if state is None:
        _warn_of_nothing_loaded(attached, path)
        return found
    cohorts = state.pop(_COHORTS, [])
    take_last(attached, state)
    if optimizer_states:
        attached.stage.stepper.load(cohorts, attached.parts.names)
    return found


def take_last(attached: AttachedEngine, state: dict[str, Any]) -> None:
    """Remove the entries of every format from ``state``, and load them."""
    state.pop(_VERSION, None)
    if (last := state.pop(_LAST, None)) is not None:  # so that a run that goes on reduces in the same backwards
        attached.parts.window.last.load(last)


def _warn_of_nothing_loaded(attached: AttachedEngine, path: str | Path) -> None:
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
    """Around reads or writes of shards, with ``stock`` in DeepSpeed's layout, else in a step's. Collective."""
    # Trained parameters are saved and loaded with the optimizer, even if they are frozen now.
    apart, trained = attached.apart("checkpoints"), requiring_grad(attached.parts.reducer.params, True)
    with apart, attached.activity(f"the attempt to {what}"), trained:
        if stock:
            attached.stage.in_stock_layout()
        else:
            attached.stage.in_step_layout()
        with attached.stage.as_they_are():
            attached.stage.release_held()
            yield


# ---- distributed checkpoints, and loads by name ----------------------------------------------------------------------


def save_distributed(
    attached: AttachedEngine, path: str | Path, tag: str, said: dict[str, Any], save_latest: bool, exclude_frozen: bool
) -> bool:
    """Save the engine, as ``save_checkpoint`` does, with what the program has ``said`` as client state. Collective.

    Every rank raises if one cannot write.
    """
    config, step = attached.parts.config, attached.parts.engine.global_steps
    before_save(attached)
    part = DistributedSave(Path(path), tag, step, save_latest, config.checkpoint_background)
    with checkpointing(attached, part.what, stock=False), engine_save(part, verifiable=True), part.writing():
        part.content = Contents(attached).written(said | _of_every_format(attached), exclude_frozen)
        if attached.parts.copies is not None:
            part.content = attached.parts.copies.of(part.content)
    return True


def bytes_to_copy(attached: AttachedEngine) -> int:
    """Return the host memory that saves in the background take on this rank; 0 if they are written at once. Collective.

    States of the optimizer count once it has made them.
    """
    if not attached.parts.config.checkpoint_background:
        return 0
    with checkpointing(attached, "measure a checkpoint", stock=False):
        return bytes_of(Contents(attached).written({}, exclude_frozen=False))


def load_by_name(
    attached: AttachedEngine, path: str | Path, tag: str, open_reader: type[Reader], strict: bool, states: bool,
    scheduler: bool, module_only: bool,
) -> tuple[str, dict[str, Any]]:  # fmt: skip
    """Load the verified ``tag`` by name; return its directory and the client state. Collective.

    Every rank raises if one cannot read, or if the checkpoint is of another model or optimizer.
    """
    folder, what = Path(path) / tag, f"read the checkpoint in {path}"
    attached.parts.window.abort("load_checkpoint() was called")
    with checkpointing(attached, what, stock=False):
        contents = Contents(attached)

        def examine() -> tuple[str, Reader]:
            reader = open_reader(folder)
            contents.examine(reader, strict, states)
            return "", reader

        reader = together(what, examine, lambda: NOTHING_LOADED)

        def read() -> tuple[str, dict[str, Any]]:
            contents.read(reader, states)
            if not module_only:
                contents.read_engine(reader, states, scheduler)
            return "", client_state(reader)

        try:
            said = together(what, read, lambda: HALF_READ)
            contents.give()
        finally:
            attached.states_loaded()
    take_last(attached, said)
    return str(folder), said
