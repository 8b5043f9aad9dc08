"""ZeRO-3: what the issue of every gather of one engine has in common, from whatever place it comes."""

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
from zerosync_strategy.core.failures.aborted import BegunCollectives
from zerosync_strategy.core.failures.rank_status import rank_status
from zerosync_strategy.core.params import gathers
from zerosync_strategy.core.params.gather_groups import GatherGroup
from zerosync_strategy.core.params.gathers import GatherActivity, GatherCount, ParameterGather, UnshardedBytes
from zerosync_strategy.core.params.host_cache import HostCache

_NOWHERE = nullcontext()


class Issuing:
    """Around the gathers of the module of ``engine``; ``host`` keeps copies of what has arrived.

    Attributes:
        names: of the parameters, by their ids.
        status: of this rank, for errors.
        gather_streams: all that gather; none on a device without streams.
        begun: what the engines have sent that gather here, to compare where one has aborted it.
        count: of what modules and readers gather for steps.
        unsharded: counts what is gathered here, by hooks and for readers, but no persistent parameters.
    """

    def __init__(self, engine: Any, streams: Streams, gather_streams: list[Any], host: HostCache | None) -> None:
        self.names = {zero3.param_id(param): name for name, param in engine.module.named_parameters()}
        self._streams, self.gather_streams, self._device = streams, gather_streams, engine.device
        self.status = rank_status()
        self.begun: list[BegunCollectives] = []
        self.count, self.unsharded = GatherCount(), UnshardedBytes()
        self._host = host

    def on(self, group: GatherGroup) -> AbstractContextManager[None]:
        """Where a gather of ``group`` is issued."""
        return _NOWHERE if group.stream is None else self._streams.on_gather_stream(group.stream)

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
        self._streams.gathers_wait_for_writes(self.gather_streams)
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

    def note(
        self, group: GatherGroup, wait: Callable[[], object], land: Callable[[], None], params: Sequence[Any],
        activity: GatherActivity, keeps: bool = True,
    ) -> ParameterGather:  # fmt: skip
        """A gather is under way; see :class:`ParameterGather`. Not ``keeps``: no copy on the host is made of it."""
        unsharded = None if group.digest is None else self.unsharded
        host = self._host if keeps else None
        return ParameterGather(wait, land, params, self._streams, group.stream, activity, self.status, unsharded, host)

    def activity(self, group: GatherGroup, params: Sequence[Any], reader: str = "") -> GatherActivity:
        """Return what a rank does that gathers ``params``; its text is made when something fails."""
        return GatherActivity(self.names, zero3.param_ids(params), group.ranks, reader)

    def name(self, param_id: int) -> str:
        return gathers.name_of(self.names, param_id)


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
