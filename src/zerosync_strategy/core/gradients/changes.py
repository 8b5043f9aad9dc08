"""The gather of updated parameters of 16 bits as what has changed in them, bit for bit (R7).

On stages 1 and 2 every rank has the parameters as they were before the step, so a rank need only send how its own have
changed (``comm/differences.py``). All rows of a gather have one size, which all ranks must know before any of them
knows how much has changed elsewhere. So a bucket is coded by a *plan* that all ranks made alike of the step before:
each row begins with a *header* that says how many differences its rank had. Where a rank had more than the plan has
room for, all ranks see it there and gather the bucket once more, with room enough, or in full. Before the first plan,
and where none was worth it, a bucket is gathered in full, and an all-reduce of four words, a *survey*, takes the place
of the headers.

The header also has a digest of all parameters of the bucket before the step: ranks that do not start from the same
gather in full, and say which rank has others. A checksum covers header and code.
"""

from __future__ import annotations

import math
import time
import warnings
import zlib
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch

from zerosync_strategy.core.comm.collectives import InFlight, largest, named_ranks, phase
from zerosync_strategy.core.comm.differences import (
    BITS,
    SURVEY_EVERY,
    WORTH,
    Plan,
    choose_plan,
    count,
    decode,
    digest,
    encode,
)
from zerosync_strategy.core.comm.faster import FasterWay
from zerosync_strategy.core.comm.nodes import Topology
from zerosync_strategy.core.comm.streams import HostCopy, Streams
from zerosync_strategy.core.engine.zero import listed
from zerosync_strategy.core.failures.errors import RankError
from zerosync_strategy.core.gradients.flat import FlatBucket, FlatLayout

# Words of 64 bits in a header.
_STEP, _PLAN, _COUNTS, _BEFORE = 0, 1, slice(2, 6), 6
_TIMES = slice(7, 9)  # microseconds of a step: coded, in full
_CHECKSUM = 9
_HEADER = 80  # bytes, a multiple of 16
_ANSWER = len(BITS) + 2 + 3
_CODED = 2**16  # more than the tag of a gather in full

WASTE = 0.01
"""What overflows cost, as a share of the bytes of full gathers, beyond what was saved."""
_SLACK = 0.1  # room for more than the step before had


class _Coding:
    """How one bucket is gathered.

    Attributes:
        plan: of the next step, if it is coded.
        survey_in: steps until the next survey; none in this step: 1 and above.
        surveyed: in this step, what this rank has counted.
    """

    def __init__(self) -> None:
        self.plan: Plan | None = None
        self.survey_in = 0
        self.surveyed: torch.Tensor | None = None


