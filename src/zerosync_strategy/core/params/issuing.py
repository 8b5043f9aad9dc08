"""ZeRO-3: a gather of parameters in flight, and what the issue of all gathers shares, whatever their source (E1)."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist

from zerosync_strategy.core.comm.collectives import InFlight, all_gather, note_launch
from zerosync_strategy.core.comm.journal import SentCounter, phase
from zerosync_strategy.core.comm.nodes import Nodes
from zerosync_strategy.core.comm.streams import Streams
from zerosync_strategy.core.engine import gathering, zero3
from zerosync_strategy.core.engine.parameter import Record, settle
from zerosync_strategy.core.engine.patches import replaced
from zerosync_strategy.core.engine.transitions import arrive, memory_of
from zerosync_strategy.core.engine.types import DeepSpeedEngine, Zero3Parameter
from zerosync_strategy.core.failures.agreement import BegunCollectives, GatherActivity
from zerosync_strategy.core.failures.rank_status import Activity, rank_status
from zerosync_strategy.core.params.copies import HostCache, NodeShards
from zerosync_strategy.core.params.shard_groups import GatherGroup

_NOWHERE = nullcontext()


def _nothing() -> None:
    """Wait for nothing more."""


class UnshardedBytes:
    """Counts bytes of unsharded parameters, and of values for readers while something refers to them.

    ``watch`` is called before bytes are added.
    """

    def __init__(self) -> None:
        self.watch: Callable[[], None] | None = None
        self._now = self.peak = 0
        self._freed: deque[int] = deque()  # appended by any thread; one of gloo may be late

    @property
    def now(self) -> int:
        while self._freed:
            self._now -= self._freed.popleft()
        return self._now

    def add(self, nbytes: int) -> None:
        """Count bytes that are being gathered; a negative number counts bytes that are resharded."""
        if self.watch is not None and nbytes > 0:
            self.watch()
        now = self._now = (self.now if self._freed else self._now) + nbytes
        if now > self.peak:
            self.peak = now

    def free_with(self, tensor: torch.Tensor, nbytes: int) -> None:
        """Subtract ``nbytes``, which were added before, when the memory of ``tensor`` is freed."""
        weakref.finalize(tensor.untyped_storage(), self._freed.append, nbytes)

    def reset_peak(self) -> None:
        self.peak = self.now


def arrived(records: Iterable[Record]) -> None:
    """Wait for the gathers of ``records`` that are in flight."""
    for record in records:
        if record.gather is not None and not record.gather.is_done:
            record.gather.wait()


NO_GRADIENTS = "forwards without gradients"
"""The section of counts for gathers of modules where no backward follows, as in an evaluation."""
CONTEXTS = "GatheredParameters"
"""The section of counts for gathers of the program itself, as to generate."""


class GatherCount:
    """Counts, in the records of parameters, how often modules and readers have them gathered for steps.

    Attributes:
        counter: counts what gathers send now: that of the engine, of the whole module or of some parameters, whose
            forward, backward or step has begun last.
        is_for_step: modules and readers gather for a step now.
    """

    def __init__(self) -> None:
        self.counter = SentCounter()  # no engine's
        self.is_for_step = True
        self._in_context = False

    @contextmanager
    def without_gradients(self) -> Iterator[None]:
        """Around a forward without gradients, whose gathers do not count for a step."""
        with replaced(self, "is_for_step", False), self.counter.apart(NO_GRADIENTS):
            yield

    def in_context(self) -> AbstractContextManager[None]:
        """Around the start of a ``GatheredParameters`` context, whose parameters may be held already."""
        return replaced(self, "_in_context", True)

    def of_context(self) -> AbstractContextManager[None]:
        """Around gathers for no module: at the start of a context, they do not count for a step."""
        return self.counter.apart(CONTEXTS) if self._in_context else nullcontext()


class EngineWindow(Protocol):
    """The window of an engine, as far as it concerns gathers, which all engines of a module share.

    Attributes:
        begun: the collectives that the engine has begun, to compare after it has aborted.
    """

    @property
    def begun(self) -> BegunCollectives: ...

    def reaches_unit(self, behind: int) -> None:
        """Report that a backward reaches a unit, before it gathers. ``behind``: see :meth:`UnitOrder.comes_to`."""


class Issuing:
    """What the gathers of the module of ``engine`` share.

    Attributes:
        host: parameters cached in host memory; ``None``: no such cache.
        node_shards: parameters that need not be gathered from other nodes again; ``None``: no node shards.
        names: of the parameters, by id.
        status: of this rank, for errors.
        gather_streams: all streams that gather; empty on a device without streams.
        windows: of the engines of this module, in the order of their attaching.
        count: gathers by modules and readers, for steps.
        unsharded: bytes gathered here, by hooks and for readers, without persistent parameters.
    """

    def __init__(
        self, engine: DeepSpeedEngine, windows: Sequence[EngineWindow], streams: Streams,
        gather_streams: list[torch.Stream], host: HostCache | None, node_shards: NodeShards | None,
    ) -> None:  # fmt: skip
        self.names = {zero3.param_id(param): name for name, param in engine.module.named_parameters()}
        self.streams, self.gather_streams, self._device = streams, gather_streams, engine.device
        self.host, self.node_shards = host, node_shards
        self.status = rank_status()
        self.windows = windows
        self.count, self.unsharded = GatherCount(), UnshardedBytes()

    def on(self, group: GatherGroup, reads: bool = False) -> AbstractContextManager[None]:
        """Issue a gather of ``group`` on its stream; if the caller ``reads``, on the current stream."""
        return _NOWHERE if reads or group.stream is None else self.streams.on_gather_stream(group.stream)

    def waiting_for(self, group: GatherGroup) -> Callable[[], None]:
        """Return a function that makes the current stream wait for what the stream of ``group`` does (U2)."""
        return partial(self.streams.caller_waits_for, [group.stream])

    @contextmanager
    def gathering(self, group: GatherGroup, params: list[Zero3Parameter], noted: bool = False) -> Iterator[int]:
        """Around the issue of the gather of ``params``, all of one group; yields its tag.

        Off NCCL, the gather matches only the same gather of other ranks. On NCCL, the ranks compare later what they
        have gathered (W4). ``noted``: the issuing function notes the launch itself.
        """
        activity = self.activity(group, params)
        tag = self.begin(group, activity.ids, repr(activity.ids).encode())
        by: AbstractContextManager[None] = nullcontext()
        if not noted:  # else DeepSpeed's function is not used
            counter = self.count.counter
            own = tagged_all_gather(group, counter, tag) if group.is_tagged else gathering.counted_all_gather(counter)
            by = gathering.gathering_by(own)
        with by, zero3.as_it_is(), phase("gather", params[0]._zerosync_record.name):
            yield tag
        if group.is_nccl and not noted:
            self.note_launch(group.process_group, activity)

    def memory_of(
        self, group: GatherGroup, records: Sequence[Record], gathered: Sequence[Record] = ()
    ) -> list[torch.Tensor]:
        """Return memory of the current stream for the values of ``records``, which a gather of ``group`` fills.

        The gather waits for earlier work of the stream, which may still use that memory (L2).
        """
        if not records:
            return []
        if group.stream is None:
            return memory_of(records, None, gathered)
        rows = memory_of(records, self.streams.caller, gathered)
        self.streams.gathers_wait_for_caller(group.stream)
        return rows

    def begin(self, group: GatherGroup, ids: tuple[int, ...], digested: bytes) -> int:
        """Prepare the gather of these parameters and return its tag. ``digested``: the ids as bytes."""
        self.streams.gathers_wait_for_writes(self.gather_streams)
        if (digest := group.digest) is None:
            return 0
        if not digest.tagged:
            for window in self.windows:
                window.begun.add(group.process_group)
        return digest.add(ids, digested)

    def note_launch(self, communicator: dist.ProcessGroup, activity: GatherActivity) -> None:
        """Note the gather that has just been issued on NCCL, for errors."""
        note_launch(communicator, self._device, activity)

    def activity(self, group: GatherGroup, params: Sequence[Zero3Parameter], reader: str = "") -> GatherActivity:
        """Return the activity of a rank that gathers ``params``; its text is made only for an error."""
        return GatherActivity(self.names, zero3.param_ids(params), group.ranks, reader)


class ParameterGather:
    """A gather of parameters of one process group. A stream that waits for it waits for no other gather (U2).

    The first stream that waits sets the values of the parameters.

    Args:
        activity: what a waiting rank does.
        wait: waits for the message.
        copy_out: called with the stream that waits first, on which it sets the values of the parameters; ``None``: they
            lie in their storages.
        packed: the records of parameters whose values the gather has received in memory of its own.
        keeps: the host cache may copy the values.

    Attributes:
        event: recorded once the values are set; ``None`` before, and on a device without streams.
        users: the streams that compute with the parameters.
    """

    def __init__(
        self, issuing: Issuing, group: GatherGroup, records: Sequence[Record], activity: Activity,
        wait: Callable[[], object], copy_out: Callable[[torch.Stream | None], None] | None, packed: Sequence[Record],
        keeps: bool = True,
    ) -> None:  # fmt: skip
        self._wait, self.is_done = wait, False
        self._error: Exception | None = None
        self._gather_streams, self._host = issuing.streams, issuing.host
        self._stream, self._is_tagged = group.stream, group.is_tagged
        self.event: torch.Event | None = None
        self._records, self._activity = records, activity
        self._copy_out, self._packed, self._keeps = copy_out, packed, keeps
        self._has_copies = issuing.host is not None or issuing.node_shards is not None
        self.users: list[Any] = []
        nbytes, asked = 0, issuing.count.is_for_step
        for record in records:
            record.gather = self
            record.gathers += asked
            if group.digest is not None:
                record.counted = record.nbytes
                nbytes += record.nbytes
        issuing.unsharded.add(nbytes)

    def wait(self) -> None:
        """Make the current stream wait for this gather; on a device without streams, make the host wait.

        Further streams :meth:`join`. Raise ``RankError`` if other ranks did not take part in it, and whenever it is
        waited for again.
        """
        if self.is_done:
            return
        self._arrive()
        if self._stream is not None:
            self.users.append(self._gather_streams.caller)
            self._gather_streams.keep_for_caller(self._memory())

    def _arrive(self) -> None:
        streams = self._gather_streams
        if self._error is not None:
            raise self._error
        with self._activity, zero3.as_it_is():
            try:
                self._wait()
            except Exception as error:
                self._error = error
                raise
            try:
                if self._copy_out is None:
                    has_claims = arrive(self._records)
                else:
                    self._copy_out(streams.caller)
                    has_claims = True
            except BaseException:  # as when out of memory: the next wait tries again
                self._wait = _nothing
                if self._stream is not None:
                    streams.record_landing(self._stream)
                raise
            if self._stream is not None:
                follows = self._packed or self._has_copies  # the gather stream reads or frees later
                self.event = streams.record_landing(self._stream) if follows else streams.record_arrival()
            self.is_done = True
            del self._wait, self._copy_out, self._packed
            if self._host is not None and self._keeps:
                self._keep(self._host)
        if has_claims:
            settle(self._records)

    def copy_out_on_gather_stream(self) -> None:
        """Copy the values out on the gather stream, behind the message, so that the received memory is freed there.

        The copies are in memory of the current stream, whose earlier work may still use it (L2).
        """
        if self.is_done or not self._packed:
            return
        if self._stream is None:  # the host would wait, except where it receives all at once
            if not self._is_tagged:
                self.wait()
            return
        memory_of(self._packed, self._gather_streams.caller)
        self._gather_streams.gathers_wait_for_caller(self._stream)
        with self._gather_streams.on_gather_stream(self._stream):
            self._arrive()

    def _keep(self, host: HostCache) -> None:
        """Let ``host`` copy the values behind the event. Only streams that may write to them wait for the copy."""
        params = [record.param for record in self._records]
        if self._stream is None:
            host.keep(params)
            return
        for param in params:
            self._gather_streams.record_stream_for_gathers(param.data, self._stream)
        with self._gather_streams.on_gather_stream(self._stream):
            host.keep(params)
        if any(record.watched for record in self._records):
            self.event = self._gather_streams.record_unshard(self._stream)
            self._gather_streams.wait_for_unshard(self.event)  # a writer of the values waits for their copy (U2)

    @property
    def is_complete(self) -> bool:
        """Whether the host sees that the gather is complete, so that no further stream has to wait."""
        return self.is_done and (self.event is None or bool(self.event.query()))

    def join(self) -> None:
        """Add the current stream to the users of the parameters, which are unsharded (U2, L2)."""
        if self.event is not None:
            self._gather_streams.share_unshard(self.event, self.users, self._memory)

    def _memory(self) -> list[tuple[torch.Tensor, torch.Stream | None]]:
        """Return a tensor of each storage in which the values are, and the stream that has allocated it."""
        found = {}
        with zero3.as_it_is():
            for record in zero3.gathered(self._records):
                in_storage = record.is_in_storage
                found[record.storage if in_storage else record] = (
                    (record.rows, record.storage.owner) if in_storage else (record.param.data, None)
                )
        return list(found.values())


def tagged_all_gather(group: GatherGroup, counter: SentCounter, tag: int) -> gathering.FlatAllGather:
    """Return a replacement of DeepSpeed's all-gather that matches only gathers with the same ``tag``."""
    return partial(_all_gather, group.nodes, counter, tag)


def _all_gather(
    nodes: Nodes | None,
    counter: SentCounter,
    tag: int,
    source: torch.Tensor,
    target: torch.Tensor,
    process_group: dist.ProcessGroup,
) -> InFlight:
    rows = target.view(dist.get_world_size(process_group), -1)
    own = rows[dist.get_rank(process_group)]
    if own.data_ptr() != source.data_ptr():  # DeepSpeed packs several parameters in place
        own.copy_(source)
    if nodes is not None and len(rows) < nodes.size * nodes.count:
        nodes = None  # DeepSpeed's hpZ gathers within a node itself
    if nodes is None:
        return all_gather(rows, process_group, counter, tag)
    return nodes.all_gather(rows, counter, tag, "")
