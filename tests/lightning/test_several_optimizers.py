"""Several optimizers in manual optimization: an engine and a window each, and every one equals plain torch."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import nn

from tests.harness.oracle import Oracle, backward_all, distance, full_parameters
from tests.harness.problem import WORLD, adamw, sgd
from tests.harness.ranks import run_ranks
from tests.lightning.runs import Data, Module, Recorder, fit, make_trainer, strategy
from tests.lightning.test_checkpoints import PositionedLoader, SaveAfter
from zerosync_strategy import ZeroSyncMonitor

STAGES = pytest.mark.parametrize("stage", [1, 2, 3])
BATCHES = 12


def several(stage: int, **options: Any) -> Any:
    """Under ZeRO-3 nothing stays gathered, small as it is."""
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    return strategy(stage, config={"zero_optimization": zero, "zero_allow_untested_optimizer": True}, **options)


class Pair(nn.Module):
    """A generator and a discriminator."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.g = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16))
        self.d = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))

    def g_loss(self, x: torch.Tensor) -> torch.Tensor:
        return -self.d(self.g(x[:, :8])).mean()

    def d_loss(self, x: torch.Tensor) -> torch.Tensor:
        return self.d(self.g(x[:, :8]).detach()).mean() - self.d(x).tanh().mean()


class Gan(Module):
    """Two discriminator steps, of two backwards each, for one generator step of four."""

    def __init__(self, freezes: str) -> None:
        super().__init__()
        self.net = Pair()
        self.freezes = freezes
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return [adamw(self.net.g.parameters()), sgd(self.net.d.parameters())]

    def training_step(self, batch: Any, batch_idx: int) -> None:
        g, d = self.optimizers()
        self.begin(g)
        self.manual_backward(self.net.g_loss(batch[0]) / 4)
        self.end(g)
        self.begin(d)
        self.manual_backward(self.net.d_loss(batch[0]) / 2)
        self.end(d)
        if batch_idx % 2:
            d.step()
            d.zero_grad()
        if batch_idx % 4 == 3:
            g.step()
            g.zero_grad()

    def begin(self, optimizer: Any) -> None:
        if self.freezes == "toggle":
            self.toggle_optimizer(optimizer)

    def end(self, optimizer: Any) -> None:
        if self.freezes == "toggle":
            self.untoggle_optimizer(optimizer)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.net.d_loss(batch[0]), sync_dist=True)


def plain_gan(frozen: bool) -> dict[str, torch.Tensor]:
    net, data = Pair(), Data(BATCHES)
    g, d = Oracle(net, adamw(net.g.parameters())), Oracle(net, sgd(net.d.parameters()))
    for batch in range(BATCHES):
        net.d.requires_grad_(not frozen)
        backward_all([g, d], lambda rank, batch=batch: net.g_loss(data.batch(batch, rank)[0]) / 4)
        net.d.requires_grad_(True)
        backward_all([g, d], lambda rank, batch=batch: net.d_loss(data.batch(batch, rank)[0]) / 2)
        if batch % 2:
            d.step()
        if batch % 4 == 3:
            g.step()
    return full_parameters(net)


@pytest.mark.parametrize("freezes", ["toggle", "nothing"])
@STAGES
def test_gan(stage: int, freezes: str) -> None:
    def run() -> Any:
        recorder, trainer = fit(Gan(freezes), several(stage), BATCHES)
        reports = [zerosync.report for zerosync in trainer.strategy.zerosyncs]
        print([(r.step, r.backwards, r.reductions, r.floor_bytes, r.bytes_sent, dict(r.collectives)) for r in reports])
        return distance(recorder.parameters, plain_gan(freezes == "toggle")), trainer.global_step, reports

    print(run_ranks(run)[0])


class Agent(nn.Module):
    """Three optimizers' parameters, two of them in one layer, and parameters of none."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.body = nn.Linear(16, 16)
        self.still = nn.Linear(16, 16).requires_grad_(False)
        self.actor = nn.Linear(16, 4)
        self.critic = nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 1))
        self.log_alpha = nn.Parameter(torch.full((1,), 0.1))
        self.stray = nn.Parameter(torch.full((4,), 0.2))  # trainable, but no optimizer's
        self.register_buffer("seen", torch.zeros(1))

    def losses(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Of all three optimizers' parameters, and of the second one's and some of the first one's."""
        hidden = torch.tanh(self.still(torch.tanh(self.body(batch[0]))))
        acts = (self.actor(hidden) + self.stray) * self.log_alpha.exp()
        return nn.functional.mse_loss(acts, batch[1]) / 2, self.critic(hidden).square().mean() / 2

    def optimizers(self) -> list[torch.optim.Optimizer]:
        return [
            torch.optim.AdamW(
                [{"params": [self.body.weight]}, {"params": self.actor.parameters(), "lr": 0.02}], lr=0.01
            ),
            torch.optim.SGD([self.body.bias, *self.critic.parameters()], lr=0.2, momentum=0.9),
            torch.optim.Adam([self.log_alpha], lr=0.1),
        ]


