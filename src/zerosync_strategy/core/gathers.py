"""ZeRO-3's gathers: one order on all ranks, a stream per process group, and waits for single gathers.

DeepSpeed collects the parameters of a module, and those it prefetches, in Python sets, and gathers them by process
group in the order in which the set yields them: another one on each rank, which on NCCL can be a deadlock. Here, what
is wanted at once is gathered in the order of (ranks of the process group, ``ds_id``), each group by itself (**U1**).

Why that is one order for all: ranks run the same modules in the same order, so they want parameters at the same turns
(each its own, where groups differ). Number each gather by (turn, ranks of its group, ``ds_id``). These triples are
totally ordered, every rank issues its gathers in rising order, and a gather has the same number on all its ranks. So of
all gathers that are not complete, the lowest can always complete: all its ranks have come to it, or are on their way
through gathers that are lower still. A cycle of ranks that wait for each other would need a gather lower than itself.
What is read where no hook gathers it (**E1**) is gathered then and there, alone: a turn of its own between those of
two modules, at the same place of the program on all ranks.

Handles of gathers in flight are DeepSpeed's, wrapped: whoever waits for one is ordered after that gather alone
(**U2**), and its error says what each rank was gathering.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist

from zerosync_strategy.core import contract
from zerosync_strategy.core.collectives import Pending, all_gather
from zerosync_strategy.core.gather_log import GatherLog
from zerosync_strategy.core.interpose import interpose, restore
from zerosync_strategy.core.ordering import Streams
from zerosync_strategy.core.rollcall import roll_call
from zerosync_strategy.core.sharding import ranks_of
from zerosync_strategy.core.unsharded import UnshardedBytes

MAX_STREAMS = 8
"""Gather streams of one engine. A rank in more groups than that lets some share a stream (U4)."""


class Gathers:
    """Orders the gathers of one attached ZeRO-3 engine, and what waits for them.

    Args:
        engine: the DeepSpeed engine.
        streams: of the engine.
        sharing: ``"per_group"``: each process group gathers on its own stream; ``"shared"``: all on one.

    Attributes:
        names: of the parameters, by ``ds_id``.
        unsharded: bytes gathered here, by hooks and for readers; but for persistent parameters, which are always there.
    """

    def __init__(self, engine: Any, streams: Streams, sharing: str) -> None:
        self.coordinator = contract.stage_3_coordinator(engine.optimizer)
        self.streams = streams
        self.unsharded = UnshardedBytes()
        self.names = {param.ds_id: name for name, param in engine.module.named_parameters()}
        groups: dict[int, Any] = {}
        for param in sorted(engine.module.parameters(), key=lambda param: param.ds_id):
            groups.setdefault(id(param.ds_process_group), param.ds_process_group)
        # Two groups of the same ranks stay in the order of their parameters.
        ordered = sorted(groups.values(), key=lambda group: _place(ranks_of(group)))
        by_all_reduce = contract.stage_3_gathers_by_all_reduce(engine)
        self._logs = {
            id(g): GatherLog(g, not by_all_reduce and dist.get_backend(g) != "nccl", engine.device, streams)
            for g in ordered
            if dist.get_world_size(g) > 1
        }
        self._turn = {id(group): turn for turn, group in enumerate(ordered)}
        self._count = 1 if sharing == "shared" else min(len(ordered), MAX_STREAMS)
        self.renew()
        self.coordinator._zerosync_gathers = self
        interpose(self.coordinator, _CoordinatorMethods)

    @classmethod
    def of(cls, engine: Any, streams: Streams, sharing: str) -> Gathers:
        """Those of ``engine``; engines over one module have one in common, with the option of the first."""
        coordinator = contract.stage_3_coordinator(engine.optimizer)
        return getattr(coordinator, "_zerosync_gathers", None) or cls(engine, streams, sharing)

    def renew(self) -> None:
        """The device has gained streams or lost them: make the gather streams anew."""
        self._gather_streams = self.streams.for_gathers(self._count, contract.stage_3_gather_stream(self.coordinator))

    def detach(self) -> None:
        """Gather as DeepSpeed does; gathers in flight stay good."""
        if isinstance(self.coordinator, _CoordinatorMethods):
            restore(self.coordinator)
            del self.coordinator._zerosync_gathers

    def follow_step(self) -> None:
        """The caller's stream has the step; gathers read what it writes (S1)."""
        for stream in self._gather_streams:
            self.streams.gathers_follow(stream)

    def close(self) -> None:
        """Before a step: check that the ranks of each group have gathered the same since the last (W4). Collective."""
        for log in self._logs.values():
            log.close(self.name)

    def name(self, ds_id: int) -> str:
        """The parameter's name, for errors."""
        return repr(self.names.get(ds_id, f"ds_id {ds_id}"))

    def in_order(self, params: Iterable[Any]) -> Iterator[list[Any]]:
        """``params`` by process group, each group's in the order of their ids, the groups in theirs (U1)."""
        ordered = sorted(params, key=lambda param: (self._turn[id(param.ds_process_group)], param.ds_id))
        for _, of_group in groupby(ordered, key=lambda param: id(param.ds_process_group)):
            yield list(of_group)

    def stream_of(self, process_group: Any) -> Any:
        """Where ``process_group`` gathers (U4); ``None`` on a device without streams."""
        if not self._gather_streams:
            return None
        return self._gather_streams[self._turn[id(process_group)] % len(self._gather_streams)]

    @contextmanager
    def gathering(self, params: list[Any]) -> Iterator[None]:
        """Around the issue of the gather of ``params``, all of one group.

        Off NCCL, only the same gather of other ranks will meet it; else what has met is compared later (W4).
        """
        process_group = params[0].ds_process_group
        gathering_by: AbstractContextManager[None] = nullcontext()
        if (log := self._logs.get(id(process_group))) is not None:
            tag = log.note(tuple(param.ds_id for param in params))
            if log.tagged:
                gathering_by = contract.stage_3_gathering_by(partial(_all_gather, tag))
        with contract.stage_3_gathering_on(self.coordinator, self.stream_of(process_group)), gathering_by:
            yield

    def wait_for(self, param: Any) -> None:
        """If ``param`` is in flight, it arrives; DeepSpeed still counts it among what it has to release (U2)."""
        if (handle := contract.stage_3_in_flight(self.coordinator).get(param)) is not None:
            handle.wait()

    def unshard(self, param: Any) -> torch.Tensor:
        """The values of ``param`` in memory of their own, for who reads it where no hook gathers it. Collective.

        Raises:
            RankError: other ranks did not take part.
        """
        self.wait_for(param)
        if contract.is_gathered(param):
            full = param.data.clone()
        else:
            with self.gathering([param]), roll_call().doing(self.what([param])):
                full = contract.stage_3_gather(param)
        size = contract.stage_3_bytes(param)
        self.unsharded.add(size)
        self.unsharded.are_in(full, size)
        return full

    def what(self, params: list[Any]) -> str:
        """The gather of ``params``, for errors."""
        names = ", ".join(self.name(param.ds_id) for param in params[:3])
        more = f" and {len(params) - 3} more" if len(params) > 3 else ""
        return f"the gather of {names}{more} over the ranks {list(ranks_of(params[0].ds_process_group))}"

    def wrap(self, params: list[Any]) -> None:
        """Let waiting for the gathers of ``params``, just issued, be our waiting."""
        in_flight = contract.stage_3_in_flight(self.coordinator)
        wrapped: dict[int, _Gather] = {}
        for param in params:
            handle = in_flight.get(param)
            if handle is None or isinstance(handle, _Gather):
                continue
            if id(handle) not in wrapped:
                wrapped[id(handle)] = _Gather(handle, param.ds_process_group, self)
            wrapped[id(handle)].params.append(param)
            in_flight[param] = wrapped[id(handle)]
            if id(param.ds_process_group) in self._logs and not param.ds_persist:  # else there is nothing to gather
                self.unsharded.add(contract.stage_3_bytes(param))
                wrapped[id(handle)].counted.append(param)


