"""Gathers of ZeRO-3 parameters from their shards, into the caller's memory or that of the parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from zerosync_strategy.core.engine import contract, deepspeed_internals, zero, zero3
from zerosync_strategy.core.engine.interpose import replaced
from zerosync_strategy.core.engine.param_functions import for_training
from zerosync_strategy.core.engine.parameter import arrive, record_of, returned, rows_of, unshard

FlatAllGather = Callable[[torch.Tensor, torch.Tensor, Any], Any]
"""Called with this rank's shard, the output for all shards, both flat, and a process group; returns a work."""


def flat_all_gather() -> FlatAllGather:
    """Return the backend's own all-gather: DeepSpeed's without its host overhead (H1)."""
    from deepspeed.comm import comm

    backend, log = zero.comm_backend(), comm.comms_logger
    is_plain = zero.is_plain(backend)

    def send(own: torch.Tensor, target: torch.Tensor, process_group: Any) -> Any:
        if not is_plain or log.enabled:
            return comm.all_gather_into_tensor(target, own, group=process_group, async_op=True)
        for counter in backend._zerosync_counters:
            counter.add_gather(target.nbytes - own.nbytes, process_group)
        return backend.all_gather_function(target, own, group=process_group, async_op=True)

    return send


class Arrival(NamedTuple):
    """Values of ``params`` being gathered into ``received``; its last dimension has ``columns`` for each.

    Read row by row, the columns of a parameter are its values, flat and padded. Call ``wait`` once before reading them.
    """

    params: list[Any]
    columns: list[int]
    received: torch.Tensor
    wait: Callable[[], object]

    def values(self) -> list[tuple[Any, torch.Tensor]]:
        """Return each parameter with its values in its own shape and dtype, for the caller to keep."""
        values = []
        for param, shards in zip(self.params, self.received.split(self.columns, -1), strict=True):
            # A range of columns is a strided view, which cannot be sent as bytes.
            full = shards.contiguous().view(-1).narrow(0, 0, param.ds_numel).view(param.ds_shape)
            values.append((param, full if full.dtype is param.ds_tensor.dtype else full.to(param.ds_tensor.dtype)))
        return values

    @for_training
    def room(self) -> list[torch.Tensor]:
        """Return the memory of the parameters' values, of the current stream, as :meth:`land` takes it."""
        return rows_of([param._zerosync_record for param in self.params], self.received.shape[:-1], self.columns)

    @for_training
    def land(self, room: list[torch.Tensor] | None = None) -> None:
        """Set the parameters to their values, by default in memory of the current stream."""
        received, records = self.received, [param._zerosync_record for param in self.params]
        if received.dtype is not (dtype := zero3.shard_dtype(self.params[0])):
            received = received.to(dtype)
        rows = rows_of(records, received.shape[:-1], self.columns) if room is None else room
        torch.split_with_sizes_copy(received, self.columns, -1, out=rows)
        arrive(records)


class Message:
    """All shards of several parameters of one process group, for one all-gather. Constant values are computed once.

    DeepSpeed assembles each parameter from the part of each rank. Here, the work does not grow with the number of
    ranks: row r of the received matrix has the shards of rank r, and a parameter is a range of columns.

    Args:
        params: with shards of one dtype, for which :func:`~zero3.has_plain_shard` holds.
        dtype: in which it is sent.
        process_group: over which; of the ranks that shard the parameters, in their order.
    """

    def __init__(self, params: list[Any], dtype: torch.dtype, process_group: Any) -> None:
        self.params, self._dtype = params, dtype
        self._device, self._group = params[0].device, process_group
        self._columns = [param.ds_tensor.ds_numel for param in params]
        self._shape = dist.get_world_size(self._group), sum(self._columns)
        self._rank = dist.get_rank(self._group)

    def send(self, all_gather: FlatAllGather) -> Arrival:
        """Begin to gather. Collective."""
        received = torch.empty(self._shape, dtype=self._dtype, device=self._device)
        own = received[self._rank]
        shards = [param.ds_tensor for param in self.params]
        torch._foreach_copy_(own.split_with_sizes(self._columns), shards, non_blocking=True)  # from the host, too
        work = all_gather(own, received.view(-1), self._group)
        return Arrival(self.params, self._columns, received, work.wait)


