"""The mixture of experts of examples/moe.py, its experts over sub-groups, against all experts in one process."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from tests.harness.data import noise
from tests.harness.engines import make_engine, rank, start
from tests.harness.oracle import NORM, Oracle, full_parameters, value_of
from tests.harness.ranks import run_ranks
from tests.harness.rounding import excess
from zerosync_strategy import attach, shard_over

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples"))
from moe import MixtureOfExperts

WORLD, WIDTH, EXPERTS, BACKWARDS, STEPS = 4, 16, 4, 2, 4


class Model(nn.Module):
    def __init__(self, **where: Any) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.read = nn.Linear(WIDTH, WIDTH)
        self.mixtures = nn.ModuleList(MixtureOfExperts(WIDTH, EXPERTS, **where) for _ in range(2))
        self.write = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, loss = self.read(x), torch.zeros(())
        for mixture in self.mixtures:
            out, uneven = mixture(torch.tanh(x))
            x, loss = x + out, loss + 0.1 * uneven
        return loss + self.write(x).square().mean()


data = noise(12, WIDTH)


@pytest.mark.extended
def test_experts_on_groups_equal_all_experts_in_one_process() -> None:
    def run() -> Any:
        start()
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("experts", "shards"))
        model = Model(exchange=mesh["experts"].get_group(), held_by=shard_over(mesh["shards"]))
        optimizer, zero = torch.optim.SGD(model.parameters(), lr=0.5), {"stage3_param_persistence_threshold": 0}
        engine = make_engine(model, optimizer, zero=zero, gradient_clipping=0.1)
        attach(engine)
        plain = Model()
        oracle = Oracle(plain, torch.optim.SGD(plain.parameters(), lr=0.5), WORLD)
        norms = []
        for k in range(STEPS * BACKWARDS):
            engine.backward(engine(data(k, rank())) / BACKWARDS)
            oracle.backward(lambda r, k=k: plain(data(k, r)) / BACKWARDS)
            if (k + 1) % BACKWARDS == 0:
                engine.step()
                norms.append((float(engine.get_global_grad_norm()), oracle.step(clip=0.1)))
        first = rank() // 2 * 2  # this rank's experts are numbered from here
        errors = []
        for name, ours in full_parameters(model).items():
            parts = name.split(".")
            if "experts" in parts:
                parts[3] = str(first + int(parts[3]))
            errors.append(excess(ours, value_of(plain.get_parameter(".".join(parts)))))
        return max(errors), norms

    ranks = run_ranks(run, world_size=WORLD)
    for error, norms in ranks:
        assert error == 0.0 and norms == ranks[0][1]
        assert all(abs(ours / expected - 1) < NORM and expected > 0.1 for ours, expected in norms), norms