def _place(ranks: tuple[int, ...]) -> tuple[Any, ...]:
    """Where a group comes in the order: larger ones first, and all rows of a mesh before all its columns, or after."""
    return -len(ranks), [rank - ranks[0] for rank in ranks], ranks


def _all_gather(tag: int, source: torch.Tensor, target: torch.Tensor, process_group: Any) -> Pending:
    """What DeepSpeed's all-gather does, but it meets only those with the same ``tag``."""
    parts = target.chunk(dist.get_world_size(process_group))
    own = parts[dist.get_rank(process_group)]
    if own.data_ptr() != source.data_ptr():  # DeepSpeed packs several parameters where they belong
        own.copy_(source)
    return all_gather(parts, process_group, tag)


class _Gather:
    """The handle of one gather: DeepSpeed's, on the stream that issued it."""

    def __init__(self, handle: Any, process_group: Any, gathers: Gathers) -> None:
        self._handle = handle
        self._process_group = process_group
        self._gathers = gathers
        self._waited_for = False
        self._unsharded: Any = None  # on a device with streams, the event after which the parameters are there
        self.params: list[Any] = []
        self.counted: list[Any] = []  # those of them whose bytes go with their memory, which may come with the gather

    def wait(self, *args: Any, **kwargs: Any) -> None:
        """Order the current stream after this gather; on a device without streams, wait for it.

        Raises:
            RankError: other ranks did not take part in it.
        """
        streams = self._gathers.streams
        if not self._waited_for:
            stream = self._gathers.stream_of(self._process_group)
            with roll_call().doing(self._gathers.what(self.params)):
                if stream is None:
                    self._handle.wait(*args, **kwargs)
                else:
                    with streams.unsharding(stream):
                        self._handle.wait(*args, **kwargs)
                    self._unsharded = streams.unsharded(stream)
            self._waited_for = True
            for param in self.counted:
                self._gathers.unsharded.are_in(param.data, contract.stage_3_bytes(param))
        if self._unsharded is not None:
            streams.uses(self._unsharded)


class _CoordinatorMethods:
    """What DeepSpeed's parameter coordinator does differently."""

    _zerosync_gathers: Gathers

    # One leading underscore: a method that is private to DeepSpeed's class, under the name that Python gives it.
    def _PartitionedParameterCoordinator__all_gather_params(self, params: Iterable[Any], forward: bool) -> None:
        gathers = self._zerosync_gathers
        for of_group in gathers.in_order(params):
            with gathers.gathering(of_group):
                super()._PartitionedParameterCoordinator__all_gather_params(of_group, forward)  # type: ignore[misc]
            gathers.wrap(of_group)
