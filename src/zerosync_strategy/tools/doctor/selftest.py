"""Training on ranks of this machine against plain torch, on the CPU."""

from __future__ import annotations

from zerosync_strategy.tools.doctor.findings import Finding, of_topic
from zerosync_strategy.tools.doctor.ranks import Ranks

ok, _, _, error = of_topic("self-test")
REMEDY = "If the versions above are right, report it with `zerosync doctor --json`."


def check(timeout: float = 180.0) -> Finding:
    """Train on two ranks in separate processes, on stages 1, 2 and 3, for at most ``timeout`` seconds."""
    with Ranks("cpu", ["correct"], 2) as ranks:
        problem = ranks.wait(timeout)
    if problem:
        return error(f"two ranks: {problem}", REMEDY)
    return ok("two ranks, stages 1, 2 and 3: parameters equal plain torch's, one reduction per step")
