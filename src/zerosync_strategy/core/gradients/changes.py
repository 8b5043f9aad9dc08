"""The gather of updated parameters of 16 bits as what has changed in them, bit for bit (R7).

On stages 1 and 2 every rank has the parameters as they were before the step, so a rank need only send how its own have
changed (``comm/differences.py``). All rows of a gather have one size, which all ranks must know. So when a step has
written the shards, ranks *survey* the buckets: one all-reduce of six words for each says how many changes of which size
a rank has at most, and whether all start from the same parameters, by a digest. All that a gather needs is known then,
before it is issued, on all ranks alike: none has to be repeated, and the host has waited once (H4). What is gathered in
full is surveyed not at all, and is on its way while the rest is stepped.

A row has a checksum, of its code and of the number of the step. Where it does not fit, nothing is updated from it. On a
device with streams, the host reads that with the next survey, on all ranks, or before parameters are saved.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NamedTuple

import torch

from zerosync_strategy.core.comm.collectives import InFlight, named_ranks, phase
from zerosync_strategy.core.comm.differences import BITS, Plan, decode, digest, encode
from zerosync_strategy.core.comm.faster import FasterWay
from zerosync_strategy.core.comm.nodes import Topology
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
from zerosync_strategy.core.failures.errors import RankError
from zerosync_strategy.core.gradients.flat import FlatBucket, FlatLayout

_STEP, _CHECKSUM = 0, 1  # words of 64 bits in the header of a row
_HEADER = 16  # bytes
_OF_ALL = 3  # words of a survey beside those of buckets: the times of this rank, and one more than who sent damage
_CODED = 2**16  # more than the tag of a gather in full


class _Surveyed(NamedTuple):
    """A bucket whose changes this rank has counted.

    Attributes:
        rows, stepped, step, tag: as for :meth:`ChangesGather.launch`.
        words: of it, in the survey.
    """

    rows: torch.Tensor
    stepped: torch.Tensor
    step: int
    tag: int
    words: torch.Tensor


class ChangesGather:
    """Gathers the buckets of one layout. Every rank of its process group makes the same choices, step by step.

    Args:
        layout: of 16-bit parameters.
        automatic: keep the faster of coded and full gathers; else code whatever is worth it.
        streams: of the engine.
        topology: of the ranks.

    Attributes:
        sent_bytes, dense_bytes: what this rank has sent for gathers since :meth:`reset_counts`, and what it had sent in
            full.
        most_words: of a survey.
    """

    def __init__(self, layout: FlatLayout, automatic: bool, streams: Streams, topology: Topology) -> None:
        self._layout, self._streams, self._topology = layout, streams, topology
        self._way = FasterWay(automatic)
        self._coded = CodedGathers(max(map(self._nbytes, layout.buckets)) // 2)
        self.most_words = WORDS * len(layout.buckets) + _OF_ALL
        self._abandoned: list[InFlight] = []  # their memory must outlive them
        self._damage: torch.Tensor | None = None  # by rank, whether it has sent some since it was read last
        self.reset_counts()
        self.reset()

    def reset(self) -> None:
        """The next gathers are full: parameters were loaded, or a step has raised. On all ranks alike."""
        self._way.reset()
        self._began = 0.0
        self._told: tuple[int, int] | None = None  # the longest times of any rank
        self._is_first = True
        self._pauses: Counter[FlatBucket] = Counter()  # for how many steps a bucket is not surveyed
        self._surveyed: dict[FlatBucket, _Surveyed] = {}

    def reset_counts(self) -> None:
        self.sent_bytes = self.dense_bytes = 0

    # ---- one step --------------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """The optimizer is about to step."""
        self._abandoned = [gather for gather in self._abandoned if not gather.is_over]
        if self._way.measures:
            self._streams.host_waits_for_caller()
        self._began = time.perf_counter()

    def launch(
        self, bucket: FlatBucket, rows: torch.Tensor, stepped: torch.Tensor, step: int, tag: int
    ) -> InFlight | None:
        """Begin to give ``stepped``, this rank's part of ``bucket``, to all ranks.

        Args:
            rows: all parameters of the bucket, a row per rank, which the gather updates.
            step: counts them, alike on all ranks.
            tag: off NCCL, of gathers in full; coded ones have another.

        Returns:
            ``None``: what has changed was counted, and :func:`launch_surveyed` begins to gather it.
        """
        if bucket in self._surveyed:
            return None
        nbytes = self._nbytes(bucket)
        self.dense_bytes += self._sent(nbytes)
        if not self._way.codes or self._is_first or nbytes < SMALLEST or self._is_paused(bucket):
            return self._launch_full(bucket, rows, stepped, tag)
        own = rows[self._layout.rank]
        new = torch.empty_like(own).copy_(stepped, non_blocking=True)
        words = words_of(new, own, digest(rows.view(1, -1))[0])
        self._surveyed[bucket] = _Surveyed(rows, stepped, step, tag, words)
        return None

    def _is_paused(self, bucket: FlatBucket) -> bool:
        if not self._pauses[bucket]:
            return False
        self._pauses[bucket] -= 1
        return True

    def survey(self) -> list[torch.Tensor]:
        """This rank has stepped all that is its own: return what all have counted. Collective."""
        if not self._surveyed and self._damage is None:
            return []
        by_bucket = [each.words for each in self._surveyed.values()]
        damaged = torch.zeros(1, dtype=torch.int64, device=self._layout.params[0].device)
        if self._damage is not None:
            ranks = torch.arange(1, len(self._damage) + 1, device=damaged.device)
            damaged.copy_((self._damage * ranks).amax())
            self._damage = None
        return [survey(by_bucket, self._way.own_times(), self._layout.process_group, damaged)]

    def launch_surveyed(self, told: Iterator[int]) -> None:
        """Begin to gather what was surveyed. Collective.

        Args:
            told: what :meth:`survey` has returned.

        Raises:
            RankError: on all ranks: what some rank has received since the last survey was damaged.
        """
        surveyed, self._surveyed = self._surveyed, {}
        by_bucket = [list(islice(told, WORDS)) for _ in surveyed]
        coded, full, damaged = islice(told, _OF_ALL)
        if damaged:
            raise self._refused([damaged - 1], "the parameters gathered after the last step")
        if surveyed:
            self._told = coded, full
        for (bucket, each), words in zip(surveyed.items(), by_bucket, strict=True):
            if not are_alike(words):
                warn_of_others(int(each.words[len(BITS)]), bucket.names, self._layout.process_group)
                plan = None
            elif (plan := worthwhile_plan(bucket.stripe.width, words, _HEADER)) is None:
                self._pauses[bucket] = SURVEY_EVERY
            if plan is None:
                bucket.gather = self._launch_full(bucket, each.rows, each.stepped, each.tag)
            else:
                bucket.gather = self._launch_coded(bucket, each, plan)

    def _launch_full(self, bucket: FlatBucket, rows: torch.Tensor, stepped: torch.Tensor, tag: int) -> InFlight:
        rows[self._layout.rank].copy_(stepped, non_blocking=True)
        self.sent_bytes += self._sent(self._nbytes(bucket))
        return self._layout.all_gather(rows, tag, bucket.gather_label)

    def _launch_coded(self, bucket: FlatBucket, surveyed: _Surveyed, plan: Plan) -> InFlight:
        layout, size = self._layout, _HEADER + plan.nbytes
        self._coded.make_room(size * layout.world_size)
        own = surveyed.rows[layout.rank]
        coded = torch.empty(layout.world_size, size, dtype=torch.uint8, device=own.device)
        out = coded[layout.rank]
        with phase("code_changes", bucket.name):
            new = torch.empty_like(own).copy_(surveyed.stepped, non_blocking=True)
            encode(new, own, plan, out[_HEADER:])
            own.copy_(new)
        header = out[:_HEADER].view(torch.int64)
        header[_STEP].fill_(surveyed.step)
        header[_CHECKSUM].zero_()
        header[_CHECKSUM].copy_(digest(out.view(1, -1))[0])
        self.sent_bytes += self._sent(coded.nbytes)
        if self._streams.concurrent and self._damage is None:
            self._damage = torch.zeros(layout.world_size, dtype=torch.bool, device=own.device)
        gather = layout.all_gather(coded, surveyed.tag + _CODED, bucket.gather_label)
        gather.then(lambda _: self._arrived(bucket, surveyed, plan, coded, gather))
        self._coded.add(coded.nbytes, gather)
        return gather

    @torch.no_grad()
    def _arrived(
        self, bucket: FlatBucket, surveyed: _Surveyed, plan: Plan, coded: torch.Tensor, gather: InFlight
    ) -> None:
        """What every rank has coded is there: update the rows of the others, if all of it is what was sent."""
        if gather in self._abandoned:
            return
        rows, rank = surveyed.rows, self._layout.rank
        headers = coded[:, :_HEADER].view(torch.int64)
        checksums = headers[:, _CHECKSUM].clone()
        headers[:, _CHECKSUM] = 0
        intact = (checksums == digest(coded)) & (headers[:, _STEP] == surveyed.step)
        if self._damage is not None:  # the host does not wait for the answer
            self._damage.logical_or_(~intact)
        elif not all(found := intact.tolist()):
            ranks = [each for each, is_intact in enumerate(found) if not is_intact]
            raise self._refused(ranks, f"what has arrived for {bucket.gather_label}")
        with phase("decode_changes", bucket.name):
            for part in (slice(0, rank), slice(rank + 1, None)):
                if len(rows[part]):
                    decode(coded[part, _HEADER:], rows[part], plan, intact.all())
        self._streams.record_stream_for_gathers(coded, self._streams.caller)

    def end_step(self) -> None:
        """All gathers of this step are complete, or on their way (U5)."""
        self._is_first = False
        if self._way.measures:
            self._streams.host_waits_for_caller()
        if self._way.end_turn(time.perf_counter() - self._began, self._told):
            self._pauses.clear()
        self._told = None

    def abandon(self) -> None:
        """A step has raised: what is in flight updates nothing, and the next gathers are full."""
        self._abandoned += self._coded.take_all()
        self._damage = None
        self.reset()

    def check(self) -> None:
        """Somebody else is about to read the parameters.

        Raises:
            RankError: what this rank has received in the last step was damaged.
        """
        if self._damage is not None and any(found := self._damage.tolist()):
            ranks = [rank for rank, is_damaged in enumerate(found) if is_damaged]
            raise self._refused(ranks, "the parameters gathered after the last step")

    # ---- counts and errors -----------------------------------------------------------------------------------------

    def _nbytes(self, bucket: FlatBucket) -> int:
        return 2 * bucket.stripe.width * self._layout.world_size

    def _sent(self, nbytes: int) -> int:
        return self._topology.sent(nbytes, self._layout.process_group).nbytes

    def _named(self, ranks: Sequence[int]) -> str:
        return named_ranks(self._layout.process_group, ranks)

    def _refused(self, ranks: Sequence[int], what: str) -> RankError:
        return RankError(
            f"gather_changes: {what} is not what rank {self._named(ranks)} has sent, by its checksum. Parameters are of"
            " two steps now: go back to the last checkpoint. If it happens again, check the network, or leave out"
            " 'gather_changes'."
        )


def launch_surveyed(gathers: Sequence[ChangesGather], answer: HostCopy) -> None:
    """All that is this rank's own was stepped: survey what was counted, and begin to gather it. Collective.

    The host waits once.

    Args:
        answer: has room for all their ``most_words``.
    """
    surveys = [(gather, gather.survey()) for gather in gathers]
    words = [each for _, of_gather in surveys for each in of_gather]
    if words:
        answer.begin(torch.cat(words))
        told = iter(answer.read())
        for gather in [gather for gather, of_gather in surveys if of_gather]:
            gather.launch_surveyed(told)
