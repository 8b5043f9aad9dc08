"""ZeRO-3's gathers: one order on all ranks, a stream per process group, and waits for single gathers.

DeepSpeed gathers the parameters of a module, and those it prefetches, by process group in the order in which a Python
set yields them: another one on each rank, which on NCCL can be a deadlock. Here the parameters of one such turn are
gathered in the order of (ranks of the process group, id), each group by itself (U1; ``docs/rules.md`` has the proof).
A parameter that is read where no hook gathers it (E1) is a turn of its own.

Whoever waits for a gather is ordered after that gather alone (U2), and its error says what each rank was gathering.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from zerosync_strategy.core.comm.collectives import InFlight, all_gather, note_launch, phase
from zerosync_strategy.core.comm.messages import Messages
from zerosync_strategy.core.comm.nodes import Nodes, Topology
from zerosync_strategy.core.comm.streams import Streams
from zerosync_strategy.core.engine import gathering, zero3
from zerosync_strategy.core.engine.parameter import Record, unshard
from zerosync_strategy.core.engine.torch_internals import plain_torch
from zerosync_strategy.core.engine.zero import in_runs
from zerosync_strategy.core.failures.aborted import BegunCollectives
from zerosync_strategy.core.failures.rank_status import rank_status
from zerosync_strategy.core.params import gathers
from zerosync_strategy.core.params.gather_groups import MAX_STREAMS, GatherGroup, gather_groups
from zerosync_strategy.core.params.gathers import GatherActivity, GatherCount, ParameterGather, UnshardedBytes, arrived
from zerosync_strategy.core.params.host_cache import HostCache
from zerosync_strategy.core.params.node_shards import NodeShards, gather_node_shards
from zerosync_strategy.core.params.unit_order import UnitOrder

Found = TypeVar("Found")
REMEMBERED = 10_000
"""Sets of parameters that were gathered in one turn."""


class GatherScheduler:
    """Orders the gathers of one attached ZeRO-3 engine, and what waits for them.

    Args:
        sharing: ``"per_group"``: each process group gathers on its own stream; ``"shared"``: all on one.
        messages: how large those are in which parameters are gathered ahead.
        topology: which ranks are on one node.

    Attributes:
        records: of the parameters of the engine's module.
        groups: by process group, in the order of gathers.
        unsharded: counts what is gathered here, by hooks and for readers, but no persistent parameters.
        before_read: called before a parameter is read that no hook has gathered.
        order: of the calls of units in forwards.
        begun: what the engines have sent that gather here, to compare where one has aborted it.
        in_backward: called when a backward comes to a unit, with what is behind it (:meth:`UnitOrder.comes_to`), on
            every rank before the same gathers.
        count: of what modules and readers gather for steps.
        host: has parameters that need not be gathered again; ``None``: there are none.
        node_shards: has what need not be gathered from other nodes again; ``None``: there are none.
    """

    def __init__(self, engine: Any, streams: Streams, sharing: str, messages: Messages, topology: Topology) -> None:
        self._messages = messages
        self.streams = streams
        self.unsharded = UnshardedBytes()
        self.names = {zero3.param_id(param): name for name, param in engine.module.named_parameters()}
        self._prefetched_numel = gathering.prefetched_numel(engine)
        self._gathers_plainly = gathering.gathers_plainly(engine)
        self._device = engine.device
        self.groups = gather_groups(engine, topology, streams)
        self._digests = [group.digest for group in self.groups.values() if group.digest is not None]
        count = 1 if sharing == "shared" else min(len(self.groups), MAX_STREAMS)
        self._gather_streams = streams.make_gather_streams(
            count, gathering.gather_stream(gathering.coordinator(engine.optimizer))
        )
        for group in self.groups.values() if self._gather_streams else ():
            group.stream = self._gather_streams[group.place % len(self._gather_streams)]
        self.records = [
            Record(param, repr(name), self, self.groups[zero3.process_group(param)])
            for name, param in engine.module.named_parameters()
        ]
        self._turns: dict[tuple[int, ...], list[tuple[GatherGroup, list[Any]]]] = {}
        self._parts: dict[tuple[int, ...], list[tuple[torch.dtype, list[Any]]] | None] = {}
        self._has_empty = any(zero3.full_numel(record.param) == 0 for record in self.records)
        self.shards_written()  # by whoever made them
        self.order = UnitOrder()
        self.in_backward: list[Callable[[int], None]] = []
        self.begun: list[BegunCollectives] = []
        self.count = GatherCount()
        self.before_read: Callable[[Any], None] | None = None
        self.host: HostCache | None = None
        self.node_shards: NodeShards | None = None

    def detach(self) -> None:
        """From here on, DeepSpeed gathers as it always did."""
        for record in self.records:
            del record.param._zerosync_record

    # ---- the window ----------------------------------------------------------------------------------------------

    def before_step(self) -> None:
        """Check that the ranks of each group have gathered the same since the last step (W4). Collective."""
        for digest in self._digests:
            digest.compare_window(self.name)

    def before_checkpoint(self) -> None:
        """Check the gathers that led to the last step, which the checkpoint is to keep (W4)."""
        for digest in self._digests:
            digest.check(self.name)

    def compare_aborted(self) -> None:
        """Before anything is sent for a forward: nothing of an aborted window may meet it (W3)."""
        for begun in self.begun:
            begun.compare_aborted()

    def shards_written(self) -> None:
        """The current stream writes shards, or may have: the next gather waits for it (S1)."""
        self.streams.record_write()

    def backward_comes(self, behind: int) -> None:
        """A backward comes to a unit; what it gathers comes after this."""
        for reach in self.in_backward:
            reach(behind)

    def values_in_shards(self, param: Any) -> None:
        """The caller's stream has written the values of a gathered ``param`` to its shards, new or not.

        So copies of it, which no rank is told are out of date, are made anew.
        """
        self.shards_written()
        for copies in (self.host, self.node_shards):
            if copies is not None and copies.get(param) is not None:
                self.streams.gathers_wait_for_writes(self._gather_streams)
                group = param._zerosync_record.group
                with self._on(group):
                    copies.renew(param)
                    self.streams.record_write()  # readers outside of gathers wait for it, too
                self.streams.record_stream_for_gathers(param.data, group.stream)

    # ---- issuing -------------------------------------------------------------------------------------------------

    def issue(self, params: Iterable[Any]) -> list[ParameterGather]:
        """Gather those of ``params`` that are released, which are wanted in one turn. Who waits for it gives values."""
        issued: list[ParameterGather] = []
        released = zero3.released(params)
        if self._has_empty:
            released = [param for param in released if not gathering.gather_empty(param)]
        with plain_torch():
            for group, of_group in self._by_group(released):
                self.count.add(of_group)
                missing = of_group if self.host is None else self._load(group, of_group, self.host, issued)
                if self.node_shards is not None and group.nodes is not None:
                    missing = self._gather_within(group, group.nodes, missing, self.node_shards, issued)
                if missing:
                    with self.gathering(group, missing):
                        self._gather(group, missing, issued)
        return issued

    def _gather(self, group: GatherGroup, params: list[Any], issued: list[ParameterGather]) -> None:
        messages = self._messages_of(params)
        if messages is None:
            with self._on(group):
                arrive = gathering.by_deepspeed(params)
            issued.append(self._note_gather(group, _nothing, arrive, params))
            return
        for dtype, members in messages:
            with self._on(group):
                arrival = gathering.gather_shards(members, dtype)
            wait = arrival.wait if self.node_shards is None else partial(self.node_shards.keep, arrival)
            issued.append(self._on_its_way(group, arrival, wait))

    def _on_its_way(
        self, group: GatherGroup, arrival: gathering.Arrival, wait: Callable[[], object]
    ) -> ParameterGather:
        unshard([param._zerosync_record for param in arrival.params])
        return self._note_gather(group, wait, arrival.land, arrival.params, self.host)

    def _by_group(self, params: list[Any]) -> list[tuple[GatherGroup, list[Any]]]:
        """As :meth:`in_order`, remembered: units are gathered again and again."""
        return _remembered(self._turns, params, lambda: list(self.in_order(params)))

    def _messages_of(self, params: list[Any]) -> list[tuple[torch.dtype, list[Any]]] | None:
        """Return what of ``params``, of one group, is gathered in which dtype; ``None``: by DeepSpeed. Remembered."""

        def parts() -> list[tuple[torch.dtype, list[Any]]] | None:
            if not all(map(self.gathers_plainly, params)):
                return None
            return [(zero3.gather_dtype(part[0]), part) for part in _by_dtype(params, zero3.gather_dtype)]

        return _remembered(self._parts, params, parts)

    def gathers_plainly(self, param: Any) -> bool:
        """Return whether ``param`` is gathered from other ranks' shards of its values."""
        record = param._zerosync_record
        return self._gathers_plainly and record.plain and record.group.digest is not None

    def _load(self, group: GatherGroup, params: list[Any], host: HostCache, issued: list[ParameterGather]) -> list[Any]:
        """Let those of ``params``, all of one group, arrive that the host has in full; return the others."""
        values = {param: full for param in params if (full := host.get(param)) is not None}
        for members in _by_dtype(list(values), zero3.shard_dtype):
            with self._on(group), zero3.as_it_is(), phase("load", members[0]._zerosync_record.name):
                arrival = gathering.from_host({param: values[param] for param in members})
            issued.append(self._on_its_way(group, arrival, arrival.wait))
        host.count_loaded(values)
        return [param for param in params if param not in values]

    def _gather_within(
        self, group: GatherGroup, nodes: Nodes, params: list[Any], node_shards: NodeShards,
        issued: list[ParameterGather],
    ) -> list[Any]:  # fmt: skip
        """Gather those of ``params``, all of one group, of which the node has all shards; return the others."""
        shards = {param: shard for param in params if (shard := node_shards.get(param)) is not None}
        if not shards:
            return params
        with self.gathering(group, list(shards), noted=True) as tag:
            for members in _by_dtype(list(shards), zero3.gather_dtype):
                with self._on(group):
                    label = self.activity(group, members)
                    arrival = gather_node_shards(nodes, {param: shards[param] for param in members}, tag, label)
                issued.append(self._on_its_way(group, arrival, arrival.wait))
        return [param for param in params if param not in shards]

    def _on(self, group: GatherGroup) -> AbstractContextManager[None]:
        return nullcontext() if group.stream is None else self.streams.on_gather_stream(group.stream)

    def _note_gather(
        self, group: GatherGroup, wait: Callable[[], object], land: Callable[[], None], params: Sequence[Any],
        host: HostCache | None = None,
    ) -> ParameterGather:  # fmt: skip
        unsharded = None if group.digest is None else self.unsharded
        activity = self.activity(group, params)
        return ParameterGather(wait, land, params, self.streams, group.stream, activity, unsharded, host)

    def in_order(self, params: Iterable[Any]) -> Iterator[tuple[GatherGroup, list[Any]]]:
        """Yield ``params`` by process group, each group's in the order of their ids, the groups in theirs (U1)."""
        records = sorted({param._zerosync_record for param in params}, key=attrgetter("order"))
        for group, members in groupby(records, attrgetter("group")):
            yield group, [record.param for record in members]

    def runs(self, params: Iterable[Any]) -> Iterator[tuple[int, list[list[Any]]]]:
        """Yield, by process group, its place in the order of gathers and ``params`` in runs for one gather each."""
        for group, of_group in self.in_order(params):
            limit = min(self._prefetched_numel * of_group[0].element_size(), self._messages.nbytes)
            yield group.place, in_runs(of_group, limit, zero3.full_bytes)

    @contextmanager
    def gathering(self, group: GatherGroup, params: list[Any], noted: bool = False) -> Iterator[int]:
        """Around the issue of the gather of ``params``, all of one group; has its tag.

        Off NCCL, only the same gather of other ranks will meet it; else the ranks compare later what has met (W4).
        ``noted``: who issues it does so by a function that notes its launch.
        """
        self.streams.gathers_wait_for_writes(self._gather_streams)
        gathering_by: AbstractContextManager[None] = nullcontext()
        tag = 0
        if (digest := group.digest) is not None:
            tag = digest.add(zero3.param_ids(params))
            if digest.tagged:
                gathering_by = gathering.gathering_by(partial(_all_gather, group.nodes, tag))
            else:
                self.compare_aborted()
                for begun in self.begun:
                    begun.add(group.process_group)
        with gathering_by, zero3.as_it_is(), phase("gather", params[0]._zerosync_record.name):
            yield tag
        self.count.issued()
        if digest is not None and not digest.tagged and not noted:
            note_launch(group.process_group, self._device, self.activity(group, params))

    # ---- readers -------------------------------------------------------------------------------------------------

    def arrive(self, param: Any) -> None:
        """If ``param`` is in flight, or held, it arrives (U2)."""
        if self.before_read is not None:
            self.before_read(param)
        arrived((param._zerosync_record,))
        self.join((param,))

    def join(self, params: Iterable[Any]) -> None:
        """The current stream is about to use what is gathered of ``params``, whichever has waited for it (U2, L3)."""
        for param in params if self._gather_streams else ():
            gather = param._zerosync_record.gather
            if gather is not None and zero3.is_gathered(param):
                gather.join()

    def gather_and_wait(self, params: Iterable[Any]) -> None:
        """Gather ``params`` for a ``GatheredParameters`` context, or where a step ends. Collective.

        DeepSpeed would take what is in flight for gathered, read it before it is there, and fail where it releases it.
        """
        self.streams.caller_waits_for_writes(self._gather_streams)
        own = [param for param in params if not zero3.is_quantized(param)]
        for param in own:
            self.arrive(param)  # the context reshards it
        released = [param for param in own if zero3.is_released(param) and not gathering.gather_empty(param)]
        for _, runs in self.runs(released):
            for run in runs:
                group = run[0]._zerosync_record.group
                with (
                    self.count.of_context(),
                    self.gathering(group, run),
                    rank_status().activity(self.activity(group, run)),
                ):
                    self._gather_for_context(run)

    def _gather_for_context(self, params: list[Any]) -> None:
        """Give ``params``, of one group, their values in memory that nobody frees."""
        messages = self._messages_of(params)
        if messages is None:
            gathering.by_deepspeed(params, returns=False)()
            return
        for dtype, members in messages:
            for param, full in _values(gathering.gather_shards(members, dtype)):
                param._zerosync_record.unshard()
                param._zerosync_record.arrive(full)

    def shard(self, param: Any) -> torch.Tensor | None:
        """Return this rank's shard of ``param``, which has its values; ``None`` where it is not gathered from such."""
        if not self.gathers_plainly(param) or zero3.full_numel(param) == 0:
            return None
        self.arrive(param)
        self.streams.caller_waits_for_writes(self._gather_streams)
        with zero3.as_it_is():
            if zero3.is_gathered(param):
                param._zerosync_record.carry_changes()
            shard = zero3.own_shard(param)
            if self.streams.is_on_host(shard):  # the device may be about to write it (S1)
                self.streams.host_waits_for_caller()
            return shard

    def unshard(self, param: Any) -> torch.Tensor:
        """Return the values of ``param`` in memory of their own, for a reader whom no hook serves. Collective."""
        self.arrive(param)
        if zero3.is_released(param):
            self.count.add((param,))
        (full,) = self.values([param])
        return full

    def values(self, params: list[Any], reader: str = "") -> list[torch.Tensor]:
        """Return the values of ``params``, one run of a process group, in memory of the caller's own. Collective.

        They stay as they are: gathered, on their way, or released. ``reader`` says who asks, for errors.
        """
        with zero3.as_it_is():
            for param in params:
                self.order.reads(param)
            arrived([param._zerosync_record for param in params])
            self.join(params)
            released = [param for param in params if zero3.is_released(param) and not gathering.gather_empty(param)]
            self.unsharded.add(sum(map(zero3.full_bytes, params)))
            gathered = self._values_of_released(released, reader) if released else {}
            values = [gathered[param] if param in gathered else param.data.clone() for param in params]
            for param, full in zip(params, values, strict=True):
                self.unsharded.free_with(full, zero3.full_bytes(param))
            return values

    def _values_of_released(self, params: list[Any], reader: str) -> dict[Any, torch.Tensor]:
        self.streams.caller_waits_for_writes(self._gather_streams)
        group = params[0]._zerosync_record.group
        values: dict[Any, torch.Tensor] = {}
        with rank_status().activity(self.activity(group, params, reader)):
            if self.node_shards is not None and group.nodes is not None:
                shards = {param: shard for param in params if (shard := self.node_shards.get(param)) is not None}
                exact = [param for param in shards if shards[param].dtype is zero3.shard_dtype(param)]
                for members in _by_dtype(exact, zero3.shard_dtype):
                    with self.gathering(group, members, noted=True) as tag:
                        of_dtype = {param: shards[param] for param in members}
                        label = self.activity(group, members, reader)
                        values.update(_values(gather_node_shards(group.nodes, of_dtype, tag, label)))
                params = [param for param in params if param not in values]
            if not params:
                return values
            with self.gathering(group, params):
                if not all(map(self.gathers_plainly, params)):
                    return values | {param: zero3.gather(param) for param in params}
                for members in _by_dtype(params, zero3.shard_dtype):
                    values.update(_values(gathering.gather_shards(members, zero3.shard_dtype(members[0]))))
        return values

    # ---- words ---------------------------------------------------------------------------------------------------

    def name(self, param_id: int) -> str:
        return gathers.name_of(self.names, param_id)

    def activity(self, group: GatherGroup, params: Sequence[Any], reader: str = "") -> object:
        """Return what a rank does that gathers ``params``; its text is made when something fails."""
        return GatherActivity(self.names, zero3.param_ids(params), group.ranks, reader)

    def departure(self) -> str:
        """Return how the gathers of this window are others than those of the last; empty if they are not."""
        for digest in self._digests:
            if (found := digest.departure()) is not None:
                now, then = (gathers.listed(self.names, ids) for ids in found)
                return f"gathered {now} where it gathered {then} in the window before"
        return ""


