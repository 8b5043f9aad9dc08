"""ZeRO-3: parameters kept in shards of the node, and gathered within the node instead of from all ranks again.

The first gather of a parameter in a window leaves a *node shard* on each rank (``comm/nodes.py``): of the shards of all
ranks, those of the ranks that have its place on their node. So later gathers of the window send nothing between nodes.
DeepSpeed's hpZ has such shards too; it refills them, by a gather from all ranks, in every step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from zerosync_strategy.core.comm.nodes import Nodes
from zerosync_strategy.core.engine import gathering, zero3
from zerosync_strategy.core.engine.param_functions import for_training
from zerosync_strategy.core.params.copies import Copies


class NodeShards(Copies[torch.Tensor]):
    """Node shards of the parameters of one engine: a matrix for each, with one row per node, in the gather's dtype.

    Those of process groups with one level have none. ``shared``: the limit is that of what is held on the device, too.
    """

    def __init__(self, limit: int | None, shared: bool) -> None:
        super().__init__(limit)
        self.shared = shared

    def may_have(self, param: Any) -> bool:
        return _nodes(param) is not None

    def bytes_of(self, param: Any) -> int:
        nodes = _nodes(param)
        return 0 if nodes is None else nodes.count * zero3.shard_numel(param) * zero3.gather_dtype(param).itemsize

    def _allocate(self, param: Any) -> torch.Tensor:
        nodes = _nodes(param)
        assert nodes is not None
        shape, dtype = (nodes.count, zero3.shard_numel(param)), zero3.gather_dtype(param)
        with torch.inference_mode(False):
            return torch.empty(shape, dtype=dtype, device=param.device)

    def keep(self, arrival: gathering.Arrival) -> None:
        """Wait for all ranks' shards of parameters, a row each, on the current stream, and keep those of the node."""
        arrival.wait()
        for param, rows in zip(arrival.params, arrival.received.split(arrival.columns, -1), strict=True):
            nodes = _nodes(param)
            if nodes is not None and (values := self.to_fill(param)) is not None:
                values.copy_(nodes.rows_of_place(rows))

    def renew(self, param: Any) -> None:
        nodes = _nodes(param)
        assert nodes is not None
        values = self._copies[param].values
        padded = values.new_zeros(nodes.size * values.numel())
        padded[: param.numel()].copy_(param.data.reshape(-1))
        values.copy_(nodes.rows_of_place(padded.view(-1, values.shape[1])))


def _nodes(param: Any) -> Nodes | None:
    nodes: Nodes | None = param._zerosync_record.group.nodes
    return nodes


@for_training
def gather_node_shards(nodes: Nodes, shards: Mapping[Any, torch.Tensor], tag: int, label: object) -> gathering.Arrival:
    """As :class:`gathering.Message`, from the ranks of this node alone.

    ``shards``: by parameter, this rank's node shard, one row per node; all of one dtype.
    """
    columns = [shard.shape[1] for shard in shards.values()]
    first = next(iter(shards.values()))
    rows = nodes.empty_rows(sum(columns), first.dtype, first.device)
    torch._foreach_copy_(list(nodes.own_rows(rows).split(columns, 1)), list(shards.values()))
    return gathering.Arrival(list(shards), columns, rows, nodes.gather_within(rows, tag, label).wait)
