"""ZeRO-3: held parameters of 16 bits are gathered as what the last step has changed in them, bit for bit (R7).

A step reshards what it trains. Where changes are gathered, the memory of a bucket of held parameters outlives that,
with the values from before the step, until the next gather updates it in place and gives it back to them. So the window
after the step needs what the window before has needed; the step itself keeps it too.

When a step has written the shards, the ranks of a group *survey* what they keep: an all-reduce of six words per bucket
says how many changes of which size a rank has at most, and whether all have kept the same. All that a gather needs is
known then, before it is issued, on all ranks alike: its size, and that none has to be repeated. So it waits for nothing
but its message, and may arrive whenever a module waits for it.

What arrives has the digest of the values that its rank has, which is compared with that of the values it gives here.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from zerosync_strategy.core.comm.collectives import all_gather, is_native, named_ranks, phase
from zerosync_strategy.core.comm.differences import Plan, decode, digest, encode, is_codable
from zerosync_strategy.core.comm.faster import FasterWay
from zerosync_strategy.core.comm.nodes import Nodes, Topology
from zerosync_strategy.core.comm.streams import HostCopy, Streams
from zerosync_strategy.core.comm.surveys import (
    SMALLEST,
    SURVEY_EVERY,
    WORDS,
    CodedGathers,
    are_alike,
    survey,
    warn_of_others,
    words_of,
    worthwhile_plan,
)
from zerosync_strategy.core.engine import zero3
from zerosync_strategy.core.engine.gathering import Arrival
from zerosync_strategy.core.engine.param_functions import for_training
from zerosync_strategy.core.engine.zero import listed
from zerosync_strategy.core.failures.errors import RankError
from zerosync_strategy.core.params.gathers import UnshardedBytes

_DIGEST, _STEP = 0, 1  # words of 64 bits in the header of a row
_HEADER = 16  # bytes
_OURS = 3  # references to the memory of a bucket: the parameter's former tensor, the flat view of it, and that count's


class _Kept:
    """A bucket of parameters, and their values from before the step.

    Attributes:
        params: in their order.
        before: their memory, flat.
        writes: to their shards when they were surveyed.
        plan: of their gather; ``None``: they were not surveyed.
    """

    def __init__(self, params: Sequence[Any]) -> None:
        self.params = tuple(params)
        self.before = [param.data.view(-1) for param in params]
        self._widths = [zero3.shard_numel(param) for param in params]
        self.width = sum(self._widths)
        self.writes: list[int] = []
        self.plan: Plan | None = None

    def digest(self) -> torch.Tensor:
        """Return a number of 64 bits for all values from before the step."""
        by_param = [digest(flat.view(1, -1)) for flat in self.before]
        return digest(torch.cat(by_param).view(1, -1))[0]

    def own_rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return this rank's shards, and what they were before the step."""
        new, old = self.before[0].new_zeros(2, self.width)
        by_param = zip(self.params, self.before, new.split(self._widths), old.split(self._widths), strict=True)
        for param, flat, of_new, of_old in by_param:
            if (pair := zero3.own_part(param, flat)) is not None:
                shard, before = pair
                of_new[: len(shard)].copy_(shard, non_blocking=True)
                of_old[: len(shard)].copy_(before)
        return new, old

    def rows(self, world_size: int) -> torch.Tensor:
        """Return all values from before the step, a row per rank."""
        rows = self.before[0].new_zeros(world_size, self.width)
        for flat, columns in zip(self.before, rows.split(self._widths, 1), strict=True):
            for place, values in _by_rows(columns, flat):
                place.copy_(values)
        return rows

    def update(self, rows: torch.Tensor, unsharded: UnshardedBytes) -> list[tuple[Any, torch.Tensor]]:
        """Let the memory have the values of ``rows``; return the parameters with it.

        Memory that something else refers to, as what a program has saved before the step, keeps what it has.
        """
        values = []
        for param, flat, columns in zip(self.params, self.before, rows.split(self._widths, 1), strict=True):
            if torch._C._storage_Use_Count(flat.untyped_storage()._cdata) > _OURS:
                unsharded.add(flat.nbytes)
                flat = torch.empty_like(flat)
                unsharded.free_with(flat, flat.nbytes)
            for place, into in _by_rows(columns, flat):
                into.copy_(place)
            values.append((param, flat.view(zero3.full_shape(param))))
        return values


