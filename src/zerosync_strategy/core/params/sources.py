"""ZeRO-3: the places that parameters are gathered from, each a source: copies on the host, node shards, all shards.

They are asked in this order: each lets arrive what it has, and leaves the rest to the next.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch

from zerosync_strategy.core.comm.collectives import phase
from zerosync_strategy.core.engine import gathering, zero3
from zerosync_strategy.core.engine.parameter import unshard
from zerosync_strategy.core.params.gather_groups import GatherGroup
from zerosync_strategy.core.params.gathers import GatherActivity, ParameterGather
from zerosync_strategy.core.params.host_cache import HostCache
from zerosync_strategy.core.params.issuing import Issuing, tagged_all_gather
from zerosync_strategy.core.params.node_shards import NodeShards, gather_node_shards


class Part:
    """What one process group gathers in a turn.

    Attributes:
        messages: by which all shards are gathered, each with what a rank does that sends it; ``None``: as DeepSpeed
            does.
        activity: what a rank does that gathers all of it; its ids are ``digested``.
    """

    def __init__(
        self, group: GatherGroup, params: list[Any], messages: list[tuple[gathering.Message, GatherActivity]] | None,
        activity: GatherActivity,
    ) -> None:  # fmt: skip
        self.group, self.params, self.messages, self.activity = group, params, messages, activity
        self.digested = repr(activity.ids).encode()
        self.name = params[0]._zerosync_record.name


class Source(ABC):
    """A place that has values of parameters: ``copies``, or the shards themselves."""

    def __init__(self, issuing: Issuing, copies: HostCache | NodeShards | None = None) -> None:
        self._issuing, self._copies = issuing, copies

    def has_copy(self, param: Any) -> bool:
        return self._copies is not None and self._copies.get(param) is not None

    def renew(self, param: Any) -> None:
        """Give the copy of ``param``, which is gathered, its values."""
        if self._copies is not None:
            self._copies.renew(param)

    @abstractmethod
    def issue(self, part: Part, issued: list[ParameterGather]) -> Sequence[Any]:
        """Let those parameters of ``part`` arrive that are here; return the others, in the same order."""

    def values(self, group: GatherGroup, params: list[Any], reader: str) -> dict[Any, torch.Tensor]:
        """Return the values of those of ``params`` that are here, in memory of the caller's own, for ``reader``."""
        return {}

    def _let_arrive(
        self, group: GatherGroup, arrival: gathering.Arrival, wait: Callable[[], object], activity: GatherActivity
    ) -> ParameterGather:
        unshard([param._zerosync_record for param in arrival.params])
        return self._issuing.note(group, wait, arrival.land, arrival.params, activity)


class HostCopies(Source):
    """Copies in full in this rank's host memory: nothing is sent."""

    def __init__(self, issuing: Issuing, host: HostCache) -> None:
        super().__init__(issuing, host)
        self._host = host

    def issue(self, part: Part, issued: list[ParameterGather]) -> list[Any]:
        group = part.group
        values = {param: full for param in part.params if (full := self._host.get(param)) is not None}
        for members in _by_dtype(values, zero3.shard_dtype):
            with self._issuing.on(group), phase("load", members[0]._zerosync_record.name):
                arrival = gathering.from_host({param: values[param] for param in members})
            activity = self._issuing.activity(group, members)
            issued.append(self._let_arrive(group, arrival, arrival.wait, activity))
        self._host.count_loaded(values)
        return [param for param in part.params if param not in values]


