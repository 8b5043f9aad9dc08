"""The files of DeepSpeed's checkpoints by parameter name: who has which elements, for any number of ranks to read.

On stages 1 and 2, a rank's flat master weights are parts of parameters, which its ``param_slice_mappings`` name, in the
order of ranks. On stage 3, each rank has an equal share of each parameter, one after the other. The states of the torch
optimizer lie in flat tensors like the master weights, except those of an optimizer that needs whole parameters: each
is in the file of the rank that owned the parameter, by name.
"""

from __future__ import annotations

import copy
import math
import re
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

_SHARDS = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_00_optim_states\.pt")
_MODEL_OF_RANK = "zero_pp_rank_{}_mp_rank_00_model_states.pt"  # of stage 3
_MODEL = "mp_rank_00_model_states.pt"
_COUNTERS = ("global_steps", "global_samples", "skipped_steps")
_COHORTS = "zerosync_cohorts"  # of parameters that were stepped in other steps: names, and states by master tensor
_NOT_CLIENTS = frozenset([
    "module", "optimizer", "lr_scheduler", "data_sampler", "random_ltd", "dp_world_size", "mp_world_size",
    "global_steps", "skipped_steps", "param_shapes", "shared_params", "frozen_param_shapes", "frozen_param_fragments",
    "buffer_names", _COHORTS,
])  # fmt: skip

SavedState = dict[str, Any]
"""What a rank's ZeRO optimizer saves and loads."""


class Range(NamedTuple):
    """Elements of a tensor in row-major order, from the ``begin``: the flat ``values``, which are read lazily."""

    begin: int
    values: torch.Tensor


class Location(NamedTuple):
    """Where elements of a parameter are, from ``start``: at ``offset`` in a master tensor of a rank."""

    start: int
    numel: int
    rank: int
    master: int
    offset: int


class Writer(NamedTuple):
    """Who has written a checkpoint, and whether the optimizer's states are by name."""

    ranks: int
    on_stage_3: bool
    by_name: bool


def read(file: Path) -> dict[str, Any]:
    """Return the contents of ``file``; tensors are on the host, and read lazily except in torch's old format."""
    lazily = zipfile.is_zipfile(file)
    return torch.load(file, map_location="cpu", weights_only=False, mmap=lazily)


def shards_of(folder: Path) -> dict[int, Path]:
    """Return the files of the optimizer's shards in ``folder``, by rank; none if models were parallel or in stages."""
    found = {int(match[1]): path for path in folder.iterdir() if (match := _SHARDS.fullmatch(path.name))}
    is_alone = not any(re.match(r"layer_|.*mp_rank_(?!00_)\d", path.name) for path in folder.iterdir())
    return dict(sorted(found.items())) if is_alone else {}


def kind_of(folder: Path) -> Writer | None:
    """Return who has written the checkpoint in ``folder``; ``None`` if it has no shards that can be read by name."""
    shards = shards_of(folder)
    if not shards:
        return None
    state = read(next(iter(shards.values())))["optimizer_state_dict"]
    ranks = state["partition_count"]
    return Writer(ranks if _is_of_stage_3(state) else ranks[0], _is_of_stage_3(state), is_by_name(state))


def files_of(folder: Path, rank: int) -> list[Path]:
    """Return the files of the module and the optimizer that ``rank`` verifies, of whichever ranks and stage.

    They should be there. Empty if there are no shards that can be read by name.
    """
    if (kind := kind_of(folder)) is None:
        return []
    path, rank = next(iter(shards_of(folder).values())), rank % kind.ranks
    model = _MODEL_OF_RANK.format(rank) if kind.on_stage_3 else _MODEL
    return [folder / model, path.with_name(re.sub(r"rank_\d+", f"rank_{rank}", path.name, count=1))]


def names_of(folder: Path, rank: int) -> list[list[str]]:
    """Return the names of the parameters that ``rank`` owned, by the torch optimizer's groups."""
    state = torch_state_of(read(shards_of(folder)[rank])["optimizer_state_dict"])
    return [group["params"] for group in state["param_groups"]]


def torch_state_of(state: SavedState) -> Any:
    """Return the torch optimizer's part of a rank's ``state``: a dictionary, or a list if DeepSpeed's is elastic."""
    return state[_keys(state)[0]]


