"""A verdict on a hang before the timeout of the process group, of ranks that then go on (W4)."""

import io
import re
import sys
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.harness.engines import make_engine, rank, start
from tests.harness.networks import stack
from tests.harness.ranks import run_ranks
from zerosync_strategy import attach

TIMEOUT, NAP, WIDTH = 12, 9, 8  # seconds; patience is half of the first


def nap() -> None:
    if rank() == 1:
        time.sleep(NAP)


class Naps(nn.Module):
    """Lets rank 1 sleep once, when it is called for the ``at``-th time."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.left = at

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.left -= 1
        if self.left == 0:
            nap()
        return x


@pytest.mark.extended(but=("3-forward-the gather of-SGD",))
@pytest.mark.parametrize(
    ("stage", "place", "waits", "optimizer"),
    [
        (3, "forward", "the gather of", torch.optim.SGD),
        (3, "backward", "the (reduction|comparison) of", torch.optim.SGD),
        (2, "step", "the reduction of", torch.optim.SGD),
        (2, "step", "the reduction of", torch.optim.Muon),  # which NCCL launches in groups
    ],
)
def test_who_waits_is_told_who_does_not_come(stage: int, place: str, waits: str, optimizer: Any) -> None:
    """Also by NCCL's rules, where the host waits in no collective: torch's flight recorder has what is not complete."""

    def run() -> str:
        sys.stderr = io.StringIO()
        start()
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=TIMEOUT))
        net = nn.Sequential(stack(WIDTH, 2), Naps(2 if place == "forward" else 0), nn.Linear(WIDTH, WIDTH))
        zero = {"stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0} if stage == 3 else {}
        weights = [param for param in net.parameters() if param.requires_grad_(param.dim() == 2).requires_grad]
        engine = make_engine(net, optimizer(weights, lr=0.1), stage, zero)
        attach(engine, overlap_last=place != "step")
        for step in range(3):
            x = torch.ones(2, WIDTH, requires_grad=True)
            hidden = engine(x)
            if step == 1 and place == "backward":
                hidden.register_hook(lambda _: nap())
            engine.backward(hidden.square().mean())
            if step == 1 and place == "step":
                nap()
            engine.step()
        return sys.stderr.getvalue()

    waiting, sleeping = run_ranks(run, timeout=60)
    assert "ZeroSync: this rank has waited for others for " in waiting and re.search(waits, waiting), waiting
    assert "Verdict: rank 1" in waiting and "test_hangs.py" in waiting and "nap" in waiting, waiting
    assert waiting.count("Verdict") == 1 and "ZeroSync: this rank" not in sleeping, sleeping
