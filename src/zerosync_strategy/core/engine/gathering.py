"""Gathers of ZeRO-3 parameters from their shards, into the caller's memory or that of the parameters."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zerosync_strategy.core.engine import contract, deepspeed_internals, zero, zero3
from zerosync_strategy.core.engine.parameter import Record, record_of
from zerosync_strategy.core.engine.patches import replaced
from zerosync_strategy.core.engine.torch_internals import for_training
from zerosync_strategy.core.engine.transitions import arrive, memory_of, restore_versions, unshard
from zerosync_strategy.core.engine.types import DeepSpeedEngine, Zero3Parameter

FlatAllGather = Callable[[torch.Tensor, torch.Tensor, dist.ProcessGroup], Any]
"""Called with this rank's shard, the output for all shards, both flat, and a process group; returns a work."""
AllGather = Callable[[list[torch.Tensor], list[torch.Tensor], dist.ProcessGroup, int], Callable[[], object]]
"""Called with this rank's shards, for each the memory of all ranks' shards, all flat, a process group and the bytes
of that memory; returns a function that waits."""
_KIND = "all_gather_into_tensor"  # as counted
ROW_BYTES = 16
"""NCCL is up to three times slower where the rows of ranks are not aligned to so many bytes."""
_IS_CURRENT = hasattr(dist.ProcessGroup, "all_gather_single_coalesced")  # torch's name since 2.13


def backends_all_gather(count: Any) -> AllGather:
    """Return the backend's own all-gather of several tensors, as one launch with one work, at little host cost (H1).

    Where DeepSpeed logs collectives, or communicates in another way, it is that of DeepSpeed, one by one.
    ``count.counter`` counts what is sent.
    """
    from deepspeed.comm import comm

    backend, log = zero.comm_backend(), comm.comms_logger
    is_plain = zero.is_plain(backend)

    def send(
        shards: list[torch.Tensor], rows: list[torch.Tensor], process_group: dist.ProcessGroup, nbytes: int
    ) -> Callable[[], object]:
        if not is_plain or log.enabled:
            works = []
            for own, of_all in zip(shards, rows, strict=True):
                count.counter.add(_KIND, of_all.nbytes, process_group)
                works.append(comm.all_gather_into_tensor(of_all, own, group=process_group, async_op=True))
            return lambda: [work.wait() for work in works]
        count.counter.add(_KIND, nbytes, process_group)
        work = (
            process_group.all_gather_single_coalesced(rows, shards)
            if _IS_CURRENT
            else process_group.allgather_into_tensor_coalesced(rows, shards)
        )
        wait: Callable[[], object] = work.wait
        return wait

    return send


def counted_all_gather(counter: Any) -> FlatAllGather:
    """Return DeepSpeed's all-gather of parameters, which ``counter`` counts."""
    from deepspeed.runtime.zero import partition_parameters

    stock = partition_parameters._dist_allgather_fn

    def all_gather(shard: torch.Tensor, of_all: torch.Tensor, process_group: dist.ProcessGroup) -> object:
        counter.add(_KIND, of_all.nbytes, process_group)
        return stock(shard, of_all, process_group)

    return all_gather


def one_by_one(all_gather: FlatAllGather) -> AllGather:
    """Return an all-gather of a single tensor as one of several."""

    def send(
        shards: list[torch.Tensor], rows: list[torch.Tensor], process_group: dist.ProcessGroup, nbytes: int
    ) -> Callable[[], object]:
        (own,), (of_all,) = shards, rows
        wait: Callable[[], object] = all_gather(own, of_all, process_group).wait
        return wait

    return send


class Arrival:
    """Values of ``params`` being gathered: of the first ones into ``rows``, of the others into ``received``.

    ``received`` is a matrix with a row per rank, in which each of those parameters has a range of ``columns``. Read row
    by row, the range is the parameter's values, flat and padded, as a tensor of ``rows`` is. Call ``wait`` once before.
    """

    __slots__ = ("columns", "params", "received", "rows", "wait")

    def __init__(
        self, params: list[Zero3Parameter], rows: list[torch.Tensor], columns: list[int], received: torch.Tensor | None,
        wait: Callable[[], object],
    ) -> None:  # fmt: skip
        self.params, self.rows, self.columns, self.received, self.wait = params, rows, columns, received, wait

    def shards(self) -> list[torch.Tensor]:
        """Return for each parameter the shards of all ranks, in the first dimension or dimensions."""
        own = [
            rows.view(param.ds_process_group.size(), -1) for param, rows in zip(self.params, self.rows, strict=False)
        ]
        return own if self.received is None else [*own, *self.received.split(self.columns, -1)]

    def values(self) -> list[tuple[Zero3Parameter, torch.Tensor]]:
        """Return each parameter with its values in its own shape and dtype, for the caller to keep."""
        values: list[tuple[Zero3Parameter, torch.Tensor]] = []
        for param, shards in zip(self.params, self.shards(), strict=True):
            # A range of columns is a strided view, which cannot be sent as bytes.
            full = shards.contiguous().view(-1)[: param.ds_numel].view(param.ds_shape)
            values += ((param, full if full.dtype is param.ds_tensor.dtype else full.to(param.ds_tensor.dtype)),)
        return values

    @property
    def packed(self) -> list[Record]:
        """The records of the parameters in ``received``."""
        return [param._zerosync_record for param in self.params[len(self.rows) :]]

    @for_training
    def copy_out(self, stream: torch.Stream | None) -> None:
        """Copy what was received to the storages, made on the current ``stream`` if needed, and set the parameters."""
        if self.received is not None:
            received = self.received
            if received.dtype is not (dtype := zero3.shard_dtype(self.params[-1])):
                received = received.to(dtype)
            memory = memory_of(self.packed, stream)
            rows = [of_all.view(*received.shape[:-1], -1) for of_all in memory]
            torch.split_with_sizes_copy(received, self.columns, -1, out=rows)
        arrive([param._zerosync_record for param in self.params])


