"""A rank that fails, on NCCL: each other rank names it before NCCL's watchdog ends the process, or in an error."""

import os
import signal
import subprocess
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.gpu.device import DEVICE, needs, run
from tests.gpu.test_exact import WIDTH
from tests.harness import strict
from tests.harness.engines import make_engine, rank
from tests.harness.ranks import RankOutcome
from zerosync_strategy import attach

TIMEOUT = timedelta(seconds=24)  # of NCCL; who waits says at half of it why
KILLED_AFTER = 40  # seconds, of a stopped rank
# What a rank does in its second window, and what each other says of it.
FAULTS = {
    "raises": "Verdict: rank {} raised Injected",
    "is killed": "Verdict: rank {} has ended without an error",
    "is stopped": "Verdict: rank {} has ended without an error, or cannot be reached",
    "is out of memory": "Verdict: rank {} raised OutOfMemoryError",
    "runs another module": "RankError: Ranks gathered different parameters",
}


class Injected(Exception):
    """What a rank raises where an exception is called for."""


class Two(nn.Module):
    """One rank may run one of its layers twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, fault: str = "") -> torch.Tensor:
        x = self.a(x).tanh()
        match fault:
            case "raises":
                raise Injected("out of order")
            case "is out of memory":
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB (simulated)")
            case "is killed":
                os.kill(os.getpid(), signal.SIGKILL)
            case "is stopped":
                end = f"sleep {KILLED_AFTER}; kill -KILL {os.getpid()}"
                subprocess.Popen(["sh", "-c", end], start_new_session=True)
                os.kill(os.getpid(), signal.SIGSTOP)
        layer = self.a if fault == "runs another module" else self.b
        return layer(x).square().mean()


@needs(2)
@pytest.mark.timeout(400)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_rank_that_fails_is_named(fault: str) -> None:
    def job() -> None:
        strict.TIMEOUT = TIMEOUT.total_seconds()
        net, victim = Two().to(DEVICE), dist.get_world_size() - 1
        engine = make_engine(
            net, torch.optim.SGD(net.parameters(), lr=0.1), 3,
            {"stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0},
        )  # fmt: skip
        attach(engine)
        for window in range(4):
            x = torch.ones(4, WIDTH, device=DEVICE)
            engine.backward(engine(x, fault if window == 1 and rank() == victim else ""))
            engine.step()
            if DEVICE == "cuda":
                torch.cuda.synchronize()

    outcomes: list[RankOutcome] = run(job, timeout=TIMEOUT, expect="any")
    *others, victim = outcomes
    for each in others:
        assert FAULTS[fault].format(victim.rank) in str(each), str(each)
