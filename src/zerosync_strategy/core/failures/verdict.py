"""What is concluded from the states of all ranks: the lines of an error, and one verdict, on the cause (W4).

In this order: a rank that has raised an exception of its own; one whose process has ended; one that does not
communicate while others wait for it; where all wait, but not for the same, one that departs from its own last window,
or else those that are fewer than the rest. Two ranks of which neither departs are both named.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from zerosync_strategy.core.failures.doing import Cause, Doing
from zerosync_strategy.core.failures.flight_recorder import Recorded
from zerosync_strategy.core.failures.rank_state import Phase, RankState

VERDICT = "Verdict: "
"""How the line of the verdict begins."""
_ONE_EACH = 8
"""Up to so many ranks have a line each."""
_LINES = 20
_RUNS = 8
_CHARACTERS = 400
_NUMBER = re.compile(r"\d+")
OTHER_BACKWARDS = (
    "Where backwards reduce (grad_memory_budget, coalesce=False, or one that is known to be the last), all ranks make"
    " as many in each optimizer step. Let a rank that has nothing left run one of its loss times 0; or leave these"
    " options out, and set overlap_last=False."
)
"""What to do about ranks that reduce in different backwards. In the text of a verdict, in place of other advice."""
FEWER_BATCHES = (
    "Had it fewer batches than the others? Give each rank as many (DistributedSampler, drop_last=True), or let a rank"
    " that has nothing left run a loss times 0."
)
"""What may be the cause where a rank has ended, or is between two windows, and others are inside of one."""


@dataclass(frozen=True)
class Verdict:
    """Why ranks wait in vain: because of ``ranks``."""

    cause: Cause
    ranks: tuple[int, ...]
    text: str


def report(states: Sequence[RankState]) -> list[str]:
    """Return the lines of an error: the verdict on the ranks of a job, and what each of them does."""
    verdict = judge(states)
    return [f"{VERDICT}{verdict.text}", *lines_of(states)] if verdict else lines_of(states)


# ---- the verdict -----------------------------------------------------------------------------------------------------


def judge(states: Sequence[RankState]) -> Verdict | None:
    """Return the verdict on the ranks of a job, or ``None`` where none of them waits, has failed or is gone."""
    verdict = _judge(states)
    if verdict is None or verdict.cause not in (Cause.ENDED, Cause.ELSEWHERE, Cause.OTHER_CALL):
        return verdict
    inside = [state for state in states if state.phase is not Phase.GONE and state.backward]
    ended = [state for state in states if state.doing is Doing.END]
    if 0 < len(inside) < len(states) or 0 < len(ended) < len(states):
        return replace(verdict, text=f"{verdict.text}. {FEWER_BATCHES}")
    return verdict


def _judge(states: Sequence[RankState]) -> Verdict | None:
    states = [state.with_pending() for state in states]
    if told := next((state.verdict for state in states if state.verdict), ""):
        return Verdict(Cause.TOLD_BEFORE, (), told)
    failed, gone = ([state for state in states if state.phase is phase] for phase in (Phase.FAILED, Phase.GONE))
    waiting = [state for state in states if state.waits_for and state.phase is not Phase.FAILED]
    if failed:
        return _verdict(Cause.EXCEPTION, failed, waiting, lambda state: f"raised {state.failure}")
    if gone:
        return _verdict(Cause.ENDED, gone, waiting, lambda _: "has ended without an error, or cannot be reached")
    if not waiting or len(states) < 2:
        return None
    if absent := [state for state in states if not state.waits_for]:
        return _verdict(Cause.ELSEWHERE, absent, waiting, _is_elsewhere)
    verdict = _all_wait(states)
    if _reduce_apart(states):
        return replace(verdict, cause=Cause.OTHER_BACKWARDS, text=f"{verdict.text}. {OTHER_BACKWARDS}")
    return verdict


def _all_wait(states: Sequence[RankState]) -> Verdict:
    calls = _grouped(states, lambda state: (state.steps, state.backward, state.waits_for))
    if len(calls) == 1:
        return _same_call(states)
    departed = [state for state in states if state.departure]
    if 0 < len(departed) < len(states):
        others = [state for state in states if not state.departure]
        cause = departed[0].departs_by
        return _verdict(cause, departed, others, lambda state: f"{state.departure}, and waits for {state.waits_for}")
    outside = [state for state in states if not state.doing.is_of_step]
    if len(calls[0]) < len(calls[1]):
        chosen = calls[0]
    elif 0 < len(outside) < len(states):
        chosen = outside
    else:
        chosen = list(states)
    cause = Cause.OTHER_ORDER if all(state.doing.is_of_step for state in chosen) else Cause.OTHER_CALL
    others = [state for state in states if state not in chosen]
    alone = "alone " if len(chosen) == 1 else ""
    verdict = _verdict(cause, chosen, others, lambda state: f"{alone}waits for {state.waits_for}")
    return replace(verdict, text=verdict.text + _numbers(states))


def _reduce_apart(states: Sequence[RankState]) -> bool:
    """Whether ranks reduce in different backwards of one window, or one does while others are in the step."""
    if len({state.steps for state in states}) > 1:
        return False
    reducing = {state.backward for state in states if state.reduces}
    in_step = {state.backward for state in states if state.doing in (Doing.REDUCTION, Doing.STEP)}
    return bool(reducing) and len(reducing | in_step) > 1


def _same_call(states: Sequence[RankState]) -> Verdict:
    """All wait for the same: only sizes may differ, which torch's flight recorder has."""
    by_what = _grouped(states, lambda state: _what(state.pending))
    if len(by_what) > 1 and all(state.pending for state in states):
        chosen = by_what[0] if len(by_what[0]) < len(by_what[1]) else list(states)
        others = [state for state in states if state not in chosen]
        return _verdict(Cause.OTHER_SIZES, chosen, others, lambda state: f"has issued {_text(state.pending)}")
    return _verdict(
        Cause.SAME_CALL, states, [], lambda state: f"waits for {state.waits_for}, as all others, and nothing arrives:"
        " look at the network between them, or give the process group a longer timeout"
    )  # fmt: skip


