"""One verdict on the cause of a hang, from the states of all ranks (W4). ``words.py`` puts it into a sentence.

The verdict names the first of these that exists: a rank that has raised an exception of its own; a rank whose process
has ended; a rank that does not communicate while others wait for it. If all ranks wait, but for different things, it
names a rank whose window differs from its last one, or else the minority; of two ranks, both.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace

from zerosync_strategy.core.failures.flight_recorder import Issued, Key, Recorded
from zerosync_strategy.core.failures.rank_state import Advice, Cause, Doing, Phase, RankState


@dataclass(frozen=True)
class Verdict:
    """Why ranks wait in vain.

    Attributes:
        chosen: the ranks that the verdict names as the cause.
        others: the ranks that wait for them.
        shown: the cause that describes what ``chosen`` do, if it differs from ``cause``.
        departed: ``chosen`` depart from their own last window.
        states: of all ranks, if the sentence needs them.
        reported: an earlier verdict that a rank has reported already, with its advice.
    """

    cause: Cause
    chosen: Sequence[RankState] = ()
    others: Sequence[RankState] = ()
    shown: Cause | None = None
    departed: bool = False
    advice: Advice | None = None
    states: Sequence[RankState] = ()
    reported: str = ""

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted(state.rank for state in self.chosen))


def judge(states: Sequence[RankState]) -> Verdict | None:
    """Return the verdict on the ranks of a job; ``None`` if none of them waits in vain, has failed or is gone."""
    states = [state.with_pending() for state in states]
    verdict = _judge(states)
    if verdict is None or verdict.cause not in (Cause.ENDED, Cause.ELSEWHERE, Cause.OTHER_CALL):
        return verdict
    inside = [state for state in states if state.phase is not Phase.GONE and state.backward]
    ended = [state for state in states if state.doing is Doing.END]
    if 0 < len(inside) < len(states) or 0 < len(ended) < len(states):
        return replace(verdict, advice=Advice.FEWER_BATCHES)
    return verdict


def is_certain(states: Sequence[RankState], asked: Sequence[Key]) -> bool:
    """Return whether the verdict holds, even if some rank only computes, reads data, saves or compiles.

    It does if a rank has raised an exception, has reported a verdict, or its process is known to have ended; and if all
    ranks wait for each other: what each waits for, a blocked rank has not issued.

    Args:
        asked: the collectives for which all ranks were waiting in the last inquiry, and still do.
    """
    if any(state.phase is Phase.FAILED or state.verdict or _has_ended(state) for state in states):
        return True
    return len(states) > 1 and all(_in_vain(state, states, asked) for state in states)


def _in_vain(state: RankState, states: Sequence[RankState], asked: Sequence[Key]) -> bool:
    """Return whether ``state`` waits for what another rank has not issued and, blocked itself, does not issue."""
    wait = state.wait
    if wait is None or state.phase is not Phase.RUNNING or wait.key not in asked:
        return False
    index = asked.index(wait.key)
    for other in states:
        found = other.issued[index] if index < len(other.issued) else Issued.SAME
        if found == Issued.OTHER:
            return True
        blocked = wait.blocks and other.wait is not None and other.wait.blocks
        if found == Issued.NOT_YET and blocked and other.rank in wait.members:
            return True
    return False


def _has_ended(state: RankState) -> bool:
    return state.phase is Phase.GONE and state.pid != 0


def _judge(states: Sequence[RankState]) -> Verdict | None:
    if reported := next((state for state in states if state.verdict), None):
        advice = Advice.OTHER_BACKWARDS if reported.advises else None
        return Verdict(Cause.REPORTED_BEFORE, advice=advice, reported=reported.verdict)
    failed, gone = ([state for state in states if state.phase is phase] for phase in (Phase.FAILED, Phase.GONE))
    gone = list(filter(_has_ended, gone)) or gone  # others may be busy
    waiting = [state for state in states if state.waits_for and state.phase is not Phase.FAILED]
    if failed or gone:
        return Verdict(Cause.EXCEPTION if failed else Cause.ENDED, failed or gone, waiting)
    if not waiting or len(states) < 2:
        return None
    if absent := [state for state in states if not state.waits_for]:
        return Verdict(Cause.ELSEWHERE, absent, waiting)
    verdict = _all_wait(states)
    if _reduce_apart(states):
        return replace(verdict, cause=Cause.OTHER_BACKWARDS, shown=verdict.cause, advice=Advice.OTHER_BACKWARDS)
    return verdict


def _all_wait(states: Sequence[RankState]) -> Verdict:
    calls = grouped(states, lambda state: (state.steps, state.backward, state.waits_for))
    if len(calls) == 1:
        return _same_call(states)
    departed = [state for state in states if state.departure]
    if 0 < len(departed) < len(states):
        others = [state for state in states if not state.departure]
        return Verdict(departed[0].departs_by, departed, others, departed=True)
    outside = [state for state in states if not state.doing.is_of_step]
    if len(calls[0]) < len(calls[1]):
        chosen = calls[0]
    elif 0 < len(outside) < len(states):
        chosen = outside
    else:
        chosen = list(states)
    cause = Cause.OTHER_ORDER if all(state.doing.is_of_step for state in chosen) else Cause.OTHER_CALL
    return Verdict(cause, chosen, [state for state in states if state not in chosen], states=states)


def _reduce_apart(states: Sequence[RankState]) -> bool:
    """Return whether ranks reduce in different backwards of one window, or only some already in the step."""
    if len({state.steps for state in states}) > 1:
        return False
    reducing = {state.backward for state in states if state.reduces}
    in_step = {state.backward for state in states if state.doing in (Doing.REDUCTION, Doing.STEP)}
    return bool(reducing) and len(reducing | in_step) > 1


def _same_call(states: Sequence[RankState]) -> Verdict:
    """Return the verdict if all wait for the same: only sizes can differ, as torch's flight recorder shows."""
    by_what = grouped(states, lambda state: _what(state.pending))
    if len(by_what) > 1 and all(state.pending for state in states):
        chosen = by_what[0] if len(by_what[0]) < len(by_what[1]) else list(states)
        return Verdict(Cause.OTHER_SIZES, chosen, [state for state in states if state not in chosen])
    return Verdict(Cause.SAME_CALL, states)


def _what(recorded: Recorded | None) -> Hashable:
    return recorded and (recorded.group, recorded.number, recorded.name, recorded.sizes)


def grouped(states: Iterable[RankState], key: Callable[[RankState], Hashable]) -> list[list[RankState]]:
    """Return the states grouped by ``key``: smallest groups first, groups of the same size by rank."""
    groups: dict[Hashable, list[RankState]] = {}
    for state in states:
        groups.setdefault(key(state), []).append(state)
    return sorted(groups.values(), key=len)
