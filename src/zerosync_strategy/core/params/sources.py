"""ZeRO-3: the sources from which parameters are gathered: copies on the host, node shards, and the shards of all ranks.

They are asked in this order. Each delivers what it has, and the next is asked for the rest.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch

from zerosync_strategy.core.comm.journal import phase
from zerosync_strategy.core.engine import gathering, zero3
from zerosync_strategy.core.engine.parameter import record_of, settle
from zerosync_strategy.core.engine.transitions import arrive, unshard
from zerosync_strategy.core.failures.agreement import GatherActivity
from zerosync_strategy.core.failures.rank_status import Activity
from zerosync_strategy.core.params.copies import gather_node_shards
from zerosync_strategy.core.params.issuing import Issuing, ParameterGather, tagged_all_gather
from zerosync_strategy.core.params.shard_groups import GatherGroup

_Sent = Iterator[tuple[gathering.Arrival, GatherActivity]]  # each message, with its activity
_Messages = list[tuple[gathering.Message, Activity]]


class Part:
    """The parameters that one process group gathers in a turn.

    Attributes:
        messages: the messages that gather all shards, each with its activity; ``None``: DeepSpeed gathers.
        activity: of a rank that gathers all of the part; its ids are ``digested``.
    """

    def __init__(
        self, group: GatherGroup, params: list[Any], messages: _Messages | None,
        activity: GatherActivity,
    ) -> None:  # fmt: skip
        self.group, self.params, self.messages, self.activity = group, params, messages, activity
        self.digested = repr(activity.ids).encode()
        self.name = params[0]._zerosync_record.name


class Source(ABC):
    """A place from which values of parameters can be gathered."""

    def __init__(self, issuing: Issuing) -> None:
        self._issuing = issuing

    @abstractmethod
    def _send(self, part: Part, reads: bool) -> _Sent:
        """Begin to gather the parameters of ``part`` that this source has.

        With ``reads``, on the current stream, with values equal to the bit; else on the stream of the group.
        """

    def issue(self, part: Part, issued: list[ParameterGather]) -> None:
        """Issue the gathers of the parameters of ``part`` that this source has."""
        for arrival, activity in self._send(part, False):
            unshard(records := list(map(record_of, arrival.params)))
            common = (self._issuing, part.group, records, Activity(self._issuing.status, activity), arrival.wait)
            issued.append(ParameterGather(*common, arrival.land, arrival.packed))

    def values(self, part: Part) -> dict[Any, torch.Tensor]:
        """Return the values of the parameters of ``part`` that this source has, in memory of the caller's own."""
        values: dict[Any, torch.Tensor] = {}
        for arrival, _ in self._send(part, True):
            arrival.wait()
            values.update(arrival.values())
        return values


class HostCopies(Source):
    """Full copies in this rank's host memory: nothing is sent. Readers do not use them."""

    def _send(self, part: Part, reads: bool) -> _Sent:
        host, group = self._issuing.host, part.group
        if reads or host is None:
            return
        values = {param: full for param in part.params if (full := host.get(param)) is not None}
        for members in _by_dtype(values, zero3.shard_dtype):
            rows = self._issuing.memory_of(group, list(map(record_of, members)))
            of_dtype, wait = {param: values[param] for param in members}, self._issuing.waiting_for(group)
            with self._issuing.on(group), phase("load", members[0]._zerosync_record.name):
                arrival = gathering.from_host(of_dtype, rows, wait)
            yield arrival, self._issuing.activity(group, members)
        host.count_loaded(values)


class ShardsOfNode(Source):
    """Node shards of the ranks of this node: nothing is sent between nodes."""

    def _send(self, part: Part, reads: bool) -> _Sent:
        group, kept = part.group, self._issuing.node_shards
        if group.nodes is None or kept is None:
            return
        found = {param: shard for param in part.params if (shard := kept.get(param)) is not None}
        shards = {param: each for param, each in found.items() if not reads or each.dtype is zero3.shard_dtype(param)}
        if not shards:
            return
        if reads and group.stream is not None:  # the stream that may have filled them (U2)
            self._issuing.streams.caller_waits_for([group.stream])
        counter = self._issuing.count.counter
        with self._issuing.gathering(group, list(shards), noted=True) as tag:
            for members in _by_dtype(shards, zero3.gather_dtype):
                activity = self._issuing.activity(group, members, part.activity.reader)
                of_dtype = {param: shards[param] for param in members}
                with self._issuing.on(group, reads):
                    arrival = gather_node_shards(group.nodes, of_dtype, counter, tag, activity)
                yield arrival, activity


