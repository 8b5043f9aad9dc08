"""Faults that make ranks wait in vain, and the verdict on each, as the table of README.md.

python -m tests.faults.verdicts 2 4
"""

import os
import re
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import deepspeed.compile.backend  # noqa: F401  (each rank would import it)
import torch
import torch.distributed as dist
from torch import nn

from tests.harness import engines
from tests.harness.engines import rank, start
from tests.harness.ranks import run_ranks
from tests.harness.told import end_soon, look_often, told_by
from zerosync_strategy import attach
from zerosync_strategy.core.failures.rank_state import Advice
from zerosync_strategy.core.failures.words import ADVICE

VICTIM = 1
WINDOW, BACKWARD = 3, 2  # of the fault
TIMEOUT = timedelta(seconds=3)
USUAL = ("first", "second", "third")


class Net(nn.Module):
    """Layers that run in any order, of one size."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleDict({name: nn.Linear(8, 8) for name in (*USUAL, "other")})
        self.within: Callable[[], None] | None = None  # what happens after the first layer

    def forward(self, x: torch.Tensor, order: tuple[str, ...] = USUAL) -> torch.Tensor:
        for number, name in enumerate(order):
            x = self.layers[name](x).tanh()
            if number == 0 and self.within is not None:
                self.within()
        return x


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail() -> None:
    time.sleep(0.5)  # its connections close then, which the others are to wait for by now
    raise ValueError("no such token")


def sleep() -> None:
    time.sleep(TIMEOUT.total_seconds() + 2)


def meet() -> None:
    dist.barrier()


@dataclass(frozen=True)
class Fault:
    """What the victim does, and the verdict on it.

    `cause` and `waits` are patterns of the two halves of the verdict; `LINE` in them is a line of this file. `own` is
    the error of the victim, `late` that it comes when the others have gone.
    """

    cause: str
    waits: str
    stages: tuple[int, ...] = (1, 2, 3)
    order: tuple[str, ...] = USUAL
    within: Callable[[], None] | None = None
    before: Callable[[], None] | None = None
    skips: bool = False
    options: tuple[tuple[str, Any], ...] = ()
    own: str = "RankError"
    late: bool = False


def gathers(other: str) -> str:
    """The first half of the verdict on a rank that runs a layer in place of the second."""
    names = "'layers.{0}.weight', 'layers.{0}.bias'"
    here, there = names.format(other), names.format("second")
    return (
        f"rank 1 gathered {here} where it gathered {there} in the window before, and waits for the gather of {here}"
        rf" over the ranks \[.*\], window 3, backward 2, module 'layers.{other}', at LINE forward"
    )


SECOND = "(gather of 'layers.second.weight', .*, module 'layers.second', at LINE forward|reduction .*, at LINE train)"
FIRST = "(gather of 'layers.first.weight', .*, module 'layers.first', at LINE forward|reduction .*, at LINE train)"
FAULTS = {
    "skips a module": Fault(gathers("third"), SECOND, (3,), order=("first", "third")),
    "runs modules in another order": Fault(gathers("third"), SECOND, (3,), order=("first", "third", "second")),
    "uses another parameter": Fault(gathers("other"), SECOND, (3,), order=("first", "other", "third")),
    "skips a backward": Fault(
        r"rank 1 steps after 1 backward\(s\), and did after 2 in the window before, and waits for .*, window 3,"
        " backward 1, at LINE train",
        FIRST, skips=True, options=(("coalesce", False),),
    ),
    "is killed in a module": Fault(
        "rank 1 has ended without an error", SECOND, within=die, own="RankDied"
    ),
    "sleeps in a module": Fault(
        "rank 1 is in the forward and does not communicate, window 3, backward 2, module 'Net', at LINE sleep",
        SECOND, within=sleep, late=True,
    ),
    "sleeps between two backwards": Fault(
        "rank 1 is outside of the engine and does not communicate, window 3, backward 1, at LINE sleep",
        FIRST, before=sleep, late=True,
    ),
    "raises an exception": Fault(
        "rank 1 raised ValueError in the forward, window 3, backward 2, module 'Net', at LINE fail",
        SECOND, within=fail, own="ValueError",
    ),
    "calls a barrier of its own": Fault(
        r"rank 1 alone waits for torch.distributed.barrier\(\), window 3, backward 1, at LINE meet",
        FIRST + "(; the last in torch's flight recorder: .*rank 1 barrier of .*, at LINE meet.*)?",
        before=meet, own="RuntimeError",
    ),
}  # fmt: skip


def train(stage: int, fault: Fault, told: Path | None = None) -> None:
    """Three windows of two backwards; the victim does something else in the last.

    With `told`, a folder, the timeout is long, and a rank ends when it has printed a verdict there.
    """
    start(timedelta(minutes=4 if told else 1))
    if told:
        look_often(told, end_soon)
    else:
        dist.distributed_c10d._set_pg_timeout(TIMEOUT)
    net = Net()
    nothing_ahead = dict.fromkeys(
        ("stage3_param_persistence_threshold", "stage3_max_reuse_distance", "stage3_prefetch_bucket_size"), 0
    )
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    engine = engines.make_engine(net, optimizer, stage, nothing_ahead if stage == 3 else {})
    attach(engine, **dict(fault.options))
    for window in range(1, WINDOW + 1):
        for backward in range(1, BACKWARD + 1):
            order, at_fault = USUAL, (window, backward, rank()) == (WINDOW, BACKWARD, VICTIM)
            if at_fault:
                if fault.skips:
                    continue
                if fault.before is not None:
                    fault.before()
                order, net.within = fault.order, fault.within
            engine.backward(engine(torch.ones(2, 8), order).square().mean())
        engine.step()
    dist.barrier()


def verdict_of(text: str) -> str:
    """The verdict in an error, or nothing."""
    found = re.search(r"^Verdict: (.*)$", text, re.MULTILINE)
    return found[1] if found else ""


def is_right(name: str, verdict: str) -> bool:
    fault = FAULTS[name]
    ranks = r"(rank \d waits|ranks [\d, -]+ wait) for the "
    # A connection to a rank that is gone may be closed before anyone waits: then the verdict names nobody who does.
    others = f"(; {ranks}{fault.waits})" + ("?" if fault.within is die else "")
    pattern = f"{fault.cause}{others}".replace(", .*, module", ", .*, window 3, backward 2, module")
    pattern = pattern.replace(
        "reduction .*,", "reduction of the gradients of '[^']+' to '[^']+', window 3, backward 2,"
    )
    advice = f"(. {re.escape(ADVICE[Advice.OTHER_BACKWARDS if fault.skips else Advice.FEWER_BATCHES])})?"
    return re.fullmatch(pattern.replace("LINE", r"verdicts\.py:\d+") + advice, verdict) is not None


def verdicts(name: str, stage: int, world_size: int) -> list[str]:
    """The verdicts of those ranks that have one to give."""
    fault = FAULTS[name]
    outcomes = run_ranks(train, stage, fault, world_size=world_size, expect="any", timeout=90)
    assert outcomes[VICTIM].error == fault.own, str(outcomes[VICTIM])
    victim_judges = fault.own == "RankError" and not fault.late
    judging = [outcome for outcome in outcomes if outcome.rank != VICTIM or victim_judges]
    for outcome in judging:
        assert outcome.error == "RankError", str(outcome)
    return [verdict_of(outcome.message) for outcome in judging]


def early_verdicts(name: str, stage: int, world_size: int, folder: Path) -> list[str]:
    """The verdicts that the ranks print while they wait."""
    run_ranks(train, stage, FAULTS[name], folder, world_size=world_size, expect="any", timeout=90)
    return [verdict_of(told_by(number, folder).read_text()) for number in range(world_size)]


def main(world_sizes: list[int]) -> None:
    print("| rank 1 | stages | right | the verdict |\n|---|---|---:|---|")
    for name, fault in FAULTS.items():
        told = [verdict for w in world_sizes for stage in fault.stages for verdict in verdicts(name, stage, w)]
        right = sum(is_right(name, verdict) for verdict in told)
        stages = ", ".join(map(str, fault.stages))
        print(f"| {name} | {stages} | {right} of {len(told)} | {told[-1]} |", flush=True)
        for verdict in told:
            if not is_right(name, verdict):
                print(f"  WRONG: {verdict}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main([int(argument) for argument in sys.argv[1:]] or [2])