class _Sent(NamedTuple):
    """What this rank sends of a bucket.

    Attributes:
        rows: all parameters of the bucket, a row per rank; this rank's own are new.
        old: what its own were.
        before: the digest of all as they were.
        step, tag: as for :meth:`ChangesGather.launch`.
    """

    bucket: FlatBucket
    rows: torch.Tensor
    old: torch.Tensor
    before: torch.Tensor
    step: int
    tag: int


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
    """

    def __init__(self, layout: FlatLayout, automatic: bool, streams: Streams, topology: Topology) -> None:
        self._layout, self._streams, self._topology = layout, streams, topology
        self._way = FasterWay(automatic)
        self._codings = {bucket: _Coding() for bucket in layout.buckets}
        nbytes = [self._nbytes(bucket) for bucket in layout.buckets]
        self._room, self._all = max(nbytes) // 2, sum(nbytes)
        self._answer = HostCopy(streams, _ANSWER)
        self._in_flight: dict[FlatBucket, tuple[torch.Tensor, InFlight]] = {}  # what is coded, and its gather
        self._abandoned: list[InFlight] = []  # their memory must outlive them
        self.reset_counts()
        self.reset()

    def reset(self) -> None:
        """The next gathers are full: parameters were loaded, or a step has raised. On all ranks alike."""
        self._way.reset()
        self._began = 0.0
        self._told: list[int] | None = None  # the times of all ranks in sum
        self._debt = 0.0  # bytes sent less those of full gathers and what overflows may cost
        for coding in self._codings.values():
            coding.plan, coding.survey_in, coding.surveyed = None, 0, None

    def reset_counts(self) -> None:
        self.sent_bytes = self.dense_bytes = 0

    # ---- one step --------------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """The optimizer is about to step."""
        self._abandoned = [gather for gather in self._abandoned if not gather.is_over]
        if self._way.measures:
            self._streams.host_waits_for_caller()
        self._began = time.perf_counter()

    def launch(self, bucket: FlatBucket, rows: torch.Tensor, stepped: torch.Tensor, step: int, tag: int) -> InFlight:
        """Begin to give ``stepped``, this rank's part of ``bucket``, to all ranks.

        Args:
            rows: all parameters of the bucket, a row per rank, which the gather updates.
            step: counts them, alike on all ranks.
            tag: off NCCL, of gathers in full; coded ones have another.
        """
        layout, coding = self._layout, self._codings[bucket]
        own = rows[layout.rank]
        nbytes = self._nbytes(bucket)
        self.dense_bytes += self._sent(nbytes)
        self._debt -= (1 + WASTE) * nbytes
        plan = coding.plan if self._way.codes and self._debt <= 0 else None
        if plan is None:
            if coding.plan is None and coding.survey_in == 0:
                new = torch.empty_like(own).copy_(stepped, non_blocking=True)
                coding.surveyed = count(new, own)
                own.copy_(new)
            else:
                own.copy_(stepped, non_blocking=True)
            coding.survey_in = max(coding.survey_in - 1, 0)
            return self._launch_full(bucket, rows, tag)
        before, old = digest(rows.view(1, -1))[0], own.clone()
        own.copy_(stepped, non_blocking=True)
        return self._launch_coded(_Sent(bucket, rows, old, before, step, tag), plan)

    def _launch_coded(self, sent: _Sent, plan: Plan) -> InFlight:
        layout, size = self._layout, _HEADER + plan.nbytes
        while self._in_flight and self._bytes_in_flight + layout.world_size * size > self._room:
            next(iter(self._in_flight.values()))[1].wait()
        coded = torch.empty(layout.world_size, size, dtype=torch.uint8, device=sent.rows.device)
        with phase("code_changes", sent.bucket.name):
            self._encode(coded[layout.rank], sent, plan)
        self._count(coded.nbytes)
        gather = layout.all_gather(coded, sent.tag + _CODED, sent.bucket.gather_label)
        gather.then(lambda _: self._arrived(sent, coded, plan))
        self._in_flight[sent.bucket] = coded, gather
        return gather

    @property
    def _bytes_in_flight(self) -> int:
        return sum(coded.nbytes for coded, _ in self._in_flight.values())

    def _launch_full(self, bucket: FlatBucket, rows: torch.Tensor, tag: int) -> InFlight:
        self._count(self._nbytes(bucket))
        return self._layout.all_gather(rows, tag, bucket.gather_label)

    def _encode(self, out: torch.Tensor, sent: _Sent, plan: Plan) -> None:
        header = out[:_HEADER].view(torch.int64)
        header[_STEP].fill_(sent.step)
        header[_PLAN].fill_(_name(plan))
        header[_COUNTS].copy_(encode(sent.rows[self._layout.rank], sent.old, plan, out[_HEADER:]))
        header[_BEFORE].copy_(sent.before)
        for word, measured in zip(header[_TIMES], self._way.own_times(), strict=True):
            word.fill_(measured)
        header[_CHECKSUM].zero_()
        header[_CHECKSUM].copy_(digest(out.view(1, -1))[0])

    def _arrived(self, sent: _Sent, coded: torch.Tensor, plan: Plan) -> None:
        """What every rank has coded is there: update the rows of the others, after another gather if need be."""
        bucket, rows = sent.bucket, sent.rows
        if bucket not in self._in_flight or self._in_flight[bucket][0] is not coded:
            return  # of a step that has raised
        del self._in_flight[bucket]
        headers = coded[:, :_HEADER].view(torch.int64)
        checksums = headers[:, _CHECKSUM].clone()
        headers[:, _CHECKSUM] = 0
        intact = checksums == digest(coded)
        expected = (headers[:, _STEP] == sent.step) & (headers[:, _PLAN] == _name(plan))
        before = headers[:, _BEFORE]
        flags = torch.stack([intact.all(), expected.all(), (before == before[0]).all()])
        self._answer.begin(torch.cat([headers[:, _COUNTS].amax(0), headers[:, _TIMES].sum(0), flags]))
        *counts, time_coded, time_full, is_intact, is_expected, is_alike = self._answer.read()
        if not is_intact or not is_expected:
            raise self._refused(bucket, intact, expected)
        self._told = [time_coded, time_full]
        coding, rank = self._codings[bucket], self._layout.rank
        wider = plan.widened(counts)
        if not is_alike:
            self._warn_of_others(bucket, before.tolist())
        elif wider is None:
            with phase("decode_changes", bucket.name):
                for part in (slice(0, rank), slice(rank + 1, None)):
                    if len(rows[part]):
                        decode(coded[part, _HEADER:], rows[part], plan)
            self._prepare(bucket, counts)
            return
        elif self._is_worth(bucket, wider):
            self._launch_coded(sent, wider).wait()
            return
        coding.plan, coding.survey_in = None, 0
        self._launch_full(bucket, rows, sent.tag).wait()

    def end_step(self) -> None:
        """All gathers of this step are complete. Collective where buckets were surveyed."""
        surveyed = [(bucket, coding) for bucket, coding in self._codings.items() if coding.surveyed is not None]
        if surveyed:
            own = torch.cat([coding.surveyed for _, coding in surveyed if coding.surveyed is not None]).tolist()
            found = largest(own, self._layout.process_group)
            for index, (bucket, coding) in enumerate(surveyed):
                counts = found[index * len(BITS) : (index + 1) * len(BITS)]
                self._prepare(bucket, counts)
                coding.surveyed = None
        if self._way.measures:
            self._streams.host_waits_for_caller()
        if self._way.end_turn(time.perf_counter() - self._began, self._told):
            for coding in self._codings.values():  # plans are of long ago, if it did not code
                coding.plan, coding.survey_in = None, 0
        self._told = None

    def abandon(self) -> None:
        """A step has raised: what is in flight updates nothing, and the next gathers are full."""
        self._abandoned += [gather for _, gather in self._in_flight.values()]
        self._in_flight.clear()
        self.reset()

    def _prepare(self, bucket: FlatBucket, counts: Sequence[int]) -> None:
        """Plan the next step of a bucket by the largest counts of all ranks in this one."""
        room = [each * (1 + _SLACK) + 4 * math.sqrt(each) + 32 for each in counts]
        plan, coding = choose_plan(bucket.stripe.width, room), self._codings[bucket]
        if self._is_worth(bucket, plan):
            coding.plan = plan
        else:
            coding.plan, coding.survey_in = None, SURVEY_EVERY

    def _is_worth(self, bucket: FlatBucket, plan: Plan) -> bool:
        return (_HEADER + plan.nbytes) * self._layout.world_size <= WORTH * self._nbytes(bucket)

    # ---- counts and errors -----------------------------------------------------------------------------------------

    def _nbytes(self, bucket: FlatBucket) -> int:
        return 2 * bucket.stripe.width * self._layout.world_size

    def _sent(self, nbytes: int) -> int:
        return self._topology.sent(nbytes, self._layout.process_group).nbytes

    def _count(self, nbytes: int) -> None:
        self.sent_bytes += self._sent(nbytes)
        self._debt = max(self._debt + nbytes, -2.0 * self._all)

    def _global(self, ranks: Sequence[int]) -> str:
        return named_ranks(self._layout.process_group, ranks)

    def _refused(self, bucket: FlatBucket, intact: torch.Tensor, expected: torch.Tensor) -> RankError:
        found = torch.stack([intact, expected], dim=1).tolist()
        damaged = [rank for rank, (is_intact, _) in enumerate(found) if not is_intact]
        if damaged:
            what = f"is not what rank {self._global(damaged)} has sent, by its checksum"
        else:
            others = [rank for rank, (_, is_expected) in enumerate(found) if not is_expected]
            what = f"is of another step or code than this rank's, from rank {self._global(others)}"
        return RankError(
            f"gather_changes: what has arrived for {bucket.gather_label} {what}. Parameters on this rank are of two"
            " steps now: go back to the last checkpoint. If it happens again, check the network, or leave out"
            " 'gather_changes'."
        )

    def _warn_of_others(self, bucket: FlatBucket, before: list[int]) -> None:
        common = Counter(before).most_common(1)[0][0]
        others = [rank for rank, each in enumerate(before) if each != common]
        warnings.warn(
            f"gather_changes: before this step, {listed([f'rank {each}' for each in self._global(others).split(', ')])}"
            f" had other parameters than rank {self._global([before.index(common)])}, in {bucket.names}. They were"
            " gathered in full: each rank's part of them holds for all. Change parameters alike on all ranks.",
            stacklevel=2,
        )


def _name(plan: Plan) -> int:
    return zlib.crc32(repr(plan).encode())