@for_training
def gather_copied(param: Any, shard: torch.Tensor) -> torch.Tensor:
    """Return the values of ``param`` from copies of the shards on all ranks; ``shard`` is this rank's. Collective."""
    from deepspeed.runtime.zero import partition_parameters

    shard.ds_numel = shard.numel()  # type: ignore[attr-defined]
    with replaced(param, "ds_tensor", shard):
        arrival = Message([param], shard.dtype, param.ds_process_group).send(partition_parameters._dist_allgather_fn)
    arrival.wait()
    ((_, full),) = arrival.values()
    return full


@for_training
def from_host(values: Mapping[Any, list[torch.Tensor]]) -> Arrival:
    """Return an arrival of parameters that this rank has in full on the host: nothing is sent.

    ``values``: by sharded parameter, the full values, flat and in parts. They are copied on the current stream.
    """
    params = list(values)
    columns = [dist.get_world_size(param.ds_process_group) * zero3.shard_numel(param) for param in params]
    received = torch.empty(1, sum(columns), dtype=zero3.shard_dtype(params[0]), device=params[0].device)
    for place, parts in zip(received[0].split(columns), values.values(), strict=True):
        sizes = [part.numel() for part in parts]
        torch._foreach_copy_(place[: sum(sizes)].split(sizes), parts, non_blocking=True)
    return Arrival(params, columns, received, lambda: None)


@for_training
def by_deepspeed(params: Sequence[Any], returns: bool = True) -> Callable[[], None]:
    """Gather ``params``, of one process group, as DeepSpeed does; return a function that waits and sets their values.

    For shards that are on disk, quantized, of hpZ, or on this rank alone. For ``returns`` see :func:`~parameter.free`.
    """
    handle = params[0].all_gather_coalesced(list(params))
    # Nothing is sent, but the host would wait. It has to if the shard is in memory that the host writes to.
    is_alone = dist.get_world_size(params[0].ds_process_group) == 1 and all(map(_is_on_device, params))

    @for_training
    @torch.no_grad()
    def land() -> None:
        if not is_alone:
            handle.wait()
        for param in params:
            record, values = record_of(param), param.data
            if returns and values.data_ptr() != param.ds_tensor.data_ptr():  # equal in a group of one rank
                rows_of([record], (), [-1])
                assert record.full is not None
                values = record.full.copy_(values)
            if is_alone:
                record.arrive(values)
            else:
                param.data = values
                returned((record,))

    return land


def _is_on_device(param: Any) -> bool:
    return zero3.has_plain_shard(param) and bool(param.ds_tensor.device == param.device)


def gather_empty(param: Any) -> bool:
    """Gather ``param`` if it has no elements; return whether. DeepSpeed skips it and then fails."""
    if param.ds_numel == 0:
        with zero3.as_it_is():
            unshard((record_of(param),))
            record_of(param).arrive(param.data.new_empty(param.ds_shape))
    return bool(param.ds_numel == 0)


def gathers_plainly(engine: Any) -> bool:
    """Return whether DeepSpeed gathers several parameters by one all-gather of their values."""
    config = config_of(engine)
    one_by_one = contract.has(deepspeed_internals.SEQUENTIAL_GATHERS) and config.allgather_sequential
    return not (config.use_all_reduce_for_fetch_params or config.zero_quantized_weights or one_by_one)


def config_of(engine: Any) -> Any:
    """Return the ``zero_optimization`` section of the configuration, with DeepSpeed's names and defaults."""
    return engine._config.zero_config


def gathering_by(all_gather: FlatAllGather) -> AbstractContextManager[None]:
    """While active, DeepSpeed gathers parameters by ``all_gather``."""
    from deepspeed.runtime.zero import partition_parameters

    return replaced(partition_parameters, "_dist_allgather_fn", all_gather)


def is_leaf(module: Any) -> bool:
    """Return whether the program has made ``module`` a leaf module, which DeepSpeed gathers as a whole."""
    from deepspeed.utils import z3_leaf_module

    return bool(z3_leaf_module(module))


def parameters_of(module: Any, is_whole: bool) -> list[Any]:
    """Return the parameters of ``module``, if ``is_whole`` also of its submodules, and registered external ones."""
    registered = (param for _, param in module.ds_external_parameters())
    return list(dict.fromkeys([*module.parameters(recurse=is_whole), *registered]))
