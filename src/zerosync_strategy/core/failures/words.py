"""The text of errors about ranks that are missing or disagree (W4): verdict, a line per rank, remedy."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import NamedTuple

from zerosync_strategy.core.failures.flight_recorder import Key, Recorded
from zerosync_strategy.core.failures.rank_state import Advice, Cause, Phase, RankState
from zerosync_strategy.core.failures.verdict import Verdict, grouped, is_certain, judge

_ONE_EACH = 8
"""Up to this number of ranks, each has its own line."""
_LINES = 20
_RUNS = 8
_CHARACTERS = 400
_NUMBER = re.compile(r"\d+")
ADVICE = {
    Advice.OTHER_BACKWARDS: (
        "Where backwards reduce (grad_memory_budget, coalesce=False, or one that is known to be the last), all ranks"
        " make as many in each optimizer step. Let a rank that has nothing left run one of its loss times 0; or leave"
        " these options out, and set overlap_last=False."
    ),
    Advice.FEWER_BATCHES: (
        "Had it fewer batches than the others? Give each rank as many (DistributedSampler, drop_last=True), or let a"
        " rank that has nothing left run a loss times 0."
    ),
}
_ADVICE = (
    "Either a rank has ended, for the reason that it printed, or the ranks disagree: each must make the same"
    " optimizer steps, save and load checkpoints and gather parameters or a state_dict on all ranks, not on one"
    " (`if rank == 0:`), and under ZeRO-3 run the same modules in the same order, unless all parameters are"
    " held (param_memory_budget='all'). A rank that is only slow needs a longer timeout of the process group."
)
"""The general advice, for verdicts without their own."""


class Report(NamedTuple):
    """The report on all ranks, for an error.

    Attributes:
        verdict: a sentence; empty if there is no verdict.
        lines: on the ranks.
        advises: the verdict contains its own advice.
        certain: the verdict holds, whatever busy ranks do next.
    """

    verdict: str
    lines: list[str]
    advises: bool = False
    certain: bool = False

    @property
    def text(self) -> str:
        return "\n".join([*([f"Verdict: {self.verdict}"] if self.verdict else []), *self.lines])


def report(states: Sequence[RankState], asked: Sequence[Key] = ()) -> Report:
    """Return the verdict on the ranks of a job, and the lines on what they do. ``asked``: as of :func:`is_certain`."""
    verdict = judge(states)
    if verdict is None:
        return Report("", lines_of(states))
    advises = verdict.advice is Advice.OTHER_BACKWARDS
    return Report(sentence(verdict), lines_of(states), advises, is_certain(states, asked))


def error_text(rank: int, what: str, position: str, error: BaseException, found: Report) -> str:
    """Return the error text for a ``rank`` whose communication failed with ``error`` in ``what``."""
    first = str(error).strip().partition("\n")[0]
    first = re.sub(r"^\[\S*\] ", "", first).partition(". ")[0].rstrip(".")  # removes the place in gloo's source
    return _with_advice(f"Rank {rank} lost the other ranks in {what}, {position}: {first}.\n{found.text}", found)


def waiting_text(seconds: float, found: Report) -> str:
    """Return what a rank prints that has waited for others for so many ``seconds``."""
    text = f"ZeroSync: this rank has waited for others for {seconds:.0f} s.\n{found.text}"
    return _with_advice(text, found) if found.certain else text


def _with_advice(text: str, found: Report) -> str:
    return text if found.advises else f"{text}\n{_ADVICE}"


# ---- the verdict -----------------------------------------------------------------------------------------------------


def sentence(verdict: Verdict) -> str:
    """Return the verdict in words."""
    if verdict.reported:
        return verdict.reported
    groups = grouped(verdict.chosen, lambda state: (_did(verdict, state), _place(state)))
    sentences = [f"{_ranks_of(group)} {_did(verdict, group[0])}{_place(group[0])}" for group in groups]
    if verdict.others:
        group = grouped(verdict.others, lambda state: (state.waits_for, _place(state)))[-1]
        wait = "waits" if len(group) == 1 else "wait"
        sentences.append(f"{_ranks_of(group)} {wait} for {group[0].waits_for}{_place(group[0])}")
    text = "; ".join(sentences[:3]) + _numbers(verdict.states)
    return text if verdict.advice is None else f"{text}. {ADVICE[verdict.advice]}"


def _did(verdict: Verdict, state: RankState) -> str:
    if verdict.departed:
        return f"{state.departure}, and waits for {state.waits_for}"
    match verdict.shown or verdict.cause:
        case Cause.EXCEPTION:
            return f"raised {state.failure}"
        case Cause.ENDED:
            return "has ended without an error" + ("" if state.pid else ", or cannot be reached")
        case Cause.ELSEWHERE:
            where = f"in {state.activity}" if state.activity else "outside of the engine"
            return f"is {where} and does not communicate"
        case Cause.OTHER_SIZES:
            return f"has issued {_recorded(state.pending)}"
        case Cause.SAME_CALL:
            return (
                f"waits for {state.waits_for}, as all others, and nothing arrives: look at the network between them, or"
                " give the process group a longer timeout"
            )
    return f"{'alone ' if len(verdict.chosen) == 1 else ''}waits for {state.waits_for}"


def _numbers(states: Sequence[RankState]) -> str:
    """Return at which collective each rank is, if torch's flight recorder shows different ones in one group."""
    last: dict[str, dict[int, Recorded]] = {}
    for state in states:
        for each in state.recorded[::-1]:  # reversed, so that the last collective of a group overwrites
            last.setdefault(each.group, {})[state.rank] = each
    for of_group in last.values():
        if len({each.number for each in of_group.values()}) > 1:
            by_text = grouped(states, lambda state: _recorded(of_group.get(state.rank)))  # noqa: B023
            at = (f"{_ranks_of(group)} {_recorded(of_group.get(group[0].rank))}" for group in by_text)
            return f"; the last in torch's flight recorder: {', '.join(list(at)[:3])}"
    return ""


