"""The norm of the averaged gradients of each unit of a model, for the report of the step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zerosync_strategy.core.comm.journal import phase
from zerosync_strategy.core.comm.streams import HostCopy
from zerosync_strategy.core.gradients.shards import GradientShards


def unit_of(name: str) -> str:
    """Return the unit of the parameter ``name``: what is numbered in its name, or else its module.

    ``model.layers.3.mlp.up.weight`` is in ``model.layers.3``, and ``lm_head.weight`` in ``lm_head``.
    """
    parts = name.split(".")
    numbered = next((index + 1 for index, part in enumerate(parts) if part.isdigit()), len(parts) - 1)
    return ".".join(parts[:numbered]) or name


class UnitNorms:
    """The L2 norm of the gradients of each unit, before the program changes or clips them.

    Each rank adds up the squares of its shards, and one sum over the ranks, of 8 bytes a unit, makes norms of them. The
    host does not wait for it before the report.

    Raises ``ValueError`` if not all ranks shard each parameter.
    """

    def __init__(self, shards: GradientShards, names: Mapping[nn.Parameter, str]) -> None:
        everyone = dist.get_world_size()
        if any(dist.get_world_size(layout.process_group) != everyone for layout in shards.layouts):
            raise ValueError(
                "ZeroSync option 'unit_norms' got True, and not all ranks shard each parameter (shard_over(), experts,"
                " tensor or pipeline parallelism): shards of several groups do not add up. Leave it out."
            )
        self._shards = shards
        trained = set(shards.params)
        unit_by_param = {param: unit_of(name) for param, name in names.items() if param in trained}
        self._units = list(dict.fromkeys(unit_by_param.values()))
        indices = {unit: index for index, unit in enumerate(self._units)}
        self._index_of = {param: indices[unit] for param, unit in unit_by_param.items()}
        self._indices: torch.Tensor | None = None  # of the parts of the shards; made once, as it is copied
        self._copy = HostCopy(shards.streams, len(indices), torch.float64)
        self._scale = 1.0

    @torch.no_grad()
    def reduced(self) -> None:
        """Begin to add up the squares of the shards over the ranks."""
        with phase("unit norms"):
            squares = torch.zeros(len(self._units), dtype=torch.float64, device=self._shards.params[0].device)
            parts = [(self._index_of[param], part) for param, _, part in self._shards.of_params()]
            if self._indices is None:
                self._indices = torch.tensor([index for index, _ in parts], dtype=torch.int64, device=squares.device)
            if parts:
                norms = torch.stack([torch.linalg.vector_norm(part, dtype=torch.float32) for _, part in parts])
                squares.index_add_(0, self._indices, norms.to(squares.device, torch.float64).square())
            self._shards.sum_over_ranks(squares)
            self._copy.begin(squares)
        self._scale = float(self._shards.optimizer.loss_scale)

    def report(self) -> dict[str, Any]:
        """Return the norm of each unit, without the loss scale, in the order of the model. The host waits for them."""
        norms = self._copy.arrived().sqrt() / self._scale
        return {"unit_norms": dict(zip(self._units, norms.tolist(), strict=True))}