def _nothing() -> None:
    pass


def _remembered(memo: dict[tuple[int, ...], Found], params: list[Any], make: Callable[[], Found]) -> Found:
    """Return what ``make`` has made for ``params`` before, or makes now."""
    ids = zero3.param_ids(params)
    if ids not in memo:
        if len(memo) == REMEMBERED:
            memo.clear()
        memo[ids] = make()
    return memo[ids]


def _values(arrival: gathering.Arrival) -> list[tuple[Any, torch.Tensor]]:
    arrival.wait()
    return arrival.values()


def _by_dtype(params: list[Any], dtype_of: Callable[[Any], torch.dtype]) -> Iterable[list[Any]]:
    by_dtype: dict[torch.dtype, list[Any]] = {}
    for param in params:
        by_dtype.setdefault(dtype_of(param), []).append(param)
    return by_dtype.values()


def _all_gather(
    nodes: Nodes | None, tag: int, source: torch.Tensor, target: torch.Tensor, process_group: Any
) -> InFlight:
    """What DeepSpeed's all-gather does, but it meets only those with the same ``tag``."""
    rows = target.view(dist.get_world_size(process_group), -1)
    own = rows[dist.get_rank(process_group)]
    if own.data_ptr() != source.data_ptr():  # DeepSpeed packs several parameters where they belong
        own.copy_(source)
    if nodes is not None and len(rows) < nodes.size * nodes.count:
        nodes = None  # DeepSpeed's hpZ gathers within a node itself
    return all_gather(rows, process_group, tag) if nodes is None else nodes.all_gather(rows, tag, "")
