"""ZeRO-3: the sources from which parameters are gathered: copies on the host, node shards, and the shards of all ranks.

They are asked in this order. Each delivers what it has, and the next is asked for the rest.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from functools import partial

import torch

from zerosync_strategy.core.comm.journal import phase
from zerosync_strategy.core.engine import gathering, zero3
from zerosync_strategy.core.engine.parameter import record_of, settle
from zerosync_strategy.core.engine.transitions import arrive, unshard
from zerosync_strategy.core.engine.types import DeepSpeedEngine, Zero3Parameter
from zerosync_strategy.core.failures.agreement import GatherActivity
from zerosync_strategy.core.failures.rank_status import Activity
from zerosync_strategy.core.params.copies import gather_node_shards
from zerosync_strategy.core.params.issuing import Issuing, ParameterGather, tagged_all_gather
from zerosync_strategy.core.params.shard_groups import GatherGroup

_Sent = Iterator[tuple[gathering.Arrival, GatherActivity]]  # each message, with its activity
_Gathers = list[tuple[gathering.ShardGather, Activity]]


class GatherRequest:
    """Parameters that one process group gathers together.

    Attributes:
        gathers: the all-gathers of all shards, each with its activity; ``None``: DeepSpeed gathers.
        activity: of a rank that gathers all parameters; its ids are ``digested``.
    """

    def __init__(
        self, group: GatherGroup, params: list[Zero3Parameter], gathers: _Gathers | None,
        activity: GatherActivity,
    ) -> None:  # fmt: skip
        self.group, self.params, self.gathers, self.activity = group, params, gathers, activity
        self.digested = repr(activity.ids).encode()
        self.name = params[0]._zerosync_record.name


class GatherSource(ABC):
    """A place from which values of parameters can be gathered."""

    def __init__(self, issuing: Issuing) -> None:
        self._issuing = issuing

    @abstractmethod
    def _send(self, request: GatherRequest, reads: bool) -> _Sent:
        """Begin to gather the parameters of ``request`` that this source has, on the stream of the group.

        ``reads``: for a reader, who gets equal bits, on the current stream.
        """

    def issue(self, request: GatherRequest, issued: list[ParameterGather]) -> None:
        """Issue the gathers of the parameters of ``request`` that this source has."""
        for arrival, activity in self._send(request, False):
            unshard(records := list(map(record_of, arrival.params)))
            common = (self._issuing, request.group, records, Activity(self._issuing.status, activity), arrival.wait)
            issued.append(ParameterGather(*common, arrival.copy_out, arrival.packed))

    def values(self, request: GatherRequest) -> dict[Zero3Parameter, torch.Tensor]:
        """Return the values of the parameters of ``request`` that this source has, in memory of the caller's own."""
        values: dict[Zero3Parameter, torch.Tensor] = {}
        for arrival, _ in self._send(request, True):
            arrival.wait()
            values.update(arrival.values())
        return values


class HostCopies(GatherSource):
    """Full copies in this rank's host memory: nothing is sent. Readers do not use them."""

    def _send(self, request: GatherRequest, reads: bool) -> _Sent:
        host, group = self._issuing.host, request.group
        if reads or host is None:
            return
        values = {param: full for param in request.params if (full := host.get(param)) is not None}
        for members in _by_dtype(values, zero3.shard_dtype):
            rows = self._issuing.memory_of(group, list(map(record_of, members)))
            of_dtype, wait = {param: values[param] for param in members}, self._issuing.waiting_for(group)
            with self._issuing.on(group), phase("load", members[0]._zerosync_record.name):
                arrival = gathering.from_host(of_dtype, rows, wait)
            yield arrival, self._issuing.activity(group, members)
        host.count_loaded(values)


class ShardsOfNode(GatherSource):
    """Node shards of the ranks of this node: nothing is sent between nodes."""

    def _send(self, request: GatherRequest, reads: bool) -> _Sent:
        group, kept = request.group, self._issuing.node_shards
        if group.nodes is None or kept is None:
            return
        found = {param: shard for param in request.params if (shard := kept.get(param)) is not None}
        shards = {param: each for param, each in found.items() if not reads or each.dtype is zero3.shard_dtype(param)}
        if not shards:
            return
        if reads and group.stream is not None:  # the stream that may have filled them (U2)
            self._issuing.streams.caller_waits_for([group.stream])
        counter = self._issuing.count.counter
        with self._issuing.gathering(group, list(shards), noted=True) as tag:
            for members in _by_dtype(shards, zero3.gather_dtype):
                activity = self._issuing.activity(group, members, request.activity.reader)
                of_dtype = {param: shards[param] for param in members}
                with self._issuing.on(group, reads):
                    arrival = gather_node_shards(group.nodes, of_dtype, counter, tag, activity)
                yield arrival, activity