def is_by_name(state: SavedState) -> bool:
    """Return whether the torch optimizer's state in a rank's ``state`` has whole parameters, by name."""
    found = torch_state_of(state)
    groups = found["param_groups"] if isinstance(found, dict) else []
    return any(isinstance(param, str) for group in groups for param in group["params"])


def masters_of(state: SavedState) -> list[torch.Tensor]:
    """Return the master weights in a rank's ``state``, by DeepSpeed's groups; on stages 1 and 2 without padding."""
    found: list[torch.Tensor] = state[_keys(state)[1]]
    return found


def with_torch_state(state: SavedState, of_torch: object, masters: list[torch.Tensor] | None = None) -> SavedState:
    """Return ``state`` with another state of the torch optimizer and, if given, other master weights."""
    torch_key, masters_key = _keys(state)
    return state | {torch_key: of_torch} | ({} if masters is None else {masters_key: masters})


def _keys(state: SavedState) -> tuple[str, str]:
    if _is_of_stage_3(state):
        return "optimizer_state_dict", "fp32_flat_groups"
    return "base_optimizer_state", "single_partition_of_fp32_groups"


def _is_of_stage_3(state: SavedState) -> bool:
    """Return whether it was saved on stage 3, where ranks have parts of each parameter, not of flat groups."""
    return "base_optimizer_state" not in state


