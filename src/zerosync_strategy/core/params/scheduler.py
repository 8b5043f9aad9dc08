"""ZeRO-3's gathers: one order on all ranks, a stream per process group, and waits for single gathers.

Parameters that are needed together are gathered in the order of (ranks of the process group, id), by one request for
each group (U1; ``docs/rules.md`` has the proof). A read where no hook gathers (E1) is a request of its own.

A stream that waits for a gather waits for no other (U2). An error of the wait says what each rank was gathering.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, groupby
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist

from zerosync_strategy.core.comm.nodes import MessageSizes
from zerosync_strategy.core.comm.streams import Streams
from zerosync_strategy.core.engine import gathering, zero3
from zerosync_strategy.core.engine.parameter import Record
from zerosync_strategy.core.engine.torch_internals import for_training
from zerosync_strategy.core.engine.types import DeepSpeedEngine, Zero3Parameter
from zerosync_strategy.core.engine.zero import in_chunks
from zerosync_strategy.core.failures.rank_state import Departure
from zerosync_strategy.core.params.copies import Copies, HostCache, NodeShards
from zerosync_strategy.core.params.issuing import EngineWindow, Issuing, ParameterGather, arrived
from zerosync_strategy.core.params.shard_groups import GatherGroup
from zerosync_strategy.core.params.sources import AllShards, GatherRequest, GatherSource, HostCopies, ShardsOfNode
from zerosync_strategy.core.params.unit_order import UnitOrder
from zerosync_strategy.core.params.units import Unit

REMEMBERED = 10_000
"""The most sets of parameters whose requests are cached."""


class GatherScheduler:
    """Orders the gathers of one attached ZeRO-3 engine, and the waits for them.

    Args:
        windows: of the engines of the module; engines come and go.
        sizes: of messages that gather ahead.
        groups: by process group, in the order of gathers.
        host, node_shards: see :class:`Issuing`.

    Attributes:
        records: of the parameters of the engine's module.
        issuing: what all gathers share.
        prefetched_numel: the most elements that are gathered ahead.
        copies: the copies of parameters on the host and in node shards.
        before_read: called before a read of parameters that no hook has gathered.
        order: of the calls of units in forwards.
    """

    def __init__(
        self, engine: DeepSpeedEngine, windows: Sequence[EngineWindow], streams: Streams, sizes: MessageSizes,
        groups: Mapping[dist.ProcessGroup, GatherGroup], host: HostCache | None, node_shards: NodeShards | None,
    ) -> None:  # fmt: skip
        self._sizes, self.streams = sizes, streams
        self.prefetched_numel = gathering.config_of(engine).prefetch_bucket_size
        self.groups = groups
        self._digests = [group.digest for group in self.groups.values() if group.digest is not None]
        self._gather_streams = [each for each in dict.fromkeys(of.stream for of in groups.values()) if each is not None]
        self.issuing = issuing = Issuing(engine, windows, streams, self._gather_streams, host, node_shards)
        self.records = [
            Record(param, repr(name), self, self.groups[zero3.process_group(param)])
            for name, param in engine.module.named_parameters()
        ]
        self._requests: dict[tuple[int, ...], list[GatherRequest]] = {}
        self._context_requests: dict[tuple[int, ...], list[GatherRequest]] = {}  # of contexts, and of the end of a step
        has_empty = any(zero3.full_numel(record.param) == 0 for record in self.records)
        self._released = gathering.released_after_empty if has_empty else zero3.released
        streams.record_write()  # when they were built
        self.order = UnitOrder()
        self.before_read: Callable[[Iterable[Zero3Parameter]], None] | None = None
        self._shards = AllShards(issuing, engine)
        self.is_plain = self._shards.is_plain
        self.copies: list[Copies[Any]] = [copies for copies in (host, node_shards) if copies is not None]
        self._nearer: list[GatherSource] = [] if host is None else [HostCopies(issuing)]
        self._nearer += [] if node_shards is None else [ShardsOfNode(issuing)]

    def detach(self) -> None:
        self.streams.caller_waits_for_writes(self._gather_streams)
        self.streams.host_waits_for_caller()  # DeepSpeed's gathers, which come next, wait for no write (S1)
        for record in self.records:
            del record.param._zerosync_record
        for group in self.groups.values():
            group.close()

    # ---- the window ----------------------------------------------------------------------------------------------

    def before_step(self) -> None:
        """Check that the ranks of each group have gathered the same since the last step (W4). Collective."""
        for digest in self._digests:
            digest.compare_window(self.issuing.names, self.issuing.count.counter)

    def before_checkpoint(self) -> None:
        """Check the gathers before the last step, whose result the checkpoint saves (W4)."""
        for digest in self._digests:
            digest.check(self.issuing.names)

    def backward_comes(self, unit: Unit, grad: object = None) -> None:
        """Report that a backward reaches a call of ``unit``, before it gathers. A hook on the outputs of held units."""
        behind = self.order.comes_to(unit)
        for window in self.issuing.windows:
            window.reaches_unit(behind)

    def values_in_shards(self, param: Zero3Parameter) -> None:
        """Record that the caller's stream has written a gathered ``param`` to its shards, with changes or without.

        Copies of it are then renewed, because ranks do not tell each other that they are invalid.
        """
        self.streams.record_write()
        for copies in self.copies:
            if copies.get(param) is not None:
                self.streams.gathers_wait_for_writes(self._gather_streams)
                group = param._zerosync_record.group
                with self.issuing.on(group):
                    copies.renew(param)  # a reader waits for this stream
                self.streams.record_stream_for_gathers(param.data, group.stream)

    # ---- issuing -------------------------------------------------------------------------------------------------

    def issue(self, params: Iterable[Zero3Parameter]) -> list[ParameterGather]:
        """All-gather the sharded parameters among ``params``, in the order of U1. The first wait sets their values.

        Call it in ``zero3.as_it_is()``, and outside of the program's dispatch modes.
        """
        issued: list[ParameterGather] = []
        released = self._released(params)
        for request in self._requests_for(released) if released else ():
            if not self._nearer:
                self._shards.issue(request, issued)
                continue
            for source in self._nearer:
                source.issue(request, issued)
                if not (left := zero3.released(request.params)):
                    break
                request = self._requests_for(left)[0]
            else:
                self._shards.issue(request, issued)
        return issued

    def _requests_for(self, params: Sequence[Zero3Parameter]) -> list[GatherRequest]:
        """Return the requests for ``params``, in the order of gathers. Cached, because units are gathered often."""
        ids = zero3.param_ids(params)
        if ids in self._requests:
            return self._requests[ids]
        if len(self._requests) == REMEMBERED:
            self._requests.clear()
        found = self._requests[ids] = [self._shards.request(*of_group) for of_group in self.in_order(params)]
        return found

    def in_order(self, params: Iterable[Zero3Parameter]) -> Iterator[tuple[GatherGroup, list[Zero3Parameter]]]:
        """Yield ``params`` by process group, in the order of groups, and within a group in the order of ids (U1)."""
        records = sorted({param._zerosync_record for param in params}, key=attrgetter("order"))
        for group, members in groupby(records, attrgetter("group")):
            yield group, [record.param for record in members]

    def chunks(
        self, params: Iterable[Zero3Parameter], unit_of: Mapping[Zero3Parameter, object] | None = None
    ) -> Iterator[tuple[int, list[list[Zero3Parameter]]]]:
        """Yield the index of each process group in the order of gathers, and ``params`` in chunks for one gather each.

        With ``unit_of``, the parameters of a unit are in one chunk, unless messages are smaller.
        """
        for group, of_group in self.in_order(params):
            prefetched = self.prefetched_numel * of_group[0].element_size()
            limit = min(max(prefetched, self._sizes.least), self._sizes.nbytes)
            of_units = [list(of_unit) for _, of_unit in groupby(of_group, unit_of.__getitem__ if unit_of else id)]
            pieces = [each for piece in of_units for each in in_chunks(piece, self._sizes.nbytes, zero3.full_bytes)]
            chunks = in_chunks(pieces, limit, lambda piece: sum(map(zero3.full_bytes, piece)))
            yield group.index, [list(chain.from_iterable(chunk)) for chunk in chunks]

    # ---- readers -------------------------------------------------------------------------------------------------

    def arrive(self, *params: Zero3Parameter) -> None:
        """Make the current stream wait for ``params`` in flight, after issuing those that are to be held (U2)."""
        if self.before_read is not None:
            self.before_read(params)
        records = [param._zerosync_record for param in params]
        arrived(records)
        self.join(records)

    def join(self, records: Iterable[Record]) -> None:
        """Add the current stream to the users of the gathered ``records`` (U2, L2)."""
        if self._gather_streams:
            for gather in dict.fromkeys([record.gather for record in zero3.gathered(records)]):
                if gather is not None:
                    gather.join()

    def gather_and_wait(self, params: Iterable[Zero3Parameter]) -> None:
        """Gather ``params`` for a ``GatheredParameters`` context, or at the end of a step. Collective.

        DeepSpeed would treat parameters in flight as gathered, read them too early, and fail when it reshards them.
        """
        self.streams.caller_waits_for_writes(self._gather_streams)
        own = [param for param in params if param._zerosync_record.plain or not zero3.is_quantized(param)]
        self.arrive(*own)  # the context reshards them
        released = self._released(own)
        ids, issuing = zero3.param_ids(released), self.issuing
        if ids not in self._context_requests:  # a step asks for the same ones each time
            if len(self._context_requests) == REMEMBERED:
                self._context_requests.clear()
            chunks = [chunk for _, of_group in self.chunks(released) for chunk in of_group]
            self._context_requests[ids] = [self._requests_for(chunk)[0] for chunk in chunks]
        for request in self._context_requests[ids]:
            with issuing.count.of_context(), issuing.status.activity(request.activity):
                self._shards.gather_for_context(request)

    def shard(self, param: Zero3Parameter) -> torch.Tensor | None:
        """Return this rank's shard of ``param``, with its present values; ``None`` if it has none."""
        if not self.is_plain(param) or zero3.full_numel(param) == 0:
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

    def unshard(self, param: Zero3Parameter) -> torch.Tensor:
        """Return the values of ``param`` in memory of their own, for a reader that no hook serves. Collective."""
        self.arrive(param)
        if zero3.is_released(param):
            param._zerosync_record.gathers += self.issuing.count.is_for_step
        (full,) = self.values([param])
        return full

    @for_training
    def values(self, params: list[Zero3Parameter], reader: str = "") -> list[torch.Tensor]:
        """Return the values of ``params``, of one process group, in memory of the caller's own. Collective.

        The parameters keep their state. ``reader`` names the reader in errors.
        """
        with zero3.as_it_is():
            for param in params:
                self.order.reads(param)
            records = [param._zerosync_record for param in params]
            arrived(records)
            self.join(records)
            released = self._released(params)
            unsharded = self.issuing.unsharded
            unsharded.add(sum(map(zero3.full_bytes, params)))
            gathered = self._values_of_released(released, reader) if released else {}
            values = [gathered[param] if param in gathered else param.data.clone() for param in params]
            for param, full in zip(params, values, strict=True):
                unsharded.free_with(full, zero3.full_bytes(param))
            return values

    def _values_of_released(self, params: list[Zero3Parameter], reader: str) -> dict[Zero3Parameter, torch.Tensor]:
        self.streams.caller_waits_for_writes(self._gather_streams)
        group = params[0]._zerosync_record.group
        values: dict[Zero3Parameter, torch.Tensor] = {}
        with self.issuing.status.activity(self.issuing.activity(group, params, reader)):
            for source in (*self._nearer, self._shards):
                if left := [param for param in params if param not in values]:
                    values.update(source.values(self._shards.request(group, left, zero3.shard_dtype, reader)))
        return values

    # ---- words ---------------------------------------------------------------------------------------------------

    def departure(self) -> Departure | None:
        """Return how the gathers of this window differ from the last window; ``None`` if they do not."""
        return next(filter(None, (digest.departure(self.issuing.names) for digest in self._digests)), None)
