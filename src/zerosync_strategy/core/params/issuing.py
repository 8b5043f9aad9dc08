"""ZeRO-3: a gather of parameters in flight, and what the issue of all has in common, from whatever place they come."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from zerosync_strategy.core.comm.collectives import InFlight, all_gather, note_launch, phase
from zerosync_strategy.core.comm.nodes import Nodes
from zerosync_strategy.core.comm.streams import Streams
from zerosync_strategy.core.engine import gathering, zero3
from zerosync_strategy.core.engine.parameter import settle
from zerosync_strategy.core.failures.aborted import BegunCollectives
from zerosync_strategy.core.failures.rank_status import rank_status
from zerosync_strategy.core.params import gathers
from zerosync_strategy.core.params.gather_groups import GatherGroup
from zerosync_strategy.core.params.gathers import GatherActivity, GatherCount, UnshardedBytes
from zerosync_strategy.core.params.host_cache import HostCache

_NOWHERE = nullcontext()


class Issuing:
    """Around the gathers of the module of ``engine``.

    Attributes:
        host: keeps copies of what has arrived; ``None``: nothing does.
        names: of the parameters, by their ids.
        status: of this rank, for errors.
        gather_streams: all that gather; none on a device without streams.
        begun: what the engines have sent that gather here, to compare where one has aborted it.
        count: of what modules and readers gather for steps.
        unsharded: counts what is gathered here, by hooks and for readers, but no persistent parameters.
    """

    def __init__(self, engine: Any, streams: Streams, gather_streams: list[Any], host: HostCache | None) -> None:
        self.names = {zero3.param_id(param): name for name, param in engine.module.named_parameters()}
        self.streams, self.gather_streams, self.host, self._device = streams, gather_streams, host, engine.device
        self.status = rank_status()
        self.begun: list[BegunCollectives] = []
        self.count, self.unsharded = GatherCount(), UnshardedBytes()

    def on(self, group: GatherGroup, reads: bool = False) -> AbstractContextManager[None]:
        """Where a gather of ``group`` is issued; for who ``reads``, on the current stream."""
        return _NOWHERE if reads or group.stream is None else self.streams.on_gather_stream(group.stream)

    @contextmanager
    def gathering(self, group: GatherGroup, params: list[Any], noted: bool = False) -> Iterator[int]:
        """Around the issue of the gather of ``params``, all of one group; has its tag.

        Off NCCL, only the same gather of other ranks will meet it; else the ranks compare later what has met (W4).
        ``noted``: who issues it does so by a function that notes its launch.
        """
        activity = self.activity(group, params)
        tag = self.begin(group, activity.ids, repr(activity.ids).encode())
        by = gathering.gathering_by(tagged_all_gather(group, tag)) if group.is_tagged else nullcontext()
        with by, zero3.as_it_is(), phase("gather", params[0]._zerosync_record.name):
            yield tag
        self.issued(group, activity, noted)

    def begin(self, group: GatherGroup, ids: tuple[int, ...], digested: bytes) -> int:
        """The gather of these parameters is about to be issued; return its tag. ``digested``: the ids as bytes."""
        self.streams.gathers_wait_for_writes(self.gather_streams)
        if (digest := group.digest) is None:
            return 0
        if not digest.tagged:
            for begun in self.begun:
                begun.add(group.process_group)
        return digest.add(ids, digested)

    def issued(self, group: GatherGroup, activity: GatherActivity, noted: bool = False) -> None:
        """It is."""
        self.count.issued()
        if group.is_nccl and not noted:
            note_launch(group.process_group, self._device, activity)

    def activity(self, group: GatherGroup, params: Sequence[Any], reader: str = "") -> GatherActivity:
        """Return what a rank does that gathers ``params``; its text is made when something fails."""
        return GatherActivity(self.names, zero3.param_ids(params), group.ranks, reader)

    def name(self, param_id: int) -> str:
        return gathers.name_of(self.names, param_id)


class ParameterGather(InFlight):
    """A gather of parameters of one process group. Who waits for it is ordered after it alone (U2).

    The first stream that waits gives the parameters their values, in memory of its own.

    Args:
        activity: what a rank does that waits.
        wait: waits for the message, on the stream that gathers.
        land: gives the parameters their values, on the stream that waits first.
        keeps: the host may keep copies of them, once they are there.

    Attributes:
        users: the streams that compute with the parameters.
    """

    def __init__(
        self, issuing: Issuing, group: GatherGroup, params: Sequence[Any], activity: GatherActivity,
        wait: Callable[[], object], land: Callable[[], None], keeps: bool = True,
    ) -> None:  # fmt: skip
        super().__init__((), wait)
        self._gather_streams, self._status, self._host = issuing.streams, issuing.status, issuing.host
        self.wait_on(self._gather_streams, group.stream)
        self._params, self._activity, self._land, self._keeps = params, activity, land, keeps
        self.users: list[Any] = []
        nbytes = 0
        for param in params:
            record = param._zerosync_record
            record.gather = self
            if group.digest is not None:
                record.counted = record.nbytes
                nbytes += record.nbytes
        issuing.unsharded.add(nbytes)

    def wait(self, *_: Any, **__: Any) -> None:
        """Order the current stream after this gather; on a device without streams, wait for it.

        A ``RankError``: other ranks did not take part in it.
        """
        if self.is_done:
            if self.event is not None:
                super().wait()
            return
        with self._status.activity(self._activity), zero3.as_it_is():
            super().wait()
            self._land()
            if self._stream is not None:
                self.users.append(self._gather_streams.caller)
                self.event = self._gather_streams.record_landing(self._stream)
            del self._land
            if self._host is not None and self._keeps:
                self._keep(self._host)
        settle([param._zerosync_record for param in self._params])

    def _wait(self) -> None:
        self._finish()  # in an activity already

    def _keep(self, host: HostCache) -> None:
        """Let ``host`` copy the values behind the event: none waits for that but who may write what it reads."""
        if self._stream is None:
            host.keep(self._params)
            return
        for param in self._params:
            self._gather_streams.record_stream_for_gathers(param.data, self._stream)
        with self._gather_streams.on_gather_stream(self._stream):
            host.keep(self._params)
        if any(param._zerosync_record.watched for param in self._params):
            self.event = self._gather_streams.record_unshard(self._stream)
            self._gather_streams.wait_for_unshard(self.event)  # whoever writes to the values waits for their copy (U2)

    def join(self) -> None:
        """The current stream is one of those that use the parameters, which are there (U2, L2)."""
        if self.event is not None:
            self._gather_streams.share_unshard(self.event, self.users, self._memory)

    def _memory(self) -> list[torch.Tensor]:
        with zero3.as_it_is():
            return [param.data for param in self._params if zero3.is_gathered(param)]


def tagged_all_gather(group: GatherGroup, tag: int) -> gathering.FlatAllGather:
    """Return what DeepSpeed's all-gather does, but that it meets only those with the same ``tag``."""
    return partial(_all_gather, group.nodes, tag)


def _all_gather(
    nodes: Nodes | None, tag: int, source: torch.Tensor, target: torch.Tensor, process_group: Any
) -> InFlight:
    rows = target.view(dist.get_world_size(process_group), -1)
    own = rows[dist.get_rank(process_group)]
    if own.data_ptr() != source.data_ptr():  # DeepSpeed packs several parameters where they belong
        own.copy_(source)
    if nodes is not None and len(rows) < nodes.size * nodes.count:
        nodes = None  # DeepSpeed's hpZ gathers within a node itself
    return all_gather(rows, process_group, tag) if nodes is None else nodes.all_gather(rows, tag, "")
