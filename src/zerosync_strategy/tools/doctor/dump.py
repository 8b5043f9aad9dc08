"""What the files of a run's ranks say of a hang: ZeroSync's (``ZEROSYNC_DUMP_DIR``) and torch's flight recorder's."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from zerosync_strategy.core.failures.flight_recorder import Recorded, read_file
from zerosync_strategy.core.failures.rank_state import Phase, RankState
from zerosync_strategy.core.failures.snapshots import Snapshot, interval
from zerosync_strategy.core.failures.verdict import Verdict, judge, lines_of
from zerosync_strategy.tools.doctor.findings import Finding, Topic

TOPIC = Topic("verdict")
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
    """What the files of a directory say."""

    verdict: Verdict | None  # on the ranks; none where none is stuck, has failed or is gone
    lines: Sequence[str]  # what each of them was doing
    recorders: int  # how many files are torch's


def read(directory: Path) -> Dump:
    """Read the files of all ranks.

    Raises:
        ValueError: there are none, or one is of something else.
    """
    snapshots = {snapshot.state.rank: snapshot for snapshot in Snapshot.load_all(directory)}
    recorders = dict(_recorders(directory))
    if not snapshots and not recorders:
        raise ValueError(
            f"{directory} has no files of ranks. Run the job with ZEROSYNC_DUMP_DIR={directory}, and on NCCL with"
            f" TORCH_FR_DUMP_TEMP_FILE={directory}/nccl_trace_rank_ too."
        )
    world_size = max([snapshot.world_size for snapshot in snapshots.values()] + [rank + 1 for rank in recorders])
    newest = max((snapshot.written for snapshot in snapshots.values()), default=0.0)
    silence = _SILENT * interval(world_size)
    states = [
        _state(rank, snapshots.get(rank), recorders.get(rank, ()), newest - silence) for rank in range(world_size)
    ]
    verdict = judge(states) if _is_stuck(states, snapshots) else None
    if verdict is not None and verdict.cause == "told before":
        seen = (f"; rank {each.rank} was last seen{each.place}" for each in states if each.phase is Phase.GONE)
        verdict = replace(verdict, text=verdict.text + "".join(seen))
    goes_on = newest >= time.time() - silence or all(each.phase is Phase.FINISHED for each in states)
    if verdict is None and snapshots and not goes_on:
        verdict = Verdict("ended from outside", (), _ENDED)
    return Dump(verdict, lines_of(states), len(recorders))


def check(directory: Path) -> list[Finding]:
    """Return the verdict on the run that has written ``directory``, and what its ranks were doing, as :func:`read`."""
    dump = read(directory)
    ranks = [TOPIC.note(line.strip()) for line in dump.lines]
    if dump.verdict is None:
        return [TOPIC.ok("no rank is stuck, has failed or is gone"), *ranks]
    return [TOPIC.error(dump.verdict.text, REMEDY), *ranks]


def _state(rank: int, snapshot: Snapshot | None, recorded: tuple[Recorded, ...], silent: float) -> RankState:
    """Return what is known of a rank; if its file was written before ``silent``, its process has ended."""
    if snapshot is None:
        return RankState(rank, recorded=recorded) if recorded else RankState(rank, Phase.GONE)
    state = snapshot.state
    if recorded:
        labels = {(each.group, each.name, each.number): each.label for each in state.recorded}
        named = (replace(each, label=labels.get((each.group, each.name, each.number), "")) for each in recorded)
        state = replace(state, recorded=tuple(named))
    if snapshot.written < silent and state.phase not in (Phase.FAILED, Phase.FINISHED) and not state.verdict:
        return replace(state, phase=Phase.GONE, seconds=-1, waits_for="")
    return state


def _recorders(directory: Path) -> Iterable[tuple[int, tuple[Recorded, ...]]]:
    for path in sorted(directory.iterdir()):
        if path.is_file() and not path.suffix and (rank := _TORCHS.fullmatch(path.name)):
            yield int(rank[1]), read_file(path)


def _is_stuck(states: Sequence[RankState], snapshots: dict[int, Snapshot]) -> bool:
    if not snapshots or any(each.phase in (Phase.FAILED, Phase.GONE) or each.verdict for each in states):
        return True
    return any(
        snapshot.written - snapshot.since >= _STUCK and snapshot.state.waits_for for snapshot in snapshots.values()
    )
