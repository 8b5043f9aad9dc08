"""Several optimizers in manual optimization: an engine and a window each, and every one equals plain torch."""

import csv
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

from tests.harness.extended import STAGES
from tests.harness.oracle import Oracle, backward_all, distance, full_parameters
from tests.harness.problem import WORLD, adamw, sgd
from tests.harness.ranks import run_ranks
from tests.lightning.runs import Data, Module, PositionedLoader, Recorder, SaveAfter, fit, make_trainer, strategy
from zerosync_strategy import ZeroSyncMonitor
from zerosync_strategy.core.engine.parameter import record_of
from zerosync_strategy.tools.plan.measures import ProcessCounter

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


class PairOfBlocks(Pair):
    """With a discriminator of blocks, which are gathered as wholes."""

    def __init__(self) -> None:
        super().__init__()
        blocks = [nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 16)) for _ in range(2)]
        self.d = nn.Sequential(*blocks, nn.Linear(16, 1))


class Gan(Module):
    """Two discriminator steps, of two backwards each, for one generator step of four."""

    def __init__(self, freezes: str, pair: type[Pair] = Pair) -> None:
        super().__init__()
        self.net = pair()
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


def plain_gan(frozen: bool, net: Pair | None = None) -> dict[str, torch.Tensor]:
    net, data = net or Pair(), Data(BATCHES)
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


@pytest.mark.extended(but=("3-nothing",))
@pytest.mark.parametrize("freezes", ["toggle", "nothing"])
@pytest.mark.parametrize("stage", STAGES)
def test_gan(stage: int, freezes: str) -> None:
    def run() -> Any:
        module = Gan(freezes)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            recorder, trainer = fit(module, several(stage), BATCHES)
        dropped = [str(w.message) for w in caught if "ZeroSync dropped" in str(w.message)]
        for zerosync in trainer.strategy.zerosyncs:
            for param in zerosync.parameters:
                assert param.requires_grad and param.grad is None
        reports = [zerosync.report for zerosync in trainer.strategy.zerosyncs]
        return distance(recorder.parameters, plain_gan(freezes == "toggle")), trainer.global_step, reports, dropped

    for error, steps, (of_g, of_d), dropped in run_ranks(run):
        assert (error, steps, of_g.step, of_d.step) == (0.0, 9, 3, 6)
        # Nothing frozen, the discriminator's window has the generator's two backwards as well.
        assert (of_g.backwards, of_d.backwards) == (4, 2 if freezes == "toggle" else 4)
        assert (of_g.reductions, of_d.reductions, dropped) == (1, 1, [])
        for report, numel in ((of_g, 416), (of_d, 289)):
            # One rank of two sends half of its own gradients and, at once on stages 1 and 2, of its own parameters;
            # on stage 3, of all those that are gathered on the way.
            sent = sum(traffic.bytes for kind, traffic in report.collectives.items() if kind != "all_reduce")
            more = sent - (1 if stage == 3 else 2) * numel * 4 / 2
            assert more > -16 and (stage == 3 or more < 16), report


@pytest.mark.extended
def test_blocks_are_gathered_as_wholes() -> None:
    """The hooks are on the module that runs, and not on the part of it that each engine has."""

    def run() -> tuple[float, int]:
        module = Gan("nothing", PairOfBlocks)
        recorder, trainer = fit(module, several(3), BATCHES, limit_val_batches=0)
        report = trainer.strategy.zerosyncs[0].report  # of the engine through which forwards run
        gathers = report.collectives.get("isend") or report.collectives["all_gather_into_tensor"]
        return distance(recorder.parameters, plain_gan(False, PairOfBlocks())), gathers.calls

    (error, calls), _ = run_ranks(run)
    assert error == 0.0 and calls < 20, calls  # 11; without the hooks, each read gathers for itself


@pytest.mark.extended
@pytest.mark.parametrize("stage", [1, 3])
def test_fit_again_after_a_validation(stage: int) -> None:
    def run() -> float:
        module, data = Gan("toggle"), Data(BATCHES)
        recorder, trainer = fit(module, several(stage), BATCHES)
        hooks = [len(each._forward_pre_hooks) + len(each._forward_hooks) for each in module.modules()]
        trainer.validate(module, data.loader(), verbose=False)
        trainer.fit_loop.max_epochs = 2
        trainer.fit(module, data.loader())
        assert hooks == [len(each._forward_pre_hooks) + len(each._forward_hooks) for each in module.modules()]
        net = Pair()
        plain_gan(True, net)
        return distance(recorder.parameters, plain_gan(True, net))  # Lightning configures optimizers anew

    assert run_ranks(run) == [0.0, 0.0]


@pytest.mark.extended
@pytest.mark.parametrize("options", [{"coalesce": False}, {"grad_memory_budget": 600}, {"param_memory_budget": "all"}])
def test_options_hold_for_each_engine(options: dict[str, Any]) -> None:
    def run() -> Any:
        recorder, _ = fit(Gan("toggle"), several(3, **options), BATCHES, callbacks=[seen := Reports()])
        return distance(recorder.parameters, plain_gan(True)), seen.reports, seen.counted

    for error, (of_g, of_d), counted in run_ranks(run):
        assert error == 0.0
        # Between them, the reports count every collective once.
        assert sum(report.bytes_sent for report in of_g + of_d) == counted
        if "param_memory_budget" in options:
            # Each network is held up to a step of its own, not of the other's.
            assert counted < 1.1 * sum(report.floor_bytes for report in of_g + of_d)
        else:
            assert {report.reductions for report in of_d} == {2} and len(of_d) == 2 * len(of_g) == 6