class SavedFiles:
    """The checkpoint in ``folder``. Raises ``ValueError`` if its files do not have all that they should."""

    def __init__(self, folder: Path) -> None:
        shards = shards_of(folder)
        states = [read(path)["optimizer_state_dict"] for path in shards.values()]
        self._on_stage_3, self._count = _is_of_stage_3(states[0]), len(states)
        self.model = read(folder / (_MODEL_OF_RANK.format(0) if self._on_stage_3 else _MODEL))
        if missing := {*range(self.model["dp_world_size"])} - shards.keys():
            raise ValueError(f"the optimizer's file of rank {min(missing)} is missing")
        self._states, self._folder = states, folder
        self._torch = [torch_state_of(state) for state in states]
        if not all(isinstance(each, dict) for each in self._torch):
            raise ValueError("it has optimizer states in DeepSpeed's elastic format")
        # Of the master tensors, in the torch optimizer's state.
        self._numbers = [number for group in self._torch[0]["param_groups"] for number in group["params"]]
        self._is_by_name = any(map(is_by_name, states))
        self._masters = [masters_of(state) for state in states]
        self.shapes: dict[str, tuple[int, ...]] = {
            name: tuple(shape) for of_group in self.model["param_shapes"] for name, shape in of_group.items()
        }
        """The shapes of the optimizer's parameters."""
        self._locations: dict[str, list[Location]] = {name: [] for name in self.shapes}  # of their elements, in order
        for name, location in self._locations_on_stage_3() if self._on_stage_3 else self._locations_on_stages_1_and_2():
            self._locations[name].append(location)
        for name, of_param in self._locations.items():
            if sum(location.numel for location in of_param) != math.prod(self.shapes[name]):
                raise ValueError(f"its files do not have all elements of {name!r}")

    def _locations_on_stage_3(self) -> Iterator[tuple[str, Location]]:
        for index, shapes in enumerate(self.model["param_shapes"]):
            offset = 0
            for name, shape in shapes.items():
                numel = shape.numel()
                width = -(-numel // self._count)
                for rank in range(self._count):
                    start = min(rank * width, numel)
                    if part := min(start + width, numel) - start:
                        yield name, Location(start, part, rank, index, offset)
                offset += width
            if any(of_rank[index].numel() != offset for of_rank in self._masters):
                raise ValueError(f"the {self._count} ranks had no equal shares of {next(iter(shapes))!r} and others")

    def _locations_on_stages_1_and_2(self) -> Iterator[tuple[str, Location]]:
        ends = dict.fromkeys(self.shapes, 0)
        for rank, state in enumerate(self._states):
            if {*state["partition_count"]} != {self._count}:
                raise ValueError(f"the {self._count} ranks had no equal shares of all parameters")
            for index, slices in enumerate(state["param_slice_mappings"]):
                for name, part in slices.items():
                    yield name, Location(ends[name], part.numel, rank, index, part.start)
                    ends[name] += part.numel

    def master(self, name: str) -> list[Range]:
        """Return the master weights of a parameter."""
        return self._ranges(name, lambda location: self._masters[location.rank][location.master])

    def _ranges(self, name: str, flat_of: Callable[[Location], torch.Tensor]) -> list[Range]:
        return [
            Range(location.start, flat_of(location).detach().narrow(0, location.offset, location.numel))
            for location in self._locations[name]
        ]

    def states(self, name: str) -> tuple[dict[str, list[Range]], SavedState]:
        """Return the states of the optimizer for a parameter: those by element in flat shards, and the others."""
        if self._is_by_name:
            return {}, next((found for each in self._torch if (found := each["state"].get(name)) is not None), {})
        location = next(iter(self._locations[name]), None)
        if location is None:
            return {}, {}
        found, flat = self._state(location), self._masters[location.rank][location.master]
        by_element = [key for key, value in found.items() if _is_by_element(value, flat)]
        others = {key: value for key, value in found.items() if key not in by_element}
        for cohort, scalars in self.model.get(_COHORTS, ()):
            if name in cohort:
                if location.master not in scalars:
                    return {}, {}
                others = scalars[location.master]
        if unknown := [key for key, value in others.items() if torch.is_tensor(value) and value.numel() > 1]:
            raise ValueError(f"its optimizer's states {unknown} are neither by element nor by parameter")
        of_each = {
            key: self._ranges(name, lambda location, key=key: self._state(location)[key])  # type: ignore[misc]
            for key in by_element
        }
        return of_each, copy.deepcopy(others)  # the files may be written again

    def _state(self, location: Location) -> dict[str, Any]:
        found: dict[str, Any] = self._torch[location.rank]["state"].get(self._numbers[location.master], {})
        return found

    def groups(self) -> list[dict[str, Any]]:
        """Return the optimizer's groups, with the names of their parameters as ``"params"``."""
        groups, index = [], 0
        for number, group in enumerate(self._torch[0]["param_groups"]):
            if self._is_by_name:
                names = [name for each in self._torch for name in each["param_groups"][number]["params"]]
            else:
                of_group = self.model["param_shapes"][index : index + len(group["params"])]
                names, index = [name for shapes in of_group for name in shapes], index + len(group["params"])
            groups.append(copy.deepcopy(group) | {"params": names})
        return groups

    def untrained(self) -> dict[str, Any]:
        """Return what the module has beside the optimizer's parameters, and tied names, whole."""
        aliases = self.model.get("shared_params") or {}
        found = {name: value for name, value in self.model["module"].items() if name not in self.shapes | aliases}
        frozen = self.model.get("frozen_param_shapes") or {}
        if self._on_stage_3:  # other parameters have no elements there
            buffers = {*self.model["buffer_names"]}
            found = {name: each for name, each in found.items() if name in buffers or not torch.is_tensor(each)}
        if self._on_stage_3 and frozen:
            of_ranks = [read(self._folder / _MODEL_OF_RANK.format(rank)) for rank in range(self._count)]
            for name, shape in frozen.items():
                flat = torch.cat([each["frozen_param_fragments"][name].reshape(-1) for each in of_ranks])
                found[name] = flat[: shape.numel()].view(shape)
        return found

    def tied(self) -> dict[str, str]:
        """Return further names of parameters, each with the first one."""
        return dict(self.model.get("shared_params") or {})

    def engine_state(self) -> dict[str, Any]:
        """Return counters, loss scale and scheduler, as :func:`engine_state.state` has them."""
        first = self._states[0]
        return {
            "counters": {name: self.model[name] for name in _COUNTERS if name in self.model},
            "loss_scaler": {**vars(first["loss_scaler"])},
            "loss_scale": {name: first[name] for name in ("dynamic_loss_scale", "overflow")},
            "gradient_scaler": None,
            "scheduler": self.model.get("lr_scheduler"),
        }

    def client_state(self) -> dict[str, Any]:
        """Return what the program has saved with the engine, and what DeepSpeed says of itself."""
        return copy.deepcopy({key: value for key, value in self.model.items() if key not in _NOT_CLIENTS})


def _is_by_element(value: object, flat: torch.Tensor) -> bool:
    return torch.is_tensor(value) and value.ndim == 1 and value.numel() >= flat.numel()  # with padding