class ShardsOfNode(Source):
    """Shards of which the ranks of this node have all: nothing is sent between nodes."""

    def __init__(self, issuing: Issuing, node_shards: NodeShards) -> None:
        super().__init__(issuing, node_shards)
        self._node_shards = node_shards

    def issue(self, part: Part, issued: list[ParameterGather]) -> list[Any]:
        group, nodes = part.group, part.group.nodes
        if nodes is None or not (shards := self._shards(part.params)):
            return part.params
        with self._issuing.gathering(group, list(shards), noted=True) as tag:
            for members in _by_dtype(shards, zero3.gather_dtype):
                activity = self._issuing.activity(group, members)
                with self._issuing.on(group):
                    arrival = gather_node_shards(nodes, {param: shards[param] for param in members}, tag, activity)
                issued.append(self._let_arrive(group, arrival, arrival.wait, activity))
        return [param for param in part.params if param not in shards]

    def values(self, group: GatherGroup, params: list[Any], reader: str) -> dict[Any, torch.Tensor]:
        values: dict[Any, torch.Tensor] = {}
        shards = self._shards(params) if group.nodes is not None else {}
        exact = [param for param in shards if shards[param].dtype is zero3.shard_dtype(param)]
        for members in _by_dtype(exact, zero3.shard_dtype):
            with self._issuing.gathering(group, members, noted=True) as tag:
                of_dtype = {param: shards[param] for param in members}
                activity = self._issuing.activity(group, members, reader)
                assert group.nodes is not None
                values.update(_values(gather_node_shards(group.nodes, of_dtype, tag, activity)))
        return values

    def _shards(self, params: Iterable[Any]) -> dict[Any, torch.Tensor]:
        return {param: shard for param in params if (shard := self._node_shards.get(param)) is not None}


class AllShards(Source):
    """Everybody's shards, which have everything. Node shards keep some of what comes, where there are any."""

    def __init__(self, issuing: Issuing, engine: Any, node_shards: NodeShards | None) -> None:
        super().__init__(issuing)
        self._node_shards = node_shards
        self._all_gather = gathering.flat_all_gather()
        self._gathers_plainly = gathering.gathers_plainly(engine)

    def is_plain(self, param: Any) -> bool:
        """Return whether several ranks have shards of the values of ``param``, in memory and as they are."""
        record = param._zerosync_record
        return self._gathers_plainly and record.plain and record.group.digest is not None

    def part(self, group: GatherGroup, params: list[Any]) -> Part:
        activity, messages = self._issuing.activity, None
        if all(map(self.is_plain, params)):
            messages = [
                (gathering.Message(members, zero3.gather_dtype(members[0])), activity(group, members))
                for members in _by_dtype(params, zero3.gather_dtype)
            ]
        return Part(group, params, messages, activity(group, params))

    def issue(self, part: Part, issued: list[ParameterGather]) -> Sequence[Any]:
        group, issuing = part.group, self._issuing
        if part.messages is None:
            with issuing.gathering(group, part.params):
                with issuing.on(group):
                    arrive = gathering.by_deepspeed(part.params)
                issued.append(issuing.note(group, _nothing, arrive, part.params, part.activity, keeps=False))
            return ()
        tag = issuing.begin(group, part.activity.ids, part.digested)
        send = self._all_gather if not group.is_tagged else tagged_all_gather(group, tag)
        with phase("gather", part.name):
            for message, activity in part.messages:
                with issuing.on(group):
                    arrival = message.send(send)
                wait = arrival.wait if self._node_shards is None else partial(self._node_shards.keep, arrival)
                issued.append(self._let_arrive(group, arrival, wait, activity))
        issuing.issued(group, part.activity)
        return ()

    def values(self, group: GatherGroup, params: list[Any], reader: str) -> dict[Any, torch.Tensor]:
        with self._issuing.gathering(group, params):
            if not all(map(self.is_plain, params)):
                return {param: zero3.gather(param) for param in params}
            values: dict[Any, torch.Tensor] = {}
            for members in _by_dtype(params, zero3.shard_dtype):
                values.update(_values(gathering.Message(members, zero3.shard_dtype(members[0])).send()))
            return values

    def gather_for_context(self, part: Part) -> None:
        """Give the parameters of ``part`` their values in memory that nobody frees."""
        if part.messages is None:
            gathering.by_deepspeed(part.params, returns=False)()
            return
        for message, _ in part.messages:
            for param, full in _values(message.send()):
                param._zerosync_record.unshard()
                param._zerosync_record.arrive(full)


def _nothing() -> None:
    pass


def _values(arrival: gathering.Arrival) -> list[tuple[Any, torch.Tensor]]:
    arrival.wait()
    return arrival.values()


def _by_dtype(params: Iterable[Any], dtype_of: Callable[[Any], torch.dtype]) -> Iterable[list[Any]]:
    by_dtype: dict[torch.dtype, list[Any]] = {}
    for param in params:
        by_dtype.setdefault(dtype_of(param), []).append(param)
    return by_dtype.values()