def schedulers(optimizers: list[Any]) -> list[Any]:
    steps = torch.optim.lr_scheduler.StepLR(optimizers[0], 2, 0.5)
    return [steps, torch.optim.lr_scheduler.ExponentialLR(optimizers[2], 0.9)]


class Agents(Module):
    """A step of the first two optimizers every two batches, of the third every four."""

    def __init__(self, clip: float = 0.0, shift: float = 0.0) -> None:
        super().__init__()
        self.net = Agent()
        with torch.no_grad():
            for tensor in [*self.net.parameters(), *self.net.buffers()]:
                tensor += shift
        self.clip = clip
        self.automatic_optimization = False
        self.stepped: list[int] = []

    def configure_optimizers(self) -> Any:
        optimizers = self.net.optimizers()
        return optimizers, schedulers(optimizers)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.stepped.append(self.trainer.optimizers.index(optimizer))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        actor, critic, alpha = self.optimizers()
        of_actor, of_alpha = self.lr_schedulers()
        self.net.seen += 1
        for loss in self.net.losses(batch):
            self.manual_backward(loss, retain_graph=True)
        if batch_idx % 2:
            if self.clip:
                self.clip_gradients(actor, gradient_clip_val=self.clip, gradient_clip_algorithm="norm")
            for optimizer in (actor, critic):
                optimizer.step()
                optimizer.zero_grad()
            of_actor.step()
        if batch_idx % 4 == 3:
            alpha.step()
            alpha.zero_grad()
            of_alpha.step()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", sum(self.net.losses(batch)), sync_dist=True)

    test_step = validation_step


def plain_agents(batches: int = BATCHES, clip: float = 0.0) -> dict[str, torch.Tensor]:
    net, data = Agent(), Data(BATCHES)
    oracles = [Oracle(net, optimizer) for optimizer in net.optimizers()]
    of_actor, of_alpha = schedulers([oracle.optimizer for oracle in oracles])
    for batch in range(batches):
        for which in (0, 1):
            backward_all(oracles, lambda rank, batch=batch, which=which: net.losses(data.batch(batch, rank))[which])
        if batch % 2:
            oracles[0].step(clip)
            oracles[1].step()
            of_actor.step()
        if batch % 4 == 3:
            oracles[2].step()
            of_alpha.step()
    return full_parameters(net)


@STAGES
def test_three_optimizers_and_their_checkpoint(stage: int, tmp_path: Path) -> None:
    """Exact, and exact after a resume in a module with other numbers in it, which come from the checkpoint alone."""

    def run() -> Any:
        def train(shift: float, *callbacks: Any, **options: Any) -> Any:
            module, recorder = Agents(shift=shift), Recorder()
            trainer = make_trainer(
                several(stage), [recorder, *callbacks], logger=CSVLogger(tmp_path), log_every_n_steps=1
            )
            trainer.fit(module, PositionedLoader(Data(BATCHES)), Data(BATCHES).loader(), **options)
            assert trainer.global_step == 15 and module.net.seen == BATCHES
            rates = [optimizer.param_groups[-1]["lr"] for optimizer in trainer.optimizers]
            return recorder.parameters, module.stepped, rates

        save = SaveAfter(7, tmp_path / "saved")
        whole, stepped, rates = train(0.0, save, ZeroSyncMonitor())
        assert not [text for text in save.warnings if "backward(s)" in text], save.warnings
        resumed, stepped_again, rates_again = train(0.5, ckpt_path=tmp_path / "saved")
        assert stepped == [0, 1, 0, 1, 2] * 3 and stepped_again == [0, 1, 0, 1, 2] and rates_again == rates

        # Without fit: the parameters of all optimizers are in the checkpoint.
        evaluated = Agents(shift=0.5)
        make_trainer(several(stage)).test(evaluated, Data(4).loader(), ckpt_path=tmp_path / "saved")
        at_saving = plain_agents(8)
        loaded = {name.removeprefix("net."): param for name, param in full_parameters(evaluated).items()}
        return distance(whole, plain_agents()), distance(resumed, whole), distance(loaded, at_saving)

    assert run_ranks(run) == [(0.0, 0.0, 0.0)] * WORLD
