"""The norm of the averaged gradients of each unit of a model, for the report of the step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from zerosync_strategy.core.comm.collectives import phase
from zerosync_strategy.core.comm.streams import HostCopy
from zerosync_strategy.core.gradients.shards import GradientShards


def unit_of(name: str) -> str:
    """Return the unit of the parameter ``name``: what is numbered in its name, or else its module.

    ``model.layers.3.mlp.up.weight`` is in ``model.layers.3``, and ``lm_head.weight`` in ``lm_head``.
    """
    parts = name.split(".")
    numbered = next((place + 1 for place, part in enumerate(parts) if part.isdigit()), len(parts) - 1)
    return ".".join(parts[:numbered]) or name


class UnitNorms:
    """The L2 norm of the gradients of each unit, before the program changes or clips them.

    Each rank adds up the squares of its shards, and one sum over the ranks, of 8 bytes a unit, makes norms of them. The
    host does not wait for it before :meth:`read`.

    Raises ``ValueError`` if not all ranks shard each parameter.
    """

    def __init__(self, shards: GradientShards, names: Mapping[Any, str]) -> None:
        everyone = dist.get_world_size()
        if any(dist.get_world_size(layout.process_group) != everyone for layout in shards.layouts):
            raise ValueError(
                "ZeroSync option 'unit_norms' got True, and not all ranks shard each parameter (shard_over(), experts,"
                " tensor or pipeline parallelism): shards of several groups do not add up. Leave it out."
            )
        self._shards = shards
        trained = set(shards.params)
        units = dict.fromkeys(unit_of(name) for param, name in names.items() if param in trained)
        self._units, places = list(units), {unit: place for place, unit in enumerate(units)}
        self._slices = [
            (layout, own, places[unit_of(names[param])])
            for layout in shards.layouts
            for param in layout.params
            for own in layout.shard_slices(param)
        ]
        self._copy = HostCopy(shards.streams, len(places), torch.float64)
        self._index: tuple[list[int], torch.Tensor] | None = None  # the units of the parts; made once, as it is copied
        self._is_begun = False
        self._scale = 1.0

    @torch.no_grad()
    def reduced(self) -> None:
        """Begin to add up the squares of the complete shards over the ranks. Collective."""
        shards = self._shards
        with phase("unit norms"):
            norms: list[torch.Tensor] = []
            places: list[int] = []
            for layout, own, place in self._slices:
                for part in shards.parts(layout, own.offset, own.stop - own.start):
                    norms.append(torch.linalg.vector_norm(part, dtype=torch.float32))
                    places.append(place)
            squares = torch.zeros(len(self._units), dtype=torch.float64, device=shards.params[0].device)
            if self._index is None or self._index[0] != places:
                self._index = places, torch.tensor(places, dtype=torch.int64, device=squares.device)
            if norms:
                found = torch.stack(norms).to(squares.device, torch.float64).square()
                squares.index_add_(0, self._index[1], found)
            shards.sum_over_ranks(squares)
            self._copy.begin(squares)
        self._is_begun, self._scale = True, float(shards.optimizer.loss_scale)

    def read(self) -> dict[str, float]:
        """Return the norm of each unit, without the loss scale, in the order of the model. The host waits for them."""
        if not self._is_begun:
            return {}
        self._is_begun = False
        norms = self._copy.arrived().sqrt() / self._scale
        return dict(zip(self._units, norms.tolist(), strict=True))
