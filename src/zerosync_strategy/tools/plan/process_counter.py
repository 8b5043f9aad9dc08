"""Counts what this process sends, whoever issues it: for comparisons with DeepSpeed alone."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from typing_extensions import Self

from zerosync_strategy.core.comm.collectives import is_native
from zerosync_strategy.core.comm.journal import SentCounter

# By method of torch's process groups: the name of the collective, and the argument that is its payload. Some methods
# have two names, of which torch 2.13 calls the second.
_METHODS = {
    "allreduce": ("all_reduce", 0),
    "allreduce_coalesced": ("all_reduce", 0),
    "allgather": ("all_gather", 0),
    "allgather_coalesced": ("all_gather", 0),
    "_allgather_base": ("all_gather_into_tensor", 0),
    "all_gather_single": ("all_gather_into_tensor", 0),
    "allgather_into_tensor_coalesced": ("all_gather_into_tensor", 0),
    "all_gather_single_coalesced": ("all_gather_into_tensor", 0),
    "reduce_scatter": ("reduce_scatter", 1),
    "_reduce_scatter_base": ("reduce_scatter_tensor", 1),
    "reduce_scatter_single": ("reduce_scatter_tensor", 1),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter_tensor", 1),
    "reduce_scatter_single_coalesced": ("reduce_scatter_tensor", 1),
    "reduce": ("reduce", 0),
    "broadcast": ("broadcast", 0),
    "alltoall_base": ("all_to_all_single", 1),
    "all_to_all_single": ("all_to_all_single", 1),
    "alltoall": ("all_to_all", 1),
    "send": ("isend", 0),
}
_running: list[ProcessCounter] = []
_stock: dict[str, Any] = {}  # methods, while a counter runs


class ProcessCounter(SentCounter):
    """Counts all collectives and messages of this process between ``start`` and ``stop``, in its agreements too.

    Usable as a context manager. gloo has no reduce-scatter and sends an all-reduce instead, which is what is counted.
    """

    def start(self) -> Self:
        if not _running:
            for name in vars(dist.ProcessGroup).keys() & _METHODS.keys():
                _stock[name] = vars(dist.ProcessGroup)[name]
                setattr(dist.ProcessGroup, name, _counted(name, getattr(dist.ProcessGroup, name)))
        _running.append(self)
        return self

    def stop(self) -> None:
        _running.remove(self)
        while _stock and not _running:
            setattr(dist.ProcessGroup, *_stock.popitem())

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()


def _counted(name: str, stock: Callable[..., Any]) -> Callable[..., Any]:
    kind, payload = _METHODS[name]

    @functools.wraps(stock)
    def method(group: Any, *args: Any, **kwargs: Any) -> Any:
        tensors = _tensors(args[payload])
        nbytes = sum(tensor.nbytes for tensor in tensors)
        if kind.startswith("reduce_scatter") and not is_native(group, tensors[0].device):
            nbytes *= 2
        if kind == "reduce" and args[1].rootRank == group.rank():
            nbytes = 0
        for counter in _running:
            if kind == "isend":
                counter.add_messages([(args[1], tensors, ())], group)
            else:
                counter.add(kind, nbytes, group)
        return stock(group, *args, **kwargs)

    return method


def _tensors(payload: Any) -> list[torch.Tensor]:
    return [payload] if isinstance(payload, torch.Tensor) else [each for part in payload for each in _tensors(part)]
