"""What DeepSpeed's files have of the optimizer: a rank's shards of the master weights, and the torch optimizer's state.

Of an optimizer that needs whole parameters, the state is by their names, each in the file of the rank that owned it. So
:class:`SavedShards` reads a checkpoint by names, whatever number of ranks has written it.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch

from zerosync_strategy.core.engine import checkpoint_files

State = dict[str, Any]
"""What a rank's ZeRO optimizer saves and loads."""


def torch_state(state: State) -> dict[str, Any]:
    """Return the state of the torch optimizer in a rank's ``state``."""
    return state[_keys(state)[0]]


def is_by_name(state: State) -> bool:
    """Return whether the state of the torch optimizer in a rank's ``state`` is by names, each parameter's whole."""
    found = torch_state(state)
    groups = found["param_groups"] if isinstance(found, dict) else []  # a list: DeepSpeed's elastic checkpoints
    return any(isinstance(param, str) for group in groups for param in group["params"])


def masters(state: State) -> list[torch.Tensor]:
    """Return the master weights in a rank's ``state``, by DeepSpeed's groups; on stages 1 and 2 without padding."""
    return state[_keys(state)[1]]


def replaced(state: State, of_torch: dict[str, Any], masters: list[torch.Tensor] | None = None) -> State:
    """Return ``state`` with another one of the torch optimizer, and with other master weights, where they are given."""
    torch_key, masters_key = _keys(state)
    return state | {torch_key: of_torch} | ({} if masters is None else {masters_key: masters})


def _keys(state: State) -> tuple[str, str]:
    if _is_of_flat(state):
        return "base_optimizer_state", "single_partition_of_fp32_groups"
    return "optimizer_state_dict", "fp32_flat_groups"


def _is_of_flat(state: State) -> bool:
    """Return whether it was saved on stage 1 or 2, where ranks have parts of flat groups, not of each parameter."""
    return "base_optimizer_state" in state


class SavedShards:
    """The optimizer's part of a checkpoint of the engine's ZeRO stage. Values are read where they are asked for."""

    def __init__(self, engine: Any, directory: Path, tag: str) -> None:
        self._files = functools.partial(checkpoint_files.files_to_load, engine, directory, tag, True)
        self._of_first = checkpoint_files.read(self._files(0)[0])
        self.ranks: int = self._of_first["dp_world_size"]
        self._states: dict[int, State] = {}

    def state(self, rank: int) -> State:
        if rank not in self._states:
            self._states[rank] = checkpoint_files.read(self._files(rank)[1])["optimizer_state_dict"]
        return self._states[rank]

    def names(self, rank: int) -> list[list[Any]]:
        """Return the names of the parameters that ``rank`` owned, by groups; numbers where it stepped flat shards."""
        return [group["params"] for group in torch_state(self.state(rank))["param_groups"]]

    def groups(self) -> list[set[Any]]:
        """Return :meth:`names` of all ranks."""
        of_ranks = zip(*map(self.names, range(self.ranks)), strict=True)
        return [{name for names in of_group for name in names} for of_group in of_ranks]

    def torch_state(self, groups: Sequence[Sequence[str]]) -> dict[str, Any]:
        """Return the state of a torch optimizer that steps the parameters of these names, by its groups."""
        wanted = {name for names in groups for name in names}
        found: dict[str, Any] = {}
        for rank in range(self.ranks):
            of_rank = torch_state(self.state(rank))["state"]
            found |= {name: of_rank[name] for name in of_rank.keys() & wanted}
        options = torch_state(self.state(0))["param_groups"]
        return {
            "state": copy.deepcopy(found),  # the files may be written again
            "param_groups": [group | {"params": list(names)} for group, names in zip(options, groups, strict=True)],
        }

    def masters(self, names: Collection[str]) -> dict[str, torch.Tensor]:
        """Return the master weights of the parameters of these ``names``, flat, on the host."""
        parts: dict[str, list[torch.Tensor]] = {name: [] for name in names}
        if _is_of_flat(self.state(0)):
            self._add_of_flat(parts)
        else:
            self._add_of_each(parts)
        return {name: torch.cat(of_param) for name, of_param in parts.items()}

    def _add_of_flat(self, parts: dict[str, list[torch.Tensor]]) -> None:
        for rank in range(self.ranks):
            state = self.state(rank)
            for places, flat in zip(state["param_slice_mappings"], masters(state), strict=True):
                for name in places.keys() & parts.keys():
                    parts[name].append(flat.data.narrow(0, places[name].start, places[name].numel))

    def _add_of_each(self, parts: dict[str, list[torch.Tensor]]) -> None:
        flats = [masters(self.state(rank)) for rank in range(self.ranks)]
        for index, shapes in enumerate(self._of_first["param_shapes"]):
            begin = 0
            for name, shape in shapes.items():
                width = -(-shape.numel() // self.ranks)
                if name in parts:
                    full = torch.cat([of_rank[index].data.narrow(0, begin, width) for of_rank in flats])
                    parts[name].append(full[: shape.numel()])
                begin += width