@pytest.mark.extended
def test_a_budget_is_for_the_parameters_of_each_engine() -> None:
    """What is worth holding is found out before any of them has stepped, of the whole module."""

    class Held(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            self.names = {name for name, param in module.named_parameters() if record_of(param).hold}

    def run() -> set[str]:
        held = Held()
        fit(Gan("toggle"), several(3, param_memory_budget=2700), BATCHES, callbacks=[held])
        return {name.split(".")[-3] for name in held.names}

    assert run_ranks(run) == [{"g", "d"}] * 2


class Reports(Callback):
    """All reports of a run by optimizer, and the bytes of all collectives of this process in training batches."""

    def __init__(self) -> None:
        self.reports: list[list[Any]] = []
        self.counter = ProcessCounter()

    def on_train_start(self, trainer: Any, *_: Any) -> None:
        self.reports = [[] for _ in trainer.strategy.zerosyncs]
        self.counter.start()

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        for seen, zerosync in zip(self.reports, trainer.strategy.zerosyncs, strict=True):
            if zerosync.report is not None and zerosync.report not in seen:
                seen.append(zerosync.report)
        if trainer.is_last_batch:
            self.counter.stop()
            sent = self.counter.take()  # without Lightning's own, of whether to end
            self.counted = sum(traffic.bytes for kind, traffic in sent.items() if kind != "broadcast")


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


def from_deepspeeds_own_tool(checkpoint: Path, names: Iterable[str]) -> dict[str, torch.Tensor]:
    """What it finds in the checkpoint's own directory and in those of the other optimizers."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    found: dict[str, torch.Tensor] = {}
    for directory in (checkpoint, checkpoint / "optimizer_1", checkpoint / "optimizer_2"):
        found |= get_fp32_state_dict_from_zero_checkpoint(directory, "checkpoint")
    return {name: found[f"net.{name}"] for name in names}


@pytest.mark.extended(but=("3",))
@pytest.mark.parametrize("stage", [1, 2, 3])
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
        with pytest.raises(MisconfigurationException, match=r"state of 3 optimizer\(s\), but .* returned 2"):
            make_trainer(several(stage)).fit(Gan("toggle"), Data(4).loader(), ckpt_path=tmp_path / "saved")
        at_saving = plain_agents(8)
        trained = {name: param for name, param in at_saving.items() if not name.startswith(("still", "stray"))}
        assert distance(from_deepspeeds_own_tool(tmp_path / "saved", trained), trained) == 0.0
        loaded = {name.removeprefix("net."): param for name, param in full_parameters(evaluated).items()}
        return distance(whole, plain_agents()), distance(resumed, plain_agents()), distance(loaded, at_saving)

    assert run_ranks(run) == [(0.0, 0.0, 0.0)] * WORLD
    rows = list(csv.DictReader(next(tmp_path.rglob("version_0/metrics.csv")).open()))
    logged = [{row[f"zerosync/optimizer_{k}/backwards"] for row in rows} - {""} for k in range(3)]
    assert logged == [{"4.0"}] * 3  # two batches of two losses, or four of the one that concerns the third


@pytest.mark.extended
@pytest.mark.parametrize("stage", [1, 3])
def test_one_optimizer_clips(stage: int) -> None:
    def run() -> Any:
        recorder, _ = fit(Agents(clip=0.05), several(stage), BATCHES)
        return distance(recorder.parameters, plain_agents(clip=0.05)), distance(recorder.parameters, plain_agents())

    clipped, unclipped = run_ranks(run)[0]
    assert clipped == 0.0 < 1e-3 < unclipped


@pytest.mark.extended(but=("3",))
@pytest.mark.skipif(not hasattr(LightningModule, "toggled_optimizer"), reason="this Lightning has no toggled_optimizer")
@pytest.mark.parametrize("stage", [1, 3])
def test_a_failed_backward_drops_the_window_that_it_reached(stage: int) -> None:
    class Failing(Gan):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            g, d = self.optimizers()
            with self.toggled_optimizer(g):
                self.manual_backward(self.net.g_loss(batch[0]))
            with self.toggled_optimizer(d):
                self.manual_backward(self.net.d_loss(batch[0]))
            with pytest.raises(ValueError, match="boom"), self.toggled_optimizer(d):
                self.fail(batch[0])
            with self.toggled_optimizer(d):
                self.manual_backward(self.net.d_loss(batch[0]))
            for optimizer in (g, d):
                optimizer.step()
                optimizer.zero_grad()

        def fail(self, x: torch.Tensor) -> None:
            """The last layer's gradients are there, and the first layer's never come."""

            def boom(_: torch.Tensor) -> None:
                raise ValueError("boom")

            handle = self.net.d[0].register_forward_hook(lambda *call: call[-1].register_hook(boom) and None)
            try:
                self.manual_backward(self.net.d(x).mean())
            finally:
                handle.remove()

    def run() -> Any:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            recorder, _ = fit(Failing("toggle"), several(stage), 4)
        dropped = [str(w.message) for w in caught if "ZeroSync dropped" in str(w.message)]
        net, data = Pair(), Data(4)
        g, d = Oracle(net, adamw(net.g.parameters())), Oracle(net, sgd(net.d.parameters()))
        for batch in range(4):
            g.backward(lambda rank, batch=batch: net.g_loss(data.batch(batch, rank)[0]))
            d.backward(lambda rank, batch=batch: net.d_loss(data.batch(batch, rank)[0]))
            g.step()
            d.step()
        return distance(recorder.parameters, full_parameters(net)), dropped

    for error, dropped in run_ranks(run):
        assert error == 0.0
        assert len(dropped) == 4 and all("2 backward(s)" in text and "raised ValueError" in text for text in dropped)