class AllShards(Source):
    """The shards of all ranks, from which every parameter can be gathered. What arrives may be kept in node shards."""

    def __init__(self, issuing: Issuing, engine: Any) -> None:
        super().__init__(issuing)
        self._all_gather = gathering.backends_all_gather(issuing.count)
        self._gathers_plainly = gathering.gathers_plainly(engine)

    def is_plain(self, param: Any) -> bool:
        """Return whether several ranks shard ``param``, in memory and not quantized."""
        record = param._zerosync_record
        return self._gathers_plainly and record.plain and record.group.digest is not None

    def part(
        self, group: GatherGroup, params: list[Any], dtype_of: Callable[[Any], torch.dtype] = zero3.gather_dtype,
        reader: str = "",
    ) -> Part:  # fmt: skip
        activity, status = self._issuing.activity, self._issuing.status
        messages, over = None, (group.communicator, group.in_place)
        if all(map(self.is_plain, params)):
            messages = [
                (
                    gathering.Message(members, dtype_of(members[0]), *over),
                    Activity(status, activity(group, members, reader)),
                )
                for members in _by_dtype(params, dtype_of)
            ]
        return Part(group, params, messages, activity(group, params, reader))

    def _send(self, part: Part, reads: bool) -> _Sent:
        assert reads and part.messages is not None
        tag = self._issuing.begin(part.group, part.activity.ids, part.digested)
        all_gather = self._tagged(part.group, tag) if part.group.is_tagged else self._all_gather
        with phase("gather", part.name):
            for message, activity in part.messages:
                yield message.send(all_gather, message.new_rows()), activity.what
        if part.group.is_nccl:
            self._issuing.note_launch(part.group.communicator, part.activity)

    def _tagged(self, group: GatherGroup, tag: int) -> gathering.AllGather:
        """Return an all-gather that matches only gathers with the same ``tag``."""
        return gathering.one_by_one(tagged_all_gather(group, self._issuing.count.counter, tag))

    def issue(self, part: Part, issued: list[ParameterGather]) -> None:
        if part.messages is None:
            self._issue_by_deepspeed(part, issued)
            return
        group, issuing = part.group, self._issuing
        tag = issuing.begin(group, part.activity.ids, part.digested)
        all_gather = self._tagged(group, tag) if group.is_tagged else self._all_gather
        with phase("gather", part.name):
            for message, activity in part.messages:
                records, packed, land = message.records, message.packed, None
                rows = issuing.memory_of(group, records[: message.placed], records) if message.placed else []
                if group.stream is None:
                    received, wait = message.begin(all_gather, rows)
                else:
                    with issuing.on(group):
                        received, wait = message.begin(all_gather, rows)
                if packed or issuing.node_shards is not None:
                    arrival = message.arrival(rows, received, wait)
                    if issuing.node_shards is not None:
                        wait = partial(issuing.node_shards.keep, arrival)
                    if packed:
                        land = arrival.land
                unshard(records)
                issued += (ParameterGather(issuing, group, records, activity, wait, land, packed),)
        if group.is_nccl:
            issuing.note_launch(group.communicator, part.activity)

    def _issue_by_deepspeed(self, part: Part, issued: list[ParameterGather]) -> None:
        group, issuing = part.group, self._issuing
        with issuing.gathering(group, part.params):
            with issuing.on(group):
                arrive = gathering.by_deepspeed(part.params)
            activity = Activity(issuing.status, part.activity)
            common = (issuing, group, list(map(record_of, part.params)), activity, issuing.waiting_for(group))
            issued.append(ParameterGather(*common, arrive, (), keeps=False))

    def values(self, part: Part) -> dict[Any, torch.Tensor]:
        if part.messages is not None:
            return super().values(part)
        with self._issuing.gathering(part.group, part.params):
            return {param: zero3.gather(param) for param in part.params}

    def gather_for_context(self, part: Part) -> None:
        """Unshard the parameters of ``part`` into memory that is not reused."""
        if part.messages is None:
            with self._issuing.gathering(part.group, part.params):
                gathering.by_deepspeed(part.params, returns=False)(self._issuing.streams.caller)
            return
        with zero3.as_it_is():
            values = self.values(part)
            records = list(map(record_of, values))
            unshard(records)
            if arrive(records, list(values.values())):
                settle(records)


def _by_dtype(params: Iterable[Any], dtype_of: Callable[[Any], torch.dtype]) -> Iterable[list[Any]]:
    by_dtype: dict[torch.dtype, list[Any]] = {}
    for param in params:
        by_dtype.setdefault(dtype_of(param), []).append(param)
    return by_dtype.values()