class ShardGather:
    """All shards of several parameters of one process group, for one all-gather. Constant values are computed once.

    DeepSpeed assembles each parameter from the part of each rank. Here, the work does not grow with the number of
    ranks: the shard of rank r is row r of a matrix. If ``is_native``, the backend gathers a parameter in place: the
    matrix is its storage. Parameters that are sent in another dtype, or whose rows are not aligned, are *packed*: they
    are ranges of columns of one matrix, with aligned rows. Without ``is_native``, all are packed.

    Args:
        params: with shards of one dtype, for which :func:`~zero3.has_plain_shard` holds.
        dtype: in which it is sent.
        process_group: over which; of the ranks that shard the parameters, in their order.

    Attributes:
        params: as an arrival has them: first those that are gathered in place, of which there are ``in_place_count``.
    """

    def __init__(
        self,
        params: list[Zero3Parameter],
        dtype: torch.dtype,
        process_group: dist.ProcessGroup,
        is_native: bool = False,
    ) -> None:
        self._dtype, self._device, self._group = dtype, params[0].device, process_group
        self._world_size, self._rank = dist.get_world_size(process_group), dist.get_rank(process_group)

        def lies_in_place(param: Zero3Parameter) -> bool:
            row_bytes = zero3.shard_numel(param) * dtype.itemsize
            return is_native and zero3.shard_dtype(param) is dtype and row_bytes % ROW_BYTES == 0

        in_place, packed = list(filter(lies_in_place, params)), list(itertools.filterfalse(lies_in_place, params))
        self.params, self.in_place_count = [*in_place, *packed], len(in_place)
        self._in_place, self._packed = in_place, packed
        self._columns = list(map(zero3.shard_numel, packed))
        self._width = sum(self._columns)
        step = ROW_BYTES // dtype.itemsize if is_native else 1
        self._padded = -(-self._width // step) * step
        numel = self._padded + sum(map(zero3.shard_numel, in_place))
        self._nbytes = numel * self._world_size * dtype.itemsize

    @functools.cached_property
    def records(self) -> list[Record]:
        return list(map(record_of, self.params))

    @functools.cached_property
    def packed(self) -> list[Record]:
        """The records of the packed parameters."""
        return self.records[self.in_place_count :]

    def new_rows(self) -> list[torch.Tensor]:
        """Return memory for the parameters that are gathered in place, for the caller to keep."""
        sizes = [self._world_size * zero3.shard_numel(param) for param in self._in_place]
        return [torch.empty(size, dtype=self._dtype, device=self._device) for size in sizes]

    def begin(
        self, all_gather: AllGather, rows: list[torch.Tensor]
    ) -> tuple[torch.Tensor | None, Callable[[], object]]:
        """Launch the all-gather; ``rows`` is the memory of what is gathered in place. Collective.

        Return the matrix of the packed parameters, if there are any, and a function that waits.
        """
        shards: list[torch.Tensor] = []
        memory, received = rows, None
        for place, param in enumerate(self._in_place):
            shard: torch.Tensor = param.ds_tensor
            if shard.device != self._device:  # on the host
                own = rows[place].view(self._world_size, -1)[self._rank]
                shard = own.copy_(shard, non_blocking=True)
            shards += (shard,)
        if self._columns:
            received = torch.empty(self._world_size, self._padded, dtype=self._dtype, device=self._device)
            own, memory = received[self._rank], [*rows, received.view(-1)]
            shards.append(own)
            if self._padded > self._width:
                received, own = received[:, : self._width], own[: self._width]
            packed: list[torch.Tensor] = [param.ds_tensor for param in self._packed]
            torch._foreach_copy_(own.split_with_sizes(self._columns), packed, non_blocking=True)  # from the host, too
        return received, all_gather(shards, memory, self._group, self._nbytes)

    def send(self, all_gather: AllGather, rows: list[torch.Tensor]) -> Arrival:
        """Launch the all-gather as :meth:`begin` does, and return its arrival."""
        return self.arrival(rows, *self.begin(all_gather, rows))

    def arrival(self, rows: list[torch.Tensor], received: torch.Tensor | None, wait: Callable[[], object]) -> Arrival:
        return Arrival(self.params, rows, self._columns, received, wait)


@for_training
def gather_copied(param: Zero3Parameter, shard: torch.Tensor) -> torch.Tensor:
    """Return the values of ``param`` from copies of the shards on all ranks; ``shard`` is this rank's. Collective."""
    from deepspeed.runtime.zero import partition_parameters

    shard.ds_numel = shard.numel()  # type: ignore[attr-defined]
    with replaced(param, "ds_tensor", shard):
        by_deepspeed = one_by_one(partition_parameters._dist_allgather_fn)
        arrival = ShardGather([param], shard.dtype, param.ds_process_group).send(by_deepspeed, [])
    arrival.wait()
    ((_, full),) = arrival.values()
    return full


def from_host(
    values: Mapping[Zero3Parameter, list[torch.Tensor]], rows: list[torch.Tensor], wait: Callable[[], object]
) -> Arrival:
    """Return an arrival of parameters that this rank has in full on the host: nothing is sent.

    ``values``: by sharded parameter, the full values, flat and in parts. They are copied to ``rows`` on the current
    stream, for which ``wait`` waits.
    """
    for memory, parts in zip(rows, values.values(), strict=True):
        sizes = [part.numel() for part in parts]
        torch._foreach_copy_(memory[: sum(sizes)].split(sizes), parts, non_blocking=True)
    return Arrival(list(values), rows, [], None, wait)


@for_training
def by_deepspeed(
    params: Sequence[Zero3Parameter], in_storage: bool = True
) -> tuple[Callable[[torch.Stream | None], None], list[Record]]:
    """Gather ``params``, of one process group, as DeepSpeed does. Collective.

    For shards on NVMe, quantized, of hpZ, or on this rank alone. Return a function that waits and sets their values on
    the current stream, which it takes; and the records of those that it copies out of received memory. ``in_storage``:
    set to values in their storages (:class:`UnitStorage`).
    """
    handle = params[0].all_gather_coalesced(list(params))
    # Nothing is sent, but the host would wait. It has to if the shard is in memory that the host writes to.
    is_alone = dist.get_world_size(params[0].ds_process_group) == 1 and all(map(_is_on_device, params))

    @for_training
    @torch.no_grad()
    def copy_out(stream: torch.Stream | None) -> None:
        if not is_alone:
            handle.wait()
        for param in params:
            record, values = record_of(param), param.data
            if in_storage and values.data_ptr() != param.ds_tensor.data_ptr():  # equal in a group of one rank
                memory_of([record], stream)
                values = record.full.copy_(values)
            if is_alone:
                arrive((record,), (values,))
            else:
                param.data = values
                restore_versions((record,))

    return copy_out, [] if is_alone or not in_storage else list(map(record_of, params))


def _is_on_device(param: Zero3Parameter) -> bool:
    return zero3.has_plain_shard(param) and bool(param.ds_tensor.device == param.device)


def released_after_empty(params: Iterable[Zero3Parameter]) -> list[Zero3Parameter]:
    """Gather the released parameters without elements, which DeepSpeed skips, to fail later; return the others."""
    released = zero3.released(params)
    for param in released:
        if param.ds_numel == 0:
            with zero3.as_it_is():
                unshard((record_of(param),))
                arrive((record_of(param),), (param.data.new_empty(param.ds_shape),))
    return [param for param in released if param.ds_numel > 0]


def gathers_plainly(engine: DeepSpeedEngine) -> bool:
    """Return whether DeepSpeed gathers several parameters by one all-gather of their values."""
    config = config_of(engine)
    one_by_one = contract.has(deepspeed_internals.SEQUENTIAL_GATHERS) and config.allgather_sequential
    return not (config.use_all_reduce_for_fetch_params or config.zero_quantized_weights or one_by_one)


def config_of(engine: DeepSpeedEngine) -> Any:
    """Return the ``zero_optimization`` section of the configuration, with DeepSpeed's names and defaults."""
    return engine._config.zero_config


def gathering_by(all_gather: FlatAllGather) -> AbstractContextManager[None]:
    """While active, DeepSpeed gathers parameters by ``all_gather``."""
    from deepspeed.runtime.zero import partition_parameters

    return replaced(partition_parameters, "_dist_allgather_fn", all_gather)


def is_leaf(module: nn.Module) -> bool:
    """Return whether the program has made ``module`` a leaf module, which DeepSpeed gathers as a whole."""
    from deepspeed.utils import z3_leaf_module

    return bool(z3_leaf_module(module))


def parameters_of(module: Any, is_whole: bool) -> list[nn.Parameter]:
    """Return the parameters of ``module``, if ``is_whole`` also of its submodules, and registered external ones."""
    registered = (param for _, param in module.ds_external_parameters())
    return list(dict.fromkeys([*module.parameters(recurse=is_whole), *registered]))