def _recorded(recorded: Recorded | None) -> str:
    return recorded.text if recorded else "nothing"


def _place(state: RankState) -> str:
    known = [
        f"window {state.steps + 1}" if state.steps >= 0 else "",
        f"backward {state.backward}" if state.backward else "",
        f"module {state.module!r}" if state.module else "",
        f"at {state.line}" if state.line else "",
    ]
    return "".join(f", {each}" for each in known if each)


# ---- a line per rank -------------------------------------------------------------------------------------------------


def lines_of(states: Iterable[RankState]) -> list[str]:
    """Return a line per rank. For many ranks, return at most 20 lines, one per group of equal states, smallest first.

    Times never separate groups. Counts of steps and backwards separate them while the lines suffice, and are merged to
    ranges otherwise; as a last resort, so are all numbers.
    """
    states = sorted(states, key=lambda state: state.rank)
    if len(states) <= _ONE_EACH:
        return [
            f"  rank {state.rank}: {_merged([state])}{f' (pid {state.pid})' if state.pid else ''}" for state in states
        ]
    for has_numbers in ((True, True, True), (True, False, True), (False, False, False)):
        groups = grouped(states, lambda state: tuple(
            part if exact else _NUMBER.sub("", part)
            for part, exact in zip(_parts(state)[:1] + _parts(state)[2:], has_numbers, strict=True)  # noqa: B023
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
    """Return one line for ranks whose parts differ only in numbers, or in having a time."""
    parts = map(_with_ranges, zip(*(_parts(state) for state in group), strict=True))
    return " ".join("".join(parts).split())[:_CHARACTERS]


def _with_ranges(texts: Sequence[str]) -> str:
    """Merge texts that differ only in numbers into one, with ranges for the numbers that differ."""
    if len({_NUMBER.sub("", text) for text in texts}) > 1:
        return ""  # times, of which one rank has none
    numbers = zip(*(map(int, _NUMBER.findall(text)) for text in set(texts)), strict=True)
    ranges = iter(
        [f"{min(of_all)}" if len(set(of_all)) == 1 else f"{min(of_all)} to {max(of_all)}" for of_all in numbers]
    )
    return _NUMBER.sub(lambda _: next(ranges), texts[0])


def _ranks_of(states: Sequence[RankState]) -> str:
    return ranks_text([state.rank for state in states])


def _parts(state: RankState) -> tuple[str, str, str, str]:
    """Return the rank's activity, its duration, its progress, and the line of its program."""
    doing = f"in {state.activity}" if state.activity else "outside of the engine"
    doing += f", calling torch.distributed.{state.call}()" if state.call else ""
    if state.failure:
        doing = f"has stopped: {state.failure}"
    elif state.phase is Phase.GONE:
        doing = "gave no answer: its process has ended" + ("" if state.pid else ", or cannot be reached")
    duration = f" for {state.seconds} s" if state.seconds >= 0 else ""
    return doing, duration, state.position and f", {state.position}", state.line and f", at {state.line}"
