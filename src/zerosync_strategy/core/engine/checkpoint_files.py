"""The files of DeepSpeed's checkpoints: who writes and reads them, what they contain, and what universal ones lack.

From a universal checkpoint, DeepSpeed restores the parameters that the optimizer trains, and its state. Buffers and
parameters that are not trained stay as the engine was built. Under ZeRO-3, it gives all parameter groups the options of
the first one, and all shards one shared step count, which each shard advances.

An optimizer that needs whole parameters has its state by parameter name, each in the file of the rank that owned the
parameter. So :class:`SavedShards` reads a checkpoint by names, for any number of ranks that wrote it.
"""

from __future__ import annotations

import copy
import functools
import zipfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from zerosync_strategy.core.engine import contract, deepspeed_internals, zero, zero3
from zerosync_strategy.core.engine.interpose import Stock, replaced
from zerosync_strategy.core.engine.parameter import record_of

LATEST_UNIVERSAL = "latest_universal"


def writes_at_once(engine: Any) -> bool:
    """Return whether a file is on disk when DeepSpeed's ``save`` of it returns, written by one rank.

    ``"checkpoint": {"writer": ...}`` and other checkpoint engines may write in the background, or with several ranks.
    """
    from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine

    return type(engine.checkpoint_engine) is TorchCheckpointEngine


@contextmanager
def writing(engine: Any, around: Callable[[str | None], AbstractContextManager[None]]) -> Iterator[None]:
    """While ``engine`` saves, write each file in ``around(path)``, and DeepSpeed's script in ``around(None)``."""
    writer = engine.checkpoint_engine
    save, copy_script = writer.save, engine._copy_recovery_script

    def save_around(state_dict: Any, path: str) -> None:
        with around(path):
            save(state_dict, path)

    def copy_script_around(save_path: str) -> None:
        with around(None):
            copy_script(save_path)

    with replaced(writer, "save", save_around), replaced(engine, "_copy_recovery_script", copy_script_around):
        yield


def files_to_load(engine: Any, directory: Path, tag: str, shards: bool, rank: int | None = None) -> list[Path]:
    """Return the first files that this rank, or ``rank``, loads; with ``shards``, those of the optimizer, too."""
    if engine.mp_world_size > 1:  # the checkpoint may have another number of them
        return []
    names = [engine._get_ckpt_name(str(directory), tag)]
    if shards:
        names.append(engine._get_zero_ckpt_name(str(directory), tag))
    paths = [Path(name) for name in names]
    if rank is None:
        return paths
    own = dist.get_rank(zero.data_parallel_group(engine.optimizer))
    return [path.with_name(path.name.replace(f"pp_rank_{own}_", f"pp_rank_{rank}_")) for path in paths]


