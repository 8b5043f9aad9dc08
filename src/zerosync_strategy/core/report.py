"""What one optimizer step cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from zerosync_strategy.core.collectives import Traffic


@dataclass(frozen=True)
class StepReport:
    """One optimizer step, with the forwards and backwards since the step before.

    Attributes:
        step: which optimizer step of this engine since attach, from 1.
        backwards: backwards since the last step, those dropped by ``zero_grad`` included.
        reductions: passes over the gradients that sent them; 1 when coalesced (W1).
        collectives: calls and bytes sent by this rank, by DeepSpeed's name of the collective. With several engines in
            one process, the other engines' collectives between the two steps are in here too.
    """

    step: int
    backwards: int
    reductions: int
    collectives: Mapping[str, Traffic]

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank sent for the step, all collectives together."""
        return sum(traffic.bytes for traffic in self.collectives.values())
