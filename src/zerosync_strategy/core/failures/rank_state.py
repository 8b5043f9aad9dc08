"""The state of one rank when communication fails: observed, sent to the other ranks, and judged with theirs.

The phases of a rank:

========  ================================================  ====================================  =================
phase     begins with                                       what it reports to other ranks        next phases
========  ================================================  ====================================  =================
RUNNING   the first activity, or the next after an error    on demand, what its main thread does  all but STOPPED
LOST      a communication error on this rank                its place; later also the verdict     STOPPED
STOPPED   the ``RankError`` that it raises for that         that it has lost the others           RUNNING
FAILED    an exception of its own                           the exception and its place           RUNNING
GONE      no answer, in another rank's view                 nothing                               none
========  ================================================  ====================================  =================

A verdict depends on the enums alone, and on no other text. Their values are the words of error texts.
"""

from __future__ import annotations

import enum
import os
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import Enum
from types import FrameType, TracebackType
from typing import Any, NamedTuple, Protocol

import torch

from zerosync_strategy.core.comm import journal
from zerosync_strategy.core.failures import flight_recorder
from zerosync_strategy.core.failures.flight_recorder import (
    Key,
    Recorded,
    Wait,
    first_incomplete,
    issued,
    program_line,
    wait_of,
)


class Doing(str, Enum):
    """What a rank does in the engine, as far as verdicts distinguish it."""

    FORWARD = "the forward"
    BACKWARD = "the backward"
    OWN_BACKWARD = "a backward"  # not begun by the engine
    REDUCTION = "the reduction"
    STEP = "the optimizer step"
    GATHER = "the gather"
    UPDATES = "the gather of the updated parameters"
    GRADIENTS = "the gather of the gradients"
    END = "the end of the training"  # at a barrier of a frontend
    ELSE = ""

    def __str__(self) -> str:
        return self.value

    @property
    def is_of_step(self) -> bool:
        """Whether it is part of every optimizer step."""
        return self not in (Doing.END, Doing.ELSE)


def doing_of(what: object) -> Doing:
    """Return the :class:`Doing` of the activity ``what``: itself, or its attribute ``doing``, or ``ELSE``."""
    found = what if isinstance(what, Doing) else getattr(what, "doing", None)
    return found if isinstance(found, Doing) else Doing.ELSE


class Cause(str, Enum):
    """Why ranks wait in vain. Each has a row in the table of docs/failures.md."""

    EXCEPTION = "exception"
    ENDED = "process ended"
    ELSEWHERE = "elsewhere"
    OTHER_BACKWARDS = "other backwards"
    OTHER_MODULES = "other modules"
    OTHER_CALL = "other call"
    OTHER_ORDER = "other order"
    OTHER_SIZES = "other sizes"
    SAME_CALL = "same call"
    REPORTED_BEFORE = "reported before"

    def __str__(self) -> str:
        return self.value


class Advice(Enum):
    """What a verdict recommends; its sentence is in ``words.py``."""

    OTHER_BACKWARDS = enum.auto()
    FEWER_BATCHES = enum.auto()


class Departure(NamedTuple):
    """How a rank's window differs from its last one, and the cause that this implies."""

    cause: Cause
    text: str


class Phase(str, Enum):
    """See the table above."""

    RUNNING = "running"
    LOST = "lost"
    STOPPED = "stopped"
    FAILED = "failed"
    GONE = "gone"


@dataclass(frozen=True)
class RankState:
    """The state of one rank.

    Attributes:
        phase: whether it runs, and if not, why.
        failure: why it has stopped: its exception and activity, or the activity in which it lost the others.
        activity: what it does in ZeroSync's words; empty outside of the engine. ``doing``: the same for verdicts.
        seconds: since the activity began, or -1.
        call: the function of ``torch.distributed`` that its main thread runs.
        position: its progress, in words.
        waits_for: the collective for which it waits, or has waited in vain; empty if it waits for no other rank.
        reduces: ``waits_for`` is a reduction of gradients.
        steps: optimizer steps done, or -1 if unknown.
        backward: the backward of the window that it is in, or that its forward leads to; 0 before the first.
        module: the module whose code runs, or for which it gathers.
        line: of the program.
        departure: how this window differs from the last one; ``departs_by``: the cause that this implies.
        recorded: by process group, the last collective in torch's flight recorder, and the first incomplete one.
        wait: what it waits for now, for comparison with other ranks.
        issued: of each collective that the asking rank has named, whether it has issued it (:class:`Issued`).
        ended: the ranks of its host whose processes have ended, each with its process id.
        verdict: the verdict with which it has stopped. ``advises``: the verdict contains its own advice.
        pid: of its process. A rank that is GONE has one if its process is known to have ended.
    """

    rank: int
    phase: Phase = Phase.RUNNING
    failure: str = ""
    activity: str = ""
    doing: Doing = Doing.ELSE
    seconds: int = -1
    call: str = ""
    position: str = ""
    waits_for: str = ""
    reduces: bool = False
    steps: int = -1
    backward: int = 0
    module: str = ""
    line: str = ""
    departure: str = ""
    departs_by: Cause = Cause.OTHER_MODULES
    recorded: tuple[Recorded, ...] = ()
    wait: Wait | None = None
    issued: tuple[int, ...] = ()
    ended: tuple[tuple[int, int], ...] = ()
    verdict: str = ""
    advises: bool = False
    pid: int = 0
    host: str = ""

    @property
    def pending(self) -> Recorded | None:
        """The first incomplete collective of the last used process group that has any in torch's flight recorder."""
        return first_incomplete(self.recorded)

    def with_pending(self) -> RankState:
        """Fill ``waits_for`` from torch's flight recorder, if ZeroSync does not know what the rank waits for.

        On NCCL, the host does not wait in collectives. It may be that nothing waits for an incomplete gloo collective,
        so it counts only if nothing else is known of the rank.
        """
        pending = self.pending
        if pending is None or self.waits_for or self.phase is Phase.FAILED:
            return self
        if (self.steps >= 0 or self.line) and pending.name.startswith("gloo"):
            return self
        return replace(self, waits_for=pending.text, reduces=pending.reduces, line=self.line or pending.line)

    def encode(self) -> dict[str, object]:
        """Return the fields that differ from their defaults, for JSON."""
        return {"rank": self.rank} | {
            name: value for name, value in asdict(self).items() if value != getattr(RankState, name, None)
        }

    @staticmethod
    def decode(fields: Mapping[str, Any]) -> RankState:
        state = RankState(**fields)
        records = tuple(Recorded(**each) for each in fields.get("recorded", ()))
        phase, doing, departs_by = Phase(state.phase), Doing(state.doing), Cause(state.departs_by)
        waited = fields.get("wait")
        wait = waited and Wait(tuple(waited["key"]), tuple(waited["members"]), waited["blocks"])
        return replace(state, phase=phase, doing=doing, departs_by=departs_by, recorded=records, wait=wait)


