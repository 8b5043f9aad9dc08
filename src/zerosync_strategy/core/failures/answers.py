"""What ranks say that they are doing, as the lines of an error: the few that differ first, the many in one line."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, fields
from itertools import groupby

from zerosync_strategy.core.failures.state import RankState

_ONE_EACH = 8
"""Up to so many ranks have a line each."""
_LINES = 20
_RUNS = 8
_CHARACTERS = 400
_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True)
class Answer:
    """What one rank says. The parts of its line, in their order.

    Attributes:
        rank: whose answer it is.
        activity: what it does, without the time; or why it does nothing.
        seconds: for how long.
        position: how far it has come.
        place: where the user's own code is.
        pid, host: its process.
        state: the same and more, for the verdict.
    """

    rank: int
    activity: str
    seconds: str = ""
    position: str = ""
    place: str = ""
    pid: int = 0
    host: str = ""
    state: RankState | None = None

    def encode(self) -> str:
        """Return a line of text."""
        words = {each.name: getattr(self, each.name) for each in fields(self)}
        return json.dumps(words | {"state": self.state and self.state.encode()}) + "\n"

    @staticmethod
    def decode(line: str) -> Answer:
        """Return the answer that ``line`` was encoded from."""
        words = json.loads(line)
        return Answer(**words | {"state": words["state"] and RankState.decode(words["state"])})


def no_answer(rank: int) -> Answer:
    """Return what is said of a rank that says nothing."""
    gone = RankState(rank, is_gone=True)
    return Answer(rank, "gave no answer: its process has ended, or cannot be reached", state=gone)


def lines_of(answers: Iterable[Answer]) -> list[str]:
    """Return a line per rank, or for many ranks at most 20, each for the ranks that say the same.

    Times never keep ranks apart. Counts of steps and backwards do while the lines suffice, and else are ranges; then
    all numbers are.
    """
    answers = sorted(answers, key=lambda answer: answer.rank)
    if len(answers) <= _ONE_EACH:
        return [f"  rank {answer.rank}: {_text([answer])}{_process(answer)}" for answer in answers]
    groups: list[list[Answer]] = []
    for key in (_exact, _but_for_counts, _but_for_numbers):
        groups = _grouped(answers, key)
        if len(groups) <= _LINES:
            break
    else:
        rest = sorted((answer for group in groups[_LINES - 2 : -1] for answer in group), key=lambda one: one.rank)
        middle = f"  {ranks_text([answer.rank for answer in rest])}: {len(groups) - _LINES + 1} other answers"
        return [*map(_line, groups[: _LINES - 2]), middle, _line(groups[-1])]
    return list(map(_line, groups))


def ranks_text(ranks: Sequence[int]) -> str:
    """Return sorted ``ranks`` as "rank 3" or "ranks 0-17, 19-1023"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    runs = [[rank for _, rank in run] for _, run in groupby(enumerate(ranks), lambda pair: pair[1] - pair[0])]
    shown = ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs[:_RUNS])
    left_out = sum(map(len, runs[_RUNS:]))
    return f"ranks {shown}" + (f" and {left_out} more" if left_out else "")


def _grouped(answers: Sequence[Answer], key: Callable[[Answer], Hashable]) -> list[list[Answer]]:
    """Return the answers by ``key``: the smallest groups first, those of one size by rank."""
    groups: dict[Hashable, list[Answer]] = {}
    for answer in answers:
        groups.setdefault(key(answer), []).append(answer)
    return sorted(groups.values(), key=len)


def _exact(answer: Answer) -> Hashable:
    return answer.activity, answer.position, answer.place


def _but_for_counts(answer: Answer) -> Hashable:
    return answer.activity, _NUMBER.sub("", answer.position), answer.place


def _but_for_numbers(answer: Answer) -> Hashable:
    return tuple(_NUMBER.sub("", part) for part in (answer.activity, answer.position, answer.place))


def _line(group: Sequence[Answer]) -> str:
    process = _process(group[0], with_host=True) if len(group) == 1 else ""
    return f"  {ranks_text([answer.rank for answer in group])}: {_text(group)}{process}"


def _text(group: Sequence[Answer]) -> str:
    parts = ([getattr(answer, part) for answer in group] for part in ("activity", "seconds", "position", "place"))
    return " ".join("".join(map(_merged, parts)).split())[:_CHARACTERS]


def _merged(texts: Sequence[str]) -> str:
    """Return texts that differ in their numbers only as one, with ranges for the numbers that differ."""
    if len({_NUMBER.sub("", text) for text in texts}) > 1:
        return ""  # times: one rank gives none
    numbers = zip(*(map(int, _NUMBER.findall(text)) for text in set(texts)), strict=True)
    ranges = iter(
        [f"{min(of_all)}" if len(set(of_all)) == 1 else f"{min(of_all)} to {max(of_all)}" for of_all in numbers]
    )
    return _NUMBER.sub(lambda _: next(ranges), texts[0])


def _process(answer: Answer, with_host: bool = False) -> str:
    if not answer.pid:
        return ""
    return f" (pid {answer.pid} on {answer.host})" if with_host else f" (pid {answer.pid})"
