"""What is known of one rank when communication fails: in numbers and names, for the verdict on all of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Recorded:
    """A collective in torch's flight recorder.

    Attributes:
        group: the name of its process group.
        number: among the group's collectives, from 1.
        name: torch's, with the backend's: ``"gloo:all_reduce"``.
        sizes: of its input.
        line: of the program, that issued it.
        complete: whether it is.
        words: ZeroSync's for it, where it is ZeroSync's.
    """

    group: str
    number: int
    name: str
    sizes: str = ""
    line: str = ""
    complete: bool = True
    words: str = ""

    @property
    def text(self) -> str:
        """What it is, in words."""
        what = self.words or f"{self.name.rpartition(':')[2]} of {self.sizes or 'nothing'}"
        return f"{what} (collective {self.number} of group {self.group!r}{self.line and ', at ' + self.line})"


@dataclass(frozen=True)
class RankState:
    """Where one rank is.

    Attributes:
        rank: whose state it is.
        failure: its own exception and where it was raised, if it has stopped by one.
        is_gone: its process has ended without a word.
        has_finished: its process has ended as it should.
        activity: what it does in ZeroSync's words; empty outside of the engine.
        waits_for: what it waits for, or has waited for in vain; empty if it does not wait for other ranks.
        steps: optimizer steps done, or -1 where that is not known.
        backward: the backward of the window that it is in, or that its forward leads to; 0 before the first.
        parameters: of the gather or reduction that it waits for.
        module: whose code runs, or that a gather is for.
        line: of the program.
        departure: how it does otherwise in this window than in its last one.
        recorded: of each process group, the last collective in torch's flight recorder, and the first that is not
            complete.
        verdict: that it has told, and stopped.
    """

    rank: int
    failure: str = ""
    is_gone: bool = False
    has_finished: bool = False
    activity: str = ""
    waits_for: str = ""
    steps: int = -1
    backward: int = 0
    parameters: str = ""
    module: str = ""
    line: str = ""
    departure: str = ""
    recorded: tuple[Recorded, ...] = ()
    verdict: str = ""

    @property
    def pending(self) -> Recorded | None:
        """The first collective in torch's flight recorder that is not complete."""
        return next((each for each in self.recorded if not each.complete), None)

    def with_pending(self) -> RankState:
        """Return the state with what torch's flight recorder has as waited for, where ZeroSync's words have nothing.

        On NCCL the host waits in no collective. A gloo collective that is not complete may be waited for by nobody, so
        it counts only where nothing else is known of the rank.
        """
        pending = self.pending
        knows_more = self.steps >= 0 or bool(self.line)
        if pending is None or self.waits_for or self.failure or (knows_more and pending.name.startswith("gloo")):
            return self
        return replace(self, waits_for=pending.text, line=self.line or pending.line)

    def encode(self) -> dict[str, Any]:
        """Return the fields that say something, for JSON."""
        return {"rank": self.rank} | {
            name: value for name, value in asdict(self).items() if value != getattr(RankState, name, None)
        }

    @staticmethod
    def decode(fields: Mapping[str, Any]) -> RankState:
        """Return the state that ``fields`` were encoded from."""
        state = RankState(**fields)
        return replace(state, recorded=tuple(Recorded(**each) for each in fields.get("recorded", ())))