def _numbers(states: Sequence[RankState]) -> str:
    """Return, where torch's flight recorder has ranks at different collectives of one group, at which they are."""
    last: dict[str, dict[int, Recorded]] = {}
    for state in states:
        for each in state.recorded[::-1]:  # of each group the last comes first
            last.setdefault(each.group, {})[state.rank] = each
    for of_group in last.values():
        if len({each.number for each in of_group.values()}) > 1:
            by_text = _grouped(states, lambda state: _text(of_group.get(state.rank)))  # noqa: B023
            at = (f"{_ranks_of(group)} {_text(of_group.get(group[0].rank))}" for group in by_text)
            return f"; the last in torch's flight recorder: {', '.join(list(at)[:3])}"
    return ""


def _what(recorded: Recorded | None) -> Hashable:
    return recorded and (recorded.group, recorded.number, recorded.name, recorded.sizes)


def _text(recorded: Recorded | None) -> str:
    return recorded.text if recorded else "nothing"


def _verdict(
    cause: Cause, chosen: Sequence[RankState], others: Sequence[RankState], did: Callable[[RankState], str]
) -> Verdict:
    """Return the verdict that ``chosen`` are the cause, each in the words of ``did``; ``others`` wait."""
    groups = _grouped(chosen, lambda state: (did(state), state.place))
    sentences = [f"{_ranks_of(group)} {did(group[0])}{group[0].place}" for group in groups]
    if others:
        group = _grouped(others, lambda state: (state.waits_for, state.place))[-1]
        wait = "waits" if len(group) == 1 else "wait"
        sentences.append(f"{_ranks_of(group)} {wait} for {group[0].waits_for}{group[0].place}")
    return Verdict(cause, tuple(sorted(state.rank for state in chosen)), "; ".join(sentences[:3]))


def _is_elsewhere(state: RankState) -> str:
    where = f"in {state.activity}" if state.activity else "outside of the engine"
    return f"is {where} and does not communicate"


# ---- a line per rank -------------------------------------------------------------------------------------------------


def lines_of(states: Iterable[RankState]) -> list[str]:
    """Return a line per rank, or for many ranks at most 20, each for the ranks that say the same: the few first.

    Times never keep ranks apart. Counts of steps and backwards do while the lines suffice, and else are ranges; then
    all numbers are.
    """
    states = sorted(states, key=lambda state: state.rank)
    if len(states) <= _ONE_EACH:
        return [
            f"  rank {state.rank}: {_merged([state])}{f' (pid {state.pid})' if state.pid else ''}" for state in states
        ]
    for has_numbers in ((True, True, True), (True, False, True), (False, False, False)):
        groups = _grouped(states, lambda state: tuple(
            part if exact else _NUMBER.sub("", part)
            for part, exact in zip(state.parts[:1] + state.parts[2:], has_numbers, strict=True)  # noqa: B023
        ))  # fmt: skip
        if len(groups) <= _LINES:
            return list(map(_line, groups))
    rest = sorted(state.rank for group in groups[_LINES - 2 : -1] for state in group)
    middle = f"  {ranks_text(rest)}: {len(groups) - _LINES + 1} other answers"
    return [*map(_line, groups[: _LINES - 2]), middle, _line(groups[-1])]


def ranks_text(ranks: Sequence[int]) -> str:
    """Return sorted ``ranks`` as "rank 3" or "ranks 0-17, 19-1023"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    runs = [[rank for _, rank in run] for _, run in groupby(enumerate(ranks), lambda pair: pair[1] - pair[0])]
    shown = ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs[:_RUNS])
    left_out = sum(map(len, runs[_RUNS:]))
    return f"ranks {shown}" + (f" and {left_out} more" if left_out else "")


def _line(group: Sequence[RankState]) -> str:
    first = group[0]
    process = f" (pid {first.pid} on {first.host})" if first.pid and len(group) == 1 else ""
    return f"  {_ranks_of(group)}: {_merged(group)}{process}"


def _merged(group: Sequence[RankState]) -> str:
    """Return the line of ranks whose parts differ in numbers only, or in that one has no time."""
    parts = map(_with_ranges, zip(*(state.parts for state in group), strict=True))
    return " ".join("".join(parts).split())[:_CHARACTERS]


def _with_ranges(texts: Sequence[str]) -> str:
    """Return texts that differ in their numbers only as one, with ranges for the numbers that differ."""
    if len({_NUMBER.sub("", text) for text in texts}) > 1:
        return ""  # times: one rank gives none
    numbers = zip(*(map(int, _NUMBER.findall(text)) for text in set(texts)), strict=True)
    ranges = iter(
        [f"{min(of_all)}" if len(set(of_all)) == 1 else f"{min(of_all)} to {max(of_all)}" for of_all in numbers]
    )
    return _NUMBER.sub(lambda _: next(ranges), texts[0])


def _ranks_of(states: Sequence[RankState]) -> str:
    return ranks_text([state.rank for state in states])


def _grouped(states: Iterable[RankState], key: Callable[[RankState], Hashable]) -> list[list[RankState]]:
    """Return the states by ``key``: the smallest groups first, those of one size by rank."""
    groups: dict[Hashable, list[RankState]] = {}
    for state in states:
        groups.setdefault(key(state), []).append(state)
    return sorted(groups.values(), key=len)