class Progress(Protocol):
    """The progress of one engine; another thread reads it, too."""

    steps: int

    @property
    def backwards(self) -> int:
        """Backwards since the last step."""

    def departure(self, in_forward: bool, in_step: bool) -> Departure | None:
        """Return how this window departs from the last one, as seen from a forward or a step; ``None``: not at all."""

    def name_of(self, module: torch.nn.Module) -> str:
        """Return the name of a module of the engine; empty if it has none."""

    def memory(self) -> str:
        """Return in words what the engine holds, for an error."""


def observe(
    rank: int, activities: Sequence[tuple[object, float]], frame: FrameType | None, position: str,
    progress: Progress | None, *, failed: bool = False, with_recorder: bool = True, asked: Sequence[Key] = (),
) -> RankState:  # fmt: skip
    """Return the state of this process.

    Args:
        activities: of the main thread, innermost last, each with its start time.
        frame: the innermost frame of the main thread, or the frame that has raised.
        position: the progress, in words.
        progress: of its engine, if there is one.
        failed: the main thread has waited in vain.
        with_recorder: read torch's flight recorder, which takes some 20 ms.
        asked: collectives of which to say whether this process has issued them.
    """
    whats = [what for what, _ in activities]
    doings = list(map(doing_of, whats))
    # An exception from autograd's callbacks loses the frames of their callers. The program is still above this call.
    line = _program_line(frame) or (_program_line(sys._getframe()) if failed else "")
    gather: Any = next((what for what in whats[::-1] if doing_of(what) is Doing.GATHER), None)
    waits_for = str(gather) if gather else journal.describe_wait(frame, failed)
    module = gather.module if gather else ""
    steps, backward = -1, 0
    departure: Departure | None = None
    if progress is not None:
        in_forward = Doing.FORWARD in doings
        steps, backward = progress.steps, progress.backwards + in_forward
        departure = progress.departure(in_forward, Doing.STEP in doings)
        module = module or next(filter(None, map(progress.name_of, _running_modules(frame))), "")
    entries = flight_recorder.entries() if with_recorder else []
    recorded = flight_recorder.recorded(entries)
    wait = None if failed else wait_of(frame, recorded)
    state = RankState(
        rank, Phase.LOST if failed else Phase.RUNNING, call=journal.torch_collective(frame), position=position,
        waits_for=waits_for, reduces=isinstance(waits_for, journal.OfReduction), steps=steps, backward=backward,
        module=module, recorded=recorded, wait=wait, issued=tuple(map(int, issued(asked, entries))), pid=os.getpid(),
        line=line, host=socket.gethostname(),
    )  # fmt: skip
    if activities:
        seconds = round(time.monotonic() - activities[-1][1])
        state = replace(state, activity=str(whats[-1]), doing=doings[-1], seconds=seconds)
    return replace(state, departure=departure.text, departs_by=departure.cause) if departure else state


def frame_of(error: BaseException) -> FrameType | None:
    """Return the innermost frame of the traceback of ``error``."""
    traceback: TracebackType | None = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    return None if traceback is None else traceback.tb_frame


def _program_line(frame: FrameType | None) -> str:
    return program_line((each.f_code.co_filename, each.f_lineno, each.f_code.co_name) for each in _outwards(frame))


def _running_modules(frame: FrameType | None) -> Iterator[torch.nn.Module]:
    """Yield the modules whose forward runs, innermost first."""
    for each in _outwards(frame):
        if each.f_code.co_name == "_call_impl" and isinstance(module := each.f_locals.get("self"), torch.nn.Module):
            yield module


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back