class AllShards(GatherSource):
    """The shards of all ranks, from which every parameter can be gathered. What arrives may be kept in node shards."""

    def __init__(self, issuing: Issuing, engine: DeepSpeedEngine) -> None:
        super().__init__(issuing)
        self._all_gather = gathering.backends_all_gather(issuing.count)
        self._gathers_plainly = gathering.gathers_plainly(engine)

    def is_plain(self, param: Zero3Parameter) -> bool:
        """Return whether several ranks shard ``param``, in memory and not quantized."""
        record = param._zerosync_record
        return self._gathers_plainly and record.plain and record.group.digest is not None

    def request(
        self, group: GatherGroup, params: list[Zero3Parameter],
        dtype_of: Callable[[Zero3Parameter], torch.dtype] = zero3.gather_dtype, reader: str = "",
    ) -> GatherRequest:  # fmt: skip
        activity, status = self._issuing.activity, self._issuing.status
        gathers, over = None, (group.communicator, group.in_place)
        if all(map(self.is_plain, params)):
            gathers = [
                (
                    gathering.ShardGather(members, dtype_of(members[0]), *over),
                    Activity(status, activity(group, members, reader)),
                )
                for members in _by_dtype(params, dtype_of)
            ]
        return GatherRequest(group, params, gathers, activity(group, params, reader))

    def _send(self, request: GatherRequest, reads: bool) -> _Sent:
        assert reads and request.gathers is not None
        tag = self._issuing.begin(request.group, request.activity.ids, request.digested)
        all_gather = self._tagged(request.group, tag) if request.group.is_tagged else self._all_gather
        with phase("gather", request.name):
            for gather, activity in request.gathers:
                yield gather.send(all_gather, gather.new_rows()), activity.what
        if request.group.is_nccl:
            self._issuing.note_launch(request.group.communicator, request.activity)

    def _tagged(self, group: GatherGroup, tag: int) -> gathering.AllGather:
        """Return an all-gather that matches only gathers with the same ``tag``."""
        return gathering.one_by_one(tagged_all_gather(group, self._issuing.count.counter, tag))

    def issue(self, request: GatherRequest, issued: list[ParameterGather]) -> None:
        if request.gathers is None:
            self._issue_by_deepspeed(request, issued)
            return
        group, issuing = request.group, self._issuing
        tag = issuing.begin(group, request.activity.ids, request.digested)
        all_gather = self._tagged(group, tag) if group.is_tagged else self._all_gather
        with phase("gather", request.name):
            for gather, activity in request.gathers:
                records, packed, copy_out = gather.records, gather.packed, None
                in_place = records[: gather.in_place_count]
                rows = issuing.memory_of(group, in_place, records) if in_place else []
                if group.stream is None:
                    received, wait = gather.begin(all_gather, rows)
                else:
                    with issuing.on(group):
                        received, wait = gather.begin(all_gather, rows)
                if packed or issuing.node_shards is not None:
                    arrival = gather.arrival(rows, received, wait)
                    if issuing.node_shards is not None:
                        wait = partial(issuing.node_shards.keep, arrival)
                    if packed:
                        copy_out = arrival.copy_out
                unshard(records)
                issued += (ParameterGather(issuing, group, records, activity, wait, copy_out, packed),)
        if group.is_nccl:
            issuing.note_launch(group.communicator, request.activity)

    def _issue_by_deepspeed(self, request: GatherRequest, issued: list[ParameterGather]) -> None:
        group, issuing = request.group, self._issuing
        with issuing.gathering(group, request.params):
            with issuing.on(group):
                copy_out, packed = gathering.by_deepspeed(request.params)
            activity = Activity(issuing.status, request.activity)
            common = (issuing, group, list(map(record_of, request.params)), activity, issuing.waiting_for(group))
            issued.append(ParameterGather(*common, copy_out, packed, keeps=False))

    def values(self, request: GatherRequest) -> dict[Zero3Parameter, torch.Tensor]:
        if request.gathers is not None:
            return super().values(request)
        with self._issuing.gathering(request.group, request.params):
            return {param: zero3.gather(param) for param in request.params}

    def gather_for_context(self, request: GatherRequest) -> None:
        """Unshard the parameters of ``request`` into memory that is not reused."""
        if request.gathers is None:
            with self._issuing.gathering(request.group, request.params):
                gathering.by_deepspeed(request.params, in_storage=False)[0](self._issuing.streams.caller)
            return
        with zero3.as_it_is():
            values = self.values(request)
            records = list(map(record_of, values))
            unshard(records)
            if arrive(records, list(values.values())):
                settle(records)


def _by_dtype(
    params: Iterable[Zero3Parameter], dtype_of: Callable[[Zero3Parameter], torch.dtype]
) -> Iterable[list[Zero3Parameter]]:
    by_dtype: dict[torch.dtype, list[Zero3Parameter]] = {}
    for param in params:
        by_dtype.setdefault(dtype_of(param), []).append(param)
    return by_dtype.values()
