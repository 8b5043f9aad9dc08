"""A DQN as Lightning's own example writes it, on every stage: a target network that is synchronised or follows (N1)."""

import copy
import os
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset

from tests.harness.oracle import Oracle, distance, full_average, full_parameters
from tests.harness.ranks import run_ranks
from tests.lightning.runs import make_trainer
from zerosync_strategy import ZeroSyncStrategy

STATES, ACTIONS, BATCH, STEPS = 4, 3, 4, 6


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(STATES, 16), nn.ReLU(), nn.Linear(16, ACTIONS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x.float())


class Replay(Dataset):
    """Transitions that another policy has gone through."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.rows = [
            (
                torch.randn(STATES, generator=generator),
                torch.randint(ACTIONS, (), generator=generator),
                torch.randn((), generator=generator),
                torch.rand((), generator=generator) < 0.2,
                torch.randn(STATES, generator=generator),
            )
            for _ in range(2 * BATCH * STEPS)
        ]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.rows[index]


class DQN(LightningModule):
    def __init__(self, update: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net, self.target_net = Network(), Network()
        self.update, self.done = update, 0

    def dqn_mse_loss(self, batch: Any) -> torch.Tensor:
        states, actions, rewards, dones, next_states = batch
        values = self.net(states).gather(1, actions.unsqueeze(-1)).squeeze(-1)
        with torch.no_grad():
            next_values = self.target_net(next_states).max(1)[0]
            next_values[dones] = 0.0
            next_values = next_values.detach()
        return nn.functional.mse_loss(values, next_values * 0.9 + rewards)

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        loss = self.dqn_mse_loss(batch)
        if self.update == "sync" and self.done % 2 == 0:
            self.target_net.load_state_dict(self.net.state_dict())
        self.done += 1
        return loss

    def follow(self) -> None:
        for target, online in zip(self.target_net.parameters(), self.net.parameters(), strict=True):
            if self.update == "copy":
                target.data.copy_(0.1 * online.data + (1.0 - 0.1) * target.data)
            elif self.update == "lerp":
                with torch.no_grad():
                    target.lerp_(online, 0.1)

    def on_train_batch_end(self, *_: Any) -> None:
        self.follow()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.net.parameters(), lr=0.3, momentum=0.5)


def plain(update: str) -> DQN:
    module, data = DQN(update), Replay()
    oracle = Oracle(module, module.configure_optimizers())
    for step in range(STEPS):
        for rank in range(2):
            module.done = step
            rows = [data[2 * (BATCH * step + i) + rank] for i in range(BATCH)]
            before = copy.deepcopy(module.target_net.state_dict())
            oracle.backward_on(rank, module.training_step([torch.stack(of) for of in zip(*rows, strict=True)], step))
            if rank == 0:
                module.target_net.load_state_dict(before)  # as on the other rank, which is there at the same time
        oracle.step()
        module.follow()
    return module


@pytest.mark.extended(but=("3, persistent-lerp",))
@pytest.mark.parametrize("update", ["sync", "copy", "lerp"])
@pytest.mark.parametrize(
    "strategy",
    [
        {"stage": 1},
        {"stage": 2},
        {"stage": 3},
        {"stage": 3, "config": {"zero_optimization": {"stage3_param_persistence_threshold": 0}}},
    ],
    ids=["1", "2", "3, persistent", "3"],
)
def test_the_target_network_is_that_of_plain_torch(update: str, strategy: dict[str, Any]) -> None:
    def run() -> dict[str, torch.Tensor]:
        module = DQN(update)
        trainer = make_trainer(ZeroSyncStrategy(**strategy))
        found: dict[str, torch.Tensor] = {}
        module.on_train_end = lambda: found.update(full_parameters(module))  # type: ignore[method-assign]
        mine = range(int(os.environ["RANK"]), 2 * BATCH * STEPS, 2)
        trainer.fit(module, DataLoader(Subset(Replay(), mine), batch_size=BATCH))
        return found

    for found in run_ranks(run):
        module = plain(update)
        expected = full_parameters(module)
        expected |= {f"target_net.{name}": value for name, value in full_average(module.target_net, module.net).items()}
        assert distance(found, expected) == 0.0
