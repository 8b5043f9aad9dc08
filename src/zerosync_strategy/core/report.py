"""The report of one optimizer step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from zerosync_strategy.core.budgets import Choice
from zerosync_strategy.core.comm.traffic import Traffic
from zerosync_strategy.version import __version__


@dataclass(frozen=True)
class StepReport:
    """One optimizer step, with the forwards and backwards since the step before.

    Attributes:
        step: which optimizer step of this engine since attach, from 1.
        backwards: backwards since the last step, those dropped by ``zero_grad`` included.
        reductions: passes over the gradients that sent some of them; 1 when coalesced (W1).
        early_reductions: the reductions that were made while a backward ran.
        floor_bytes: what the step needs to send with the options in force: each gradient once for every reduction pass,
            each parameter once, and under ZeRO-3 each parameter that is neither held nor kept in the host's memory once
            for every backward.
        peak_unreduced_bytes: the most local gradients at once.
        peak_held_bytes: ZeRO-3: the most gathered parameters held over the window at once.
        peak_host_bytes: ZeRO-3: the most bytes of parameters kept in the memory of the host at once.
        loaded_bytes: ZeRO-3: copied from there instead of gathered.
        peak_unsharded_bytes: ZeRO-3: the most bytes of gathered parameters at once (E1), those on their way, held, or
            kept for a backward included; but for persistent ones, and those of a ``GatheredParameters`` context.
        seconds: host time in ZeroSync's own reduction, waiting for other ranks included.
        collectives: calls and bytes sent by this rank, by DeepSpeed's name of the collective. Of several engines in
            one process, each counts what it reduces and steps, and the parameters gathered, by whichever engine's
            modules, since the gradient or step before it and up to its own.
        budgets: with ``"auto"``, what was chosen for the step and why; ``None`` without.
        version: of ZeroSync.
    """

    step: int
    backwards: int
    reductions: int
    early_reductions: int
    floor_bytes: int
    peak_unreduced_bytes: int
    peak_held_bytes: int
    peak_host_bytes: int
    loaded_bytes: int
    peak_unsharded_bytes: int
    seconds: float
    collectives: Mapping[str, Traffic]
    budgets: Choice | None = None
    version: str = __version__

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank sent for the step, all collectives together."""
        return sum(traffic.bytes for traffic in self.collectives.values())

    @property
    def ratio(self) -> float:
        """Bytes sent over the floor; 1.0 on a single rank, where nothing is sent."""
        return self.bytes_sent / self.floor_bytes if self.floor_bytes else 1.0