class HeldChanges:
    """Gathers the buckets of held parameters of one process group.

    Args:
        process_group: of several ranks.
        nodes: that its messages go between and within; ``None``: in one level.
        topology: of the ranks.
        automatic: keep the faster of coded and full gathers; else code whatever is worth it.
        streams: of the engine.
        unsharded: counts the memory of parameters.

    Attributes:
        sent_bytes, dense_bytes: what this rank has sent to gather held parameters since :meth:`reset_counts`, and what
            it had sent in full.
    """

    def __init__(
        self, process_group: Any, nodes: Nodes | None, topology: Topology, automatic: bool, streams: Streams,
        unsharded: UnshardedBytes,
    ) -> None:  # fmt: skip
        self._process_group, self._nodes, self._topology = process_group, nodes, topology
        self._streams, self._unsharded = streams, unsharded
        self._rank, self._world_size = dist.get_rank(process_group), dist.get_world_size(process_group)
        self._way = FasterWay(automatic)
        self._began = 0.0
        self._told: tuple[int, int] | None = None  # the longest times of any rank
        self._step = 0
        self._kept: dict[Any, _Kept] = {}  # by parameter
        self._pauses: Counter[tuple[int, ...]] = Counter()  # by ids: for how many steps a bucket is not kept
        self._coded = CodedGathers()
        self._answer: HostCopy | None = None
        self._damage: tuple[torch.Tensor, HostCopy] | None = None  # by rank, whether its values did not arrive
        self.reset_counts()

    def reset_counts(self) -> None:
        self.sent_bytes = self.dense_bytes = 0

    # ---- the step --------------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """A step is about to reshard what it trains. What the step before has kept and nobody has gathered is gone."""
        self.drop_all()
        self._step += 1
        if self._way.measures:
            self._streams.host_waits_for_caller()
        now = time.perf_counter()  # a turn is the window of the gathers that :meth:`keep` has chosen in the step before
        if self._way.end_turn(now - self._began, self._told):
            self._pauses.clear()
        self._began, self._told = now, None

    def keep(self, params: Sequence[Any]) -> None:
        """The step reshards ``params``, a bucket: keep their values, if their next gather may be one of changes.

        On all ranks alike.
        """
        if not self._way.codes or not _are_codable(params) or self._nbytes(params) < SMALLEST:
            return
        ids = _ids(params)
        if self._pauses[ids] > 0:
            self._pauses[ids] -= 1
            return
        for param in params:  # whoever updates the memory comes after the caller's stream
            if (gather := param._zerosync_record.gather) is not None:
                self._streams.caller_waits_for(gather.users)
        self._coded.room = max(self._coded.room, self._nbytes(params))
        self._kept.update(dict.fromkeys(params, _Kept(params)))

    def drop_all(self) -> None:
        """The next gathers are full: shards were read or written otherwise, or a step has raised."""
        self._kept = {}

    def drop(self, params: Iterable[Any]) -> None:
        """``params`` are gathered otherwise."""
        for param in params:
            if (kept := self._kept.get(param)) is not None:
                for each in kept.params:
                    del self._kept[each]

    @torch.no_grad()
    def survey(self) -> None:
        """The shards are those of the step: plan the gathers of what was kept. Collective."""
        for param in list(self._kept):
            if not zero3.is_released(param):  # another engine trains it
                self.drop((param,))
        buckets = list(dict.fromkeys(self._kept.values()))
        if buckets:
            *found, coded, full = self._largest(buckets)
            self._told = coded, full
            for kept in buckets:
                words = found[:WORDS]
                del found[:WORDS]
                if not are_alike(words):
                    names = listed([param._zerosync_record.name for param in kept.params])
                    warn_of_others(int(kept.digest()), names, self._process_group)
                    self.drop(kept.params)
                elif (plan := worthwhile_plan(kept.width, words, _HEADER)) is None:
                    self._pauses[_ids(kept.params)] = SURVEY_EVERY
                    self.drop(kept.params)
                else:
                    kept.plan, kept.writes = plan, _writes(kept.params)

    def _largest(self, buckets: Sequence[_Kept]) -> list[int]:
        """Return the largest words of any rank: of each bucket, and what each has measured."""
        by_bucket = [words_of(*kept.own_rows(), kept.digest()) for kept in buckets]
        words = survey(by_bucket, self._way.own_times(), self._process_group)
        if self._answer is None or self._answer.numel < len(words):
            self._answer = HostCopy(self._streams, len(words))
        self._answer.begin(words)
        return self._answer.read()

    # ---- gathers ---------------------------------------------------------------------------------------------------

    def take(self, params: Sequence[Any]) -> _Kept | None:
        """Return what is kept of ``params``, which are about to be gathered by one message.

        ``None``: they are gathered in full. On all ranks alike.
        """
        kept = self._kept.get(params[0])
        self.drop(params)
        if kept is None or kept.plan is None or _ids(kept.params) != _ids(params) or kept.writes != _writes(params):
            return None
        return kept

    def count_full(self, params: Iterable[Any]) -> None:
        """``params`` are gathered in full; count those that are held."""
        held = [param for param in params if param._zerosync_record.hold and not param._zerosync_record.constant]
        sent = self._topology.sent(self._nbytes(held), self._process_group).nbytes
        self.sent_bytes += sent
        self.dense_bytes += sent

    @for_training
    @torch.no_grad()
    def gather(self, kept: _Kept, tag: int, label: object) -> Arrival:
        """Begin to gather the parameters of ``kept`` on the current stream, where what is returned is called, too.

        Args:
            tag: off NCCL, only calls with the same tag meet.
            label: names it in errors.
        """
        plan = kept.plan
        assert plan is not None
        size = _HEADER + plan.nbytes
        self._coded.make_room(size * self._world_size)
        new, old = kept.own_rows()
        coded = torch.empty(self._world_size, size, dtype=torch.uint8, device=new.device)
        own = coded[self._rank]
        with phase("code_changes", kept.params[0]._zerosync_record.name):
            encode(new, old, plan, own[_HEADER:])
        header = own[:_HEADER].view(torch.int64)
        header[_DIGEST].copy_(digest(new.view(1, -1))[0])
        header[_STEP].fill_(self._step)
        self.dense_bytes += self._topology.sent(self._nbytes(kept.params), self._process_group).nbytes
        self.sent_bytes += self._topology.sent(coded.nbytes, self._process_group).nbytes
        if self._nodes is None or is_native(self._process_group, coded.device):
            gather = all_gather(coded, self._process_group, tag, label)
        else:
            gather = self._nodes.all_gather(coded, tag, "")
        gather.then(lambda _: self._arrived(kept, plan, coded))
        self._coded.add(coded.nbytes, gather)
        arrival: Arrival = gather.wait
        return arrival

    @for_training
    @torch.no_grad()
    def _arrived(self, kept: _Kept, plan: Plan, coded: torch.Tensor) -> list[tuple[Any, torch.Tensor]]:
        rows = kept.rows(self._world_size)
        with phase("decode_changes", kept.params[0]._zerosync_record.name):
            decode(coded[:, _HEADER:], rows, plan)
        headers = coded[:, :_HEADER].view(torch.int64)
        damaged = (headers[:, _DIGEST] != digest(rows)) | (headers[:, _STEP] != self._step)
        if self._streams.concurrent:  # the host does not wait for the answer
            if self._damage is None:
                self._damage = torch.zeros_like(damaged), HostCopy(self._streams, self._world_size)
            found, answer = self._damage
            answer.begin(found.logical_or_(damaged))
        else:
            self._refuse(damaged.tolist())
        return kept.update(rows, self._unsharded)

    def check(self) -> None:
        """A step begins.

        Raises:
            RankError: on a device with streams, what was gathered since the last was damaged. Elsewhere, gathers raise.
        """
        if self._damage is not None:
            self._refuse(self._damage[1].read())

    # ---- bytes and errors ------------------------------------------------------------------------------------------

    def _nbytes(self, params: Iterable[Any]) -> int:
        nbytes = sum(zero3.shard_numel(param) * zero3.gather_dtype(param).itemsize for param in params)
        return nbytes * self._world_size

    def _refuse(self, damaged: Sequence[int]) -> None:
        if any(damaged):
            raise RankError(
                f"gather_changes: the values of held parameters that rank {self._named(damaged)} has sent are others"
                " here, by their digest. What was computed with them since the last step is wrong: go back to the last"
                " checkpoint. If it happens again, check the network, or leave out 'gather_changes'."
            )

    def _named(self, is_meant: Sequence[Any]) -> str:
        return named_ranks(self._process_group, [rank for rank, meant in enumerate(is_meant) if meant])


def _by_rows(columns: torch.Tensor, flat: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the parts of ``columns``, a row per rank, with those of ``flat`` that belong there; not the padding."""
    width = columns.shape[1]
    whole, rest = divmod(len(flat), width)
    if whole:
        yield columns[:whole], flat[: whole * width].view(whole, width)
    if rest:
        yield columns[whole, :rest], flat[whole * width :]


def _are_codable(params: Sequence[Any]) -> bool:
    """Return whether ``params``, gathered, can be gathered by their changes, by one message."""
    return len({param.dtype for param in params}) == 1 and all(
        is_codable(param)
        and param.is_contiguous()
        and param.numel() == zero3.full_numel(param) > 0
        and zero3.gather_dtype(param) is zero3.shard_dtype(param) is param.dtype
        for param in params
    )


def _ids(params: Iterable[Any]) -> tuple[int, ...]:
    return tuple(map(zero3.param_id, params))


def _writes(params: Iterable[Any]) -> list[int]:
    return [param._zerosync_record.writes for param in params]
