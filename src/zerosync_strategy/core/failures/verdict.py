"""One verdict from what all ranks say: which of them is the cause, and where it is (W4).

In this order: a rank that has raised an exception of its own; one whose process has ended; one that does not
communicate while others wait for it; and where all wait, but not for the same, one that does otherwise than in its own
last window, or else those that are fewer than the rest. Two ranks of which neither departs from what it did before are
both named.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace

from zerosync_strategy.core.failures.answers import ranks_text
from zerosync_strategy.core.failures.state import RankState, Recorded


@dataclass(frozen=True)
class Verdict:
    """Why ranks wait in vain.

    Attributes:
        cause: one of the words in the table of docs/failures.md.
        ranks: that are the cause.
        text: a sentence with all of it.
        parameters: of the gather or reduction that those ranks wait for, or that is waited for.
        module: whose code runs on them.
        line: of the program, where they are.
        window, backward: in which they are; 0 where that is not known.
    """

    cause: str
    ranks: tuple[int, ...]
    text: str
    parameters: str = ""
    module: str = ""
    line: str = ""
    window: int = 0
    backward: int = 0


def judge(states: Sequence[RankState]) -> Verdict | None:
    """Return the verdict on the ranks of a job, or ``None`` where none of them waits, has failed or is gone."""
    states = [state.with_pending() for state in states]
    if told := next((state.verdict for state in states if state.verdict), ""):
        return Verdict("told before", (), told)
    failed = [state for state in states if state.failure]
    gone = [state for state in states if state.is_gone]
    waiting = [state for state in states if state.waits_for and not state.failure]
    if failed:
        return _verdict("exception", failed, waiting, lambda state: f"raised {state.failure}")
    if gone:
        return _verdict("process ended", gone, waiting, lambda _: "has ended without an error, or cannot be reached")
    if not waiting or len(states) < 2:
        return None
    if finished := [state for state in states if state.has_finished]:
        return _verdict("program ended", finished, waiting, lambda _: "has come to the end of its program")
    if absent := [state for state in states if not state.waits_for]:
        return _verdict("elsewhere", absent, waiting, _is_elsewhere)
    return _all_wait(states)


def _all_wait(states: Sequence[RankState]) -> Verdict:
    calls = _grouped(states, lambda state: (state.steps, state.backward, state.waits_for))
    if len(calls) == 1:
        return _same_call(states)
    departed = [state for state in states if state.departure]
    if 0 < len(departed) < len(states):
        others = [state for state in states if not state.departure]
        cause = "other backwards" if "backward" in departed[0].departure else "other modules"
        return _verdict(cause, departed, others, lambda state: f"{state.departure}, and waits for {state.waits_for}")
    outside = [state for state in states if not _is_in_step(state)]
    if len(calls[0]) < len(calls[1]):
        chosen = calls[0]
    elif 0 < len(outside) < len(states):
        chosen = outside
    else:
        chosen = list(states)
    cause = "other call" if any(not _is_in_step(state) for state in chosen) else "other order"
    others = [state for state in states if state not in chosen]
    alone = "alone " if len(chosen) == 1 else ""
    verdict = _verdict(cause, chosen, others, lambda state: f"{alone}waits for {state.waits_for}")
    return replace(verdict, text=verdict.text + _numbers(states))


def _same_call(states: Sequence[RankState]) -> Verdict:
    """All wait for the same: only sizes may differ, which torch's flight recorder has."""
    by_what = _grouped(states, lambda state: _what(state.pending))
    if len(by_what) > 1 and all(state.pending for state in states):
        chosen = by_what[0] if len(by_what[0]) < len(by_what[1]) else list(states)
        others = [state for state in states if state not in chosen]
        return _verdict("other sizes", chosen, others, lambda state: f"has issued {_text(state.pending)}")
    return _verdict(
        "same call", states, [], lambda state: f"waits for {state.waits_for}, as all others, and nothing arrives:"
        " look at the network between them (zerosync doctor --link), or give the process group a longer timeout"
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
            at = (
                f"{ranks_text([state.rank for state in group])} {_text(of_group.get(group[0].rank))}"
                for group in by_text
            )
            return f"; the last in torch's flight recorder: {', '.join(list(at)[:3])}"
    return ""


def _what(recorded: Recorded | None) -> Hashable:
    return recorded and (recorded.group, recorded.number, recorded.name, recorded.sizes)


def _text(recorded: Recorded | None) -> str:
    return recorded.text if recorded else "nothing"


def _is_in_step(state: RankState) -> bool:
    """Whether the rank is in what every optimizer step has."""
    of_step = ("the forward", "the backward", "a backward", "the reduction", "the optimizer step", "the gather of")
    return state.activity.startswith(of_step)


def _grouped(states: Iterable[RankState], key: Callable[[RankState], Hashable]) -> list[list[RankState]]:
    """Return the states by ``key``, the smallest groups first."""
    groups: dict[Hashable, list[RankState]] = {}
    for state in states:
        groups.setdefault(key(state), []).append(state)
    return sorted(groups.values(), key=len)


def _verdict(
    cause: str, chosen: Sequence[RankState], others: Sequence[RankState], did: Callable[[RankState], str]
) -> Verdict:
    """Return the verdict that ``chosen`` are the cause, each in the words of ``did``; ``others`` wait."""
    sentences = [
        f"{ranks_text([state.rank for state in group])} {did(group[0])}{where(group[0])}"
        for group in _alike(chosen, did)
    ]
    if others:
        group = _alike(others, lambda state: state.waits_for)[-1]
        wait = "waits" if len(group) == 1 else "wait"
        sentences.append(
            f"{ranks_text([state.rank for state in group])} {wait} for {group[0].waits_for}{where(group[0])}"
        )
    first, waits = chosen[0], others[0] if others else chosen[0]
    return Verdict(
        cause,
        tuple(sorted(state.rank for state in chosen)),
        "; ".join(sentences[:3]),
        first.parameters or waits.parameters,
        first.module or waits.module,
        first.line or waits.line,
        (first.steps if first.steps >= 0 else waits.steps) + 1,
        first.backward if first.steps >= 0 else waits.backward,
    )


def _alike(states: Sequence[RankState], key: Callable[[RankState], str]) -> list[list[RankState]]:
    return _grouped(states, lambda state: (key(state), where(state)))


def _is_elsewhere(state: RankState) -> str:
    if state.steps < 0 and not state.activity and not state.line:  # from torch's flight recorder alone
        return f"has issued nothing after {_text(next(iter(state.recorded), None))}"
    where = f"in {state.activity}" if state.activity else "outside of the engine"
    return f"is {where} and does not communicate"


def where(state: RankState) -> str:
    """Return the window, backward, module and line of a rank, as far as they are known."""
    parts = [
        f"window {state.steps + 1}" if state.steps >= 0 else "",
        f"backward {state.backward}" if state.backward else "",
        f"module {state.module!r}" if state.module else "",
        f"at {state.line}" if state.line else "",
    ]
    return "".join(f", {part}" for part in parts if part)