def frozen_missing(module: torch.nn.Module, state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the frozen parameters of ``module`` that ``state`` lacks, under each of their names."""
    params = module.named_parameters(remove_duplicate=False)
    return {name: param.data for name, param in params if not param.requires_grad and name not in state}


class FrozenStay(Stock):
    """Overrides of ``DeepSpeedEngine``: frozen parameters that a checkpoint lacks keep their values."""

    module: torch.nn.Module

    def load_module_state_dict(
        self, checkpoint: dict[str, Any], strict: bool = True, custom_load_fn: Any = None, *args: Any, **kwargs: Any
    ) -> None:
        def load(src: dict[str, Any], dst: torch.nn.Module) -> None:
            custom_load_fn(src=src | frozen_missing(dst, src), dst=dst)

        if custom_load_fn is None:
            checkpoint["module"].update(frozen_missing(self.module, checkpoint["module"]))
        load_fn = None if custom_load_fn is None else load
        super().load_module_state_dict(checkpoint, strict, load_fn, *args, **kwargs)


def is_readable(engine: Any) -> bool:
    """Return whether a rank can read the files of others: no model parallelism, and torch's format."""
    return bool(engine.mp_world_size == 1 and writes_at_once(engine))


def loads_universal(engine: Any) -> bool:
    """Return whether ``"checkpoint": {"load_universal": true}`` is in the configuration of ``engine``."""
    return bool(engine.load_universal_checkpoint())


def _untrained(module: torch.nn.Module, trained: Collection[Any]) -> Iterator[tuple[str, Any]]:
    ids = {id(param) for param in trained}
    return ((name, param) for name, param in module.named_parameters() if id(param) not in ids)


def not_restored(module: torch.nn.Module, trained: Collection[Any]) -> str:
    """Return the name of a parameter for which :func:`restore_rest` cannot restore values; empty if there is none."""
    untrained = ((name, param) for name, param in _untrained(module, trained) if zero3.is_sharded(param))
    return next((name for name, param in untrained if param.ds_numel and not zero3.has_plain_shard(param)), "")


@torch.no_grad()
def restore_rest(engine: Any, trained: Collection[Any], model_file: str, strict: bool, optimizer_state: bool) -> None:
    """Restore what DeepSpeed leaves out when it loads a universal checkpoint. Sends nothing.

    Raise ``RuntimeError`` if ``strict`` and the checkpoint lacks part of the module.

    Args:
        trained: the parameters of its optimizer, and of others over its module.
        model_file: the first file of the module's state, as ``load_checkpoint`` returned it.
        optimizer_state: the state of the optimizer was loaded, too.
    """
    file, module = Path(model_file), engine.module
    names = dict(module.named_parameters(remove_duplicate=False)).keys()
    saved = read(file)
    state: dict[str, Any] = saved["module"]
    if zero.stage(engine) == 3:  # the parameters in the module's state have no elements
        state = {name: value for name, value in state.items() if name not in names}
        state |= _untrained_of_stage_3(file, saved)
        if optimizer_state:
            _separate_groups(zero.stepping_optimizer(engine), file.parent)
    untrained = dict(_untrained(module, trained))
    others = module.state_dict().keys() - names
    if strict and (missing := sorted((untrained.keys() | others) - state.keys())):
        raise RuntimeError(f"the universal checkpoint lacks {', '.join(map(repr, missing))} of the module")
    module.load_state_dict({name: state[name] for name in others & state.keys()}, strict=False)
    for name in untrained.keys() & state.keys():
        _set_values(untrained[name], state[name])


def _set_values(param: Any, full: torch.Tensor) -> None:
    if zero3.is_sharded(param):
        record_of(param).set_values(full.to(param.device, param.dtype))
    else:
        param.data.copy_(full)


def _untrained_of_stage_3(file: Path, first: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the untrained parameters in full. Each rank's file has a shard of them; ``first`` is that of rank 0."""
    others = range(1, first["dp_world_size"])
    saved = [first, *(read(file.with_name(file.name.replace("pp_rank_0_", f"pp_rank_{rank}_"))) for rank in others)]
    full = {}
    for name, shape in (first["frozen_param_shapes"] or {}).items():
        flat = torch.cat([shards["frozen_param_fragments"][name].reshape(-1) for shards in saved])
        full[name] = flat[: shape.numel()].view(shape)
    return full


def _separate_groups(stepping: torch.optim.Optimizer, checkpoint: Path) -> None:
    """Restore the options of each parameter group, and give each shard its own step count."""
    saved = read(checkpoint / "zero" / "optimizer_state.pt")["optimizer_state_dict"]["param_groups"]
    for group, options in zip(stepping.param_groups, saved, strict=True):
        group.update({name: value for name, value in options.items() if name != "params"})
    for state in stepping.state.values():
        if isinstance(step := state.get("step"), torch.Tensor):
            state["step"] = step.clone()


def read(file: Path) -> dict[str, Any]:
    """Return the contents of ``file``; tensors are on the host, and read lazily except in torch's old format."""
    lazily = zipfile.is_zipfile(file)
    return torch.load(file, map_location="cpu", weights_only=False, mmap=lazily)


# ---- the optimizer's part ----------------------------------------------------------------------------------------

State = dict[str, Any]
"""What a rank's ZeRO optimizer saves and loads."""


def torch_state_of(state: State) -> dict[str, Any]:
    return state[_keys(state)[0]]


def is_by_name(state: State) -> bool:
    """Return whether the torch optimizer's state in a rank's ``state`` has whole parameters, by name."""
    found = torch_state_of(state)
    groups = found["param_groups"] if isinstance(found, dict) else []  # a list: DeepSpeed's elastic checkpoints
    return any(isinstance(param, str) for group in groups for param in group["params"])


def masters_of(state: State) -> list[torch.Tensor]:
    """Return the master weights in a rank's ``state``, by DeepSpeed's groups; on stages 1 and 2 without padding."""
    return state[_keys(state)[1]]


def with_torch_state(state: State, of_torch: dict[str, Any], masters: list[torch.Tensor] | None = None) -> State:
    """Return ``state`` with another state of the torch optimizer and, if given, other master weights."""
    torch_key, masters_key = _keys(state)
    return state | {torch_key: of_torch} | ({} if masters is None else {masters_key: masters})


def _keys(state: State) -> tuple[str, str]:
    if _is_of_flat(state):
        return "base_optimizer_state", "single_partition_of_fp32_groups"
    return "optimizer_state_dict", "fp32_flat_groups"


def _is_of_flat(state: State) -> bool:
    """Return whether it was saved on stage 1 or 2, where ranks have parts of flat groups, not of each parameter."""
    return "base_optimizer_state" in state


@contextmanager
def loading_without_optimizer(engine: Any) -> Iterator[None]:
    """Around ``load_checkpoint`` of an engine without an optimizer, which DeepSpeed 0.19.8 requires to have one."""
    contract.require(deepspeed_internals.EVALUATION)
    engine.optimizer._restore_from_bit16_weights = lambda: None
    try:
        yield
    finally:
        del engine.optimizer._restore_from_bit16_weights


class SavedShards:
    """The optimizer's part of a checkpoint of the engine's ZeRO stage, read on demand."""

    def __init__(self, engine: Any, directory: Path, tag: str) -> None:
        self._files = functools.partial(files_to_load, engine, directory, tag, True)
        self._of_first = read(self._files(0)[0])
        self.ranks: int = self._of_first["dp_world_size"]
        self._states: dict[int, State] = {}

    def state(self, rank: int) -> State:
        if rank not in self._states:
            self._states[rank] = read(self._files(rank)[1])["optimizer_state_dict"]
        return self._states[rank]

    def names(self, rank: int) -> list[list[Any]]:
        """Return the names of the parameters that ``rank`` owned, by group; numbers if it stepped flat shards."""
        return [group["params"] for group in torch_state_of(self.state(rank))["param_groups"]]

    def groups(self) -> list[set[Any]]:
        """Return the union of :meth:`names` over all ranks, by group."""
        of_ranks = zip(*map(self.names, range(self.ranks)), strict=True)
        return [{name for names in of_group for name in names} for of_group in of_ranks]

    def torch_state(self, groups: Sequence[Sequence[str]]) -> dict[str, Any]:
        """Return the state of a torch optimizer that steps the parameters of these names, by its groups."""
        wanted = {name for names in groups for name in names}
        found: dict[str, Any] = {}
        for rank in range(self.ranks):
            of_rank = torch_state_of(self.state(rank))["state"]
            found |= {name: of_rank[name] for name in of_rank.keys() & wanted}
        options = torch_state_of(self.state(0))["param_groups"]
        return {
            "state": copy.deepcopy(found),  # the files may be written again
            "param_groups": [group | {"params": list(names)} for group, names in zip(options, groups, strict=True)],
        }

    def masters(self, names: Collection[str]) -> dict[str, torch.Tensor]:
        """Return the master weights of the parameters ``names``, flat, on the host."""
        parts: dict[str, list[torch.Tensor]] = {name: [] for name in names}
        if _is_of_flat(self.state(0)):
            self._add_of_flat(parts)
        else:
            self._add_of_each(parts)
        return {name: torch.cat(of_param) for name, of_param in parts.items()}

    def _add_of_flat(self, parts: dict[str, list[torch.Tensor]]) -> None:
        for rank in range(self.ranks):
            state = self.state(rank)
            for places, flat in zip(state["param_slice_mappings"], masters_of(state), strict=True):
                for name in places.keys() & parts.keys():
                    parts[name].append(flat.data.narrow(0, places[name].start, places[name].numel))

    def _add_of_each(self, parts: dict[str, list[torch.Tensor]]) -> None:
        flats = [masters_of(self.state(rank)) for rank in range(self.ranks)]
        for index, shapes in enumerate(self._of_first["param_shapes"]):
            begin = 0
            for name, shape in shapes.items():
                width = -(-shape.numel() // self.ranks)
                if name in parts:
                    full = torch.cat([of_rank[index].data.narrow(0, begin, width) for of_rank in flats])
                    parts[name].append(full[: shape.numel()])
                begin += width
