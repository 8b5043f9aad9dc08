"""What the files of a run's ranks say of a hang: ZeroSync's (``ZEROSYNC_DUMP_DIR``) and torch's flight recorder's."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from zerosync_strategy.core.failures.answers import Answer, lines_of, no_answer
from zerosync_strategy.core.failures.flight_recorder import read_file
from zerosync_strategy.core.failures.snapshots import Snapshot, interval
from zerosync_strategy.core.failures.state import RankState, Recorded
from zerosync_strategy.core.failures.verdict import Verdict, judge, where
from zerosync_strategy.tools.doctor.findings import Finding, error, note, ok

TOPIC = "verdict"
_SILENT = 5
"""A file that is older than the newest by the time of so many is of a process that has ended."""
_STUCK = 10.0
"""A rank that has waited at one place for so many seconds is stuck."""
_TORCHS = re.compile(r".*?(\d+)")
REMEDY = (
    "Each rank must make the same optimizer steps and collective calls and, under ZeRO-3, run the same modules in the"
    " same order, unless all parameters are held (param_memory_budget='all'). docs/failures.md has the causes."
)

_ENDED = (
    "all ranks have ended within some seconds, and none has said why: a launcher ends them all when one is killed, or"
    " the job was ended from outside. Look at what the launcher has printed"
)


@dataclass(frozen=True)
class Dump:
    """What the files of a directory say.

    Attributes:
        verdict: on the ranks; ``None`` where none is stuck, has failed or is gone.
        lines: what each of them was doing.
        recorders: how many files are torch's.
    """

    verdict: Verdict | None
    lines: Sequence[str]
    recorders: int


def read(directory: Path) -> Dump:
    """Read the files of all ranks.

    Raises:
        ValueError: there are none, or one is of something else.
    """
    snapshots = {snapshot.answer.rank: snapshot for snapshot in Snapshot.load_all(directory)}
    recorders = dict(_recorders(directory))
    if not snapshots and not recorders:
        raise ValueError(
            f"{directory} has no files of ranks. Run the job with ZEROSYNC_DUMP_DIR={directory}, and on NCCL with"
            f" TORCH_FR_DUMP_TEMP_FILE={directory}/nccl_trace_rank_ too."
        )
    world_size = max([snapshot.world_size for snapshot in snapshots.values()] + [rank + 1 for rank in recorders])
    newest = max((snapshot.written for snapshot in snapshots.values()), default=0.0)
    silence = _SILENT * interval(world_size)
    answers = [
        _answer(rank, snapshots.get(rank), recorders.get(rank, ()), newest - silence) for rank in range(world_size)
    ]
    states = [answer.state for answer in answers if answer.state is not None]
    verdict = judge(states) if _is_stuck(states, snapshots) else None
    if verdict is not None:
        last = (f"; rank {state.rank} was last seen{where(state)}" for state in states if state.is_gone and state.line)
        verdict = replace(verdict, text=verdict.text + "".join(last if verdict.cause == "told before" else ()))
    elif snapshots and not all(state.has_finished for state in states) and newest < time.time() - silence:
        verdict = Verdict("ended from outside", (), _ENDED)
    return Dump(verdict, lines_of(answers), len(recorders))


def check(directory: Path) -> list[Finding]:
    """Return the verdict on the run that has written ``directory``, and what its ranks were doing.

    Raises:
        ValueError: as :func:`read`.
    """
    dump = read(directory)
    ranks = [note(TOPIC, line.strip()) for line in dump.lines]
    if dump.verdict is None:
        return [ok(TOPIC, "no rank is stuck, has failed or is gone"), *ranks]
    return [error(TOPIC, dump.verdict.text, REMEDY), *ranks]


def _answer(rank: int, snapshot: Snapshot | None, recorded: tuple[Recorded, ...], silent: float) -> Answer:
    """Return what is known of a rank; if its file was written before ``silent``, its process has ended."""
    if snapshot is None:
        if not recorded:
            return no_answer(rank)
        return Answer(rank, "has a file of torch's flight recorder alone", state=RankState(rank, recorded=recorded))
    answer, state = snapshot.answer, snapshot.answer.state or RankState(rank)
    if recorded:
        words = {(each.group, each.name, each.number): each.words for each in state.recorded}
        named = (replace(each, words=words.get((each.group, each.name, each.number), "")) for each in recorded)
        state = replace(state, recorded=tuple(named))
    ended = bool(state.failure or state.verdict or state.has_finished)
    if not ended and snapshot.written < silent:
        activity = f"its process has ended; it was {answer.activity}"
        return replace(answer, activity=activity, seconds="", state=replace(state, is_gone=True, waits_for=""))
    return replace(answer, state=state)


def _recorders(directory: Path) -> Iterable[tuple[int, tuple[Recorded, ...]]]:
    for path in sorted(directory.iterdir()):
        if path.is_file() and not path.suffix and (rank := _TORCHS.fullmatch(path.name)):
            yield int(rank[1]), read_file(path)


def _is_stuck(states: Sequence[RankState], snapshots: dict[int, Snapshot]) -> bool:
    if not snapshots or any(state.failure or state.is_gone or state.verdict for state in states):
        return True
    return any(
        snapshot.written - snapshot.since >= _STUCK and snapshot.answer.state and snapshot.answer.state.waits_for
        for snapshot in snapshots.values()
    )
