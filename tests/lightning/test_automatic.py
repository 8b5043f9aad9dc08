"""Automatic optimization equals plain torch, with one reduction per optimizer step (W1, W2)."""

import os
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch import nn

from tests.harness.experts import gathered_anew, routed_network
from tests.harness.extended import STAGES
from tests.harness.oracle import Oracle, distance, full_parameters
from tests.harness.problem import adamw, backward_of, loss_of, network, oracle, sgd
from tests.harness.ranks import KEPT_ON_DEVICES, SIMULATED, run_ranks
from tests.lightning.runs import (
    Data,
    Module,
    Recorder,
    accumulate,
    assert_one_reduction_per_step,
    fit,
    make_trainer,
    strategy,
)
from zerosync_strategy import ZeroSyncStrategy
from zerosync_strategy.core.comm import nodes


@pytest.mark.extended(but=("2",))
@pytest.mark.parametrize("stage", STAGES)
def test_accumulation_with_the_tail_over_epochs(stage: int) -> None:
    def run() -> Any:
        recorder, trainer = fit(Module(adamw), strategy(stage), 10, accumulate_grad_batches=4, max_epochs=2)
        assert_one_reduction_per_step(recorder, [4, 4, 2, 4, 4, 2])
        return distance(recorder.parameters, accumulate(oracle(adamw), 10, 4, epochs=2)), trainer.global_step

    assert run_ranks(run) == [(0.0, 6), (0.0, 6)]


@pytest.mark.extended
@pytest.mark.parametrize("stage", STAGES)
def test_accumulation_scheduler(stage: int) -> None:
    def run() -> float:
        scheduler = GradientAccumulationScheduler({0: 2, 1: 4})
        recorder, _ = fit(Module(), strategy(stage), 8, callbacks=[scheduler], max_epochs=3)
        assert_one_reduction_per_step(recorder, [2] * 4 + [4] * 4)
        assert type(scheduler) is GradientAccumulationScheduler  # given back as it was
        return distance(recorder.parameters, accumulate(oracle(), 8, lambda epoch: 4 if epoch else 2, epochs=3))

    assert run_ranks(run) == [0.0, 0.0]


def test_a_parameter_that_one_rank_does_not_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inside a module that all ranks run, by default options: as experts without tokens (W4)."""
    monkeypatch.setattr(nodes, "WITHIN_HOST", nodes.MessageSizes(400, 1))

    def run() -> float:
        module = Module()
        module.net = routed_network()
        zero = {"stage": 3, **gathered_anew(), "reduce_bucket_size": 300}  # several buckets, as of a large model
        recorder, _ = fit(module, strategy(3, config={"zero_optimization": zero}), 8, accumulate_grad_batches=2)
        assert_one_reduction_per_step(recorder, [2] * 4)
        net = routed_network()
        expected = accumulate(Oracle(net, sgd(net.parameters())), 8, 2)
        return distance(recorder.parameters, expected)

    assert run_ranks(run) == [0.0, 0.0]


class MakesLoader(Module):
    """Its hook may draw random numbers, as one that splits a data set does."""

    made = 0

    def train_dataloader(self) -> Any:
        self.made += 1
        return Data(4).loader()


def test_a_loader_is_made_once() -> None:
    def run() -> tuple[int, float]:
        module, recorder = MakesLoader(), Recorder()
        make_trainer(strategy(2), [recorder]).fit(module)
        return module.made, distance(recorder.parameters, accumulate(oracle(), 4, 1))

    assert run_ranks(run) == [(1, 0.0)] * 2


class StepsEverySecondBatch(Module):
    """By an overridden ``optimizer_step``, as in Lightning's guide; each closure drops the gradients before its own."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        if batch_idx % 4 == 1:
            optimizer.step(closure=optimizer_closure)
            return
        optimizer_closure()
        if batch_idx % 4 == 3:
            optimizer.step()


@pytest.mark.extended(but=("2",))
@pytest.mark.parametrize("stage", STAGES)
def test_a_closure_apart_from_the_step(stage: int) -> None:
    def run() -> float:
        recorder, _ = fit(StepsEverySecondBatch(), strategy(stage), 8)
        plain = oracle()
        for batch in range(1, 8, 2):
            backward_of(plain, batch)
            plain.step()
        return distance(recorder.parameters, full_parameters(plain.module))

    assert run_ranks(run) == [0.0, 0.0]


class OwnBackward(Module):
    """With raw backwards in the overridden hook: one as the last of a window, or two."""

    parts: tuple[float, ...] = (0.5,)

    def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        for part in self.parts:
            (part * loss).backward(retain_graph=True)


class TwoBackwards(OwnBackward):
    parts = (0.25, 0.5)


@pytest.mark.extended(but=("2-OwnBackward",))
@pytest.mark.parametrize("module", [OwnBackward, TwoBackwards])
@pytest.mark.parametrize("stage", STAGES)
def test_an_overridden_backward(stage: int, module: type[OwnBackward]) -> None:
    def run() -> float:
        recorder, _ = fit(module(), strategy(stage), 8, accumulate_grad_batches=2)
        plain, data = oracle(), Data(8)
        for batch in range(8):
            for part in module.parts:
                loss = lambda rank, batch=batch, part=part: part * loss_of(plain.module, data.batch(batch, rank)) / 2  # noqa: E731
                plain.backward(loss)
            if batch % 2:
                plain.step()
        return distance(recorder.parameters, full_parameters(plain.module))

    assert run_ranks(run) == [0.0, 0.0]


@pytest.mark.extended(but=("3",))
@pytest.mark.parametrize("stage", STAGES)
def test_clipping_by_norm(stage: int) -> None:
    def run() -> Any:
        recorder, _ = fit(Module(), strategy(stage), accumulate_grad_batches=4, gradient_clip_val=0.05)
        unclipped = distance(recorder.parameters, accumulate(oracle(), 12, 4))
        return distance(recorder.parameters, accumulate(oracle(), 12, 4, clip=0.05)), unclipped

    clipped, unclipped = run_ranks(run)[0]
    assert clipped == 0.0 < 1e-3 < unclipped


@pytest.mark.extended
@pytest.mark.parametrize("stage", [1, 3])
def test_overridden_gradient_clipping_hook_clips(stage: int) -> None:
    class OwnClipping(Module):
        def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
            # The first step only: clipping must not outlive the step it was asked for.
            if self.trainer.global_step == 0:
                self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")

    def run() -> float:
        recorder, _ = fit(OwnClipping(), strategy(stage), 8, accumulate_grad_batches=4)
        plain = oracle()
        for batch in range(8):
            backward_of(plain, batch, 4)
            if batch % 4 == 3:
                plain.step(clip=0.05 if batch == 3 else 0.0)
        return distance(recorder.parameters, full_parameters(plain.module))

    assert run_ranks(run) == [0.0, 0.0]


@pytest.mark.extended(but=("3",))
@pytest.mark.parametrize("stage", STAGES)
def test_validation_in_mid_window(stage: int) -> None:
    def run() -> float:
        recorder, _ = fit(Module(adamw), strategy(stage), accumulate_grad_batches=4, val_check_interval=3)
        assert_one_reduction_per_step(recorder, [4] * 3)
        return distance(recorder.parameters, accumulate(oracle(adamw), 12, 4))

    assert run_ranks(run) == [0.0, 0.0]


@pytest.mark.extended(but=("3-plateau",))
@pytest.mark.parametrize(
    ("stage", "interval"), [(1, "step"), (2, "step"), (3, "step"), (1, "epoch"), (2, "plateau"), (3, "plateau")]
)
def test_learning_rate_schedulers(stage: int, interval: str) -> None:
    def make(optimizer: Any) -> Any:
        if interval == "plateau":
            return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.1, patience=0, threshold=10.0)
        return torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)

    class Scheduled(Module):
        def configure_optimizers(self) -> Any:
            optimizer = sgd(self.parameters())
            config = {"scheduler": make(optimizer), "interval": "step" if interval == "step" else "epoch"}
            return {"optimizer": optimizer, "lr_scheduler": config | {"monitor": "val_loss"}}

    def run() -> Any:
        recorder, trainer = fit(Scheduled(), strategy(stage), 10, accumulate_grad_batches=4, max_epochs=4)
        plain = oracle()
        scheduler = make(plain.optimizer)
        step = {"after_step": scheduler.step} if interval == "step" else {"after_epoch": scheduler.step}
        if interval == "plateau":
            step = {"after_epoch": lambda: scheduler.step(1.0)}  # never an improvement, as the threshold has it
        expected = accumulate(plain, 10, 4, epochs=4, **step)
        return distance(recorder.parameters, expected), _lr(trainer.optimizers[0]) == _lr(plain.optimizer) < 0.5

    assert run_ranks(run) == [(0.0, True)] * 2


def test_two_schedulers_of_one_optimizer_with_an_empty_group() -> None:
    """As of parameters without weight decay, in a model without biases."""

    class Scheduled(Module):
        def configure_optimizers(self) -> Any:
            groups = [{"params": [], "weight_decay": 0.0}, {"params": list(self.parameters())}]
            optimizer, of = sgd(groups), torch.optim.lr_scheduler
            return [optimizer], [
                {"scheduler": of.StepLR(optimizer, 1, 0.5), "interval": "step"},
                of.StepLR(optimizer, 1),
            ]

    def run() -> float:
        _, trainer = fit(Scheduled(), strategy(2), 2, max_epochs=2)
        return _lr(trainer.optimizers[0])

    assert run_ranks(run) == [pytest.approx(0.5 * 0.5**4 * 0.1**2)] * 2


def _lr(optimizer: Any) -> float:
    return optimizer.param_groups[0]["lr"]


@pytest.mark.extended(but=("2",))
@pytest.mark.parametrize("stage", STAGES)
def test_fit_twice(stage: int) -> None:
    def run() -> float:
        module = Module(adamw)
        recorder, trainer = fit(module, strategy(stage), 10, accumulate_grad_batches=4)
        trainer.fit_loop.max_epochs = 2
        trainer.fit(module, Data(10).loader())
        plain = oracle(adamw)
        accumulate(plain, 10, 4)
        plain.optimizer = adamw(plain.module.parameters())  # Lightning configures optimizers anew
        return distance(recorder.parameters, accumulate(plain, 10, 4))

    assert run_ranks(run) == [0.0, 0.0]


class Odd(nn.Module):
    """Frozen, tied, and on some batches unused parameters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(16, 16)
        self.tied = nn.Linear(16, 16)
        self.tied.weight = self.first.weight
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.sometimes = nn.Linear(16, 4)
        self.never = nn.Linear(16, 4)
        self.last = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor, batch: int) -> torch.Tensor:
        hidden = torch.tanh(self.frozen(torch.tanh(self.tied(torch.tanh(self.first(x))))))
        # Whole windows of two batches pass without `sometimes`.
        return self.last(hidden) + (self.sometimes(hidden) if batch % 4 == 1 else 0.0)


class OddModule(Module):
    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer)
        self.net = Odd()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return nn.functional.mse_loss(self.net(batch[0], batch_idx), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        pass


@pytest.mark.extended(but=("3-adamw",))
@pytest.mark.parametrize(("stage", "optimizer"), [(1, adamw), (2, sgd), (3, adamw), (3, sgd)])
def test_frozen_tied_and_unused_parameters(stage: int, optimizer: Any) -> None:
    def run() -> float:
        recorder, _ = fit(OddModule(optimizer), strategy(stage), 12, accumulate_grad_batches=2)
        assert_one_reduction_per_step(recorder, [2] * 6)
        net, data = Odd(), Data(12)
        plain = Oracle(net, optimizer([p for p in net.parameters() if p.requires_grad]))
        for batch in range(12):

            def loss(rank: int, batch: int = batch) -> torch.Tensor:
                x, y = data.batch(batch, rank)
                return nn.functional.mse_loss(net(x, batch), y) / 2

            plain.backward(loss)
            if batch % 2:
                plain.step()
        return distance(recorder.parameters, full_parameters(net))

    assert run_ranks(run) == [0.0, 0.0]


def test_configure_model_under_stage_3() -> None:
    class Late(Module):
        def __init__(self) -> None:
            super().__init__(adamw)
            del self.net

        def configure_model(self) -> None:
            if not hasattr(self, "net"):
                self.net = network()
                assert self.net[0].weight.numel() == 0  # partitioned as it was made

    def run() -> float:
        recorder, _ = fit(Late(), strategy(3), accumulate_grad_batches=4)
        return distance(recorder.parameters, accumulate(oracle(adamw), 12, 4))

    assert run_ranks(run) == [0.0, 0.0]


@pytest.mark.extended(but=("3-bf16-true",))
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("stage", STAGES)
def test_bf16(stage: int, precision: str) -> None:
    """bf16 has 8 bits of mantissa: parameters of size 1 that move by 0.5 stay within 2 % of the fp32 oracle."""

    def run() -> Any:
        recorder, _ = fit(Module(), strategy(stage), accumulate_grad_batches=4, precision=precision)
        assert_one_reduction_per_step(recorder, [4] * 3)
        start = full_parameters(network())
        return distance(recorder.parameters, accumulate(oracle(), 12, 4)), distance(recorder.parameters, start)

    error, moved = run_ranks(run)[0]
    assert error < 0.02 < 0.1 < moved


@pytest.mark.extended(but=("3",))
@pytest.mark.parametrize("stage", STAGES)
def test_the_last_backward_of_a_window_reduces(stage: int) -> None:
    class Watching(Module):
        def __init__(self) -> None:
            super().__init__()
            self.reductions: list[int] = []

        def on_after_backward(self) -> None:
            self.reductions.append(self.trainer.strategy.zerosync.window.early_reductions)

    def run() -> Any:
        overlapped, plain = Watching(), Watching()
        recorder, _ = fit(overlapped, ZeroSyncStrategy(stage=stage), 6, accumulate_grad_batches=4)
        fit(plain, ZeroSyncStrategy(stage=stage, overlap_last=False), 6, accumulate_grad_batches=4)
        assert_one_reduction_per_step(recorder, [4, 2])
        return distance(recorder.parameters, accumulate(oracle(), 6, 4)), overlapped.reductions, plain.reductions

    # The tail's last batch is known as well.
    assert run_ranks(run) == [(0.0, [0, 0, 0, 1, 0, 1], [0] * 6)] * 2


@pytest.mark.extended(but=("2",))
@pytest.mark.parametrize("stage", STAGES)
def test_options_reach_the_core(stage: int) -> None:
    def run() -> float:
        options: dict[str, Any] = {"grad_memory_budget": "2KB", "reduction": "ordered"}
        options |= {"param_memory_budget": "all"} if stage == 3 else {}
        recorder, _ = fit(Module(), ZeroSyncStrategy(stage=stage, **options), accumulate_grad_batches=4)
        largest = 32 * 32 * 4 * (1 + KEPT_ON_DEVICES * (SIMULATED in os.environ))
        assert all(r.reductions > 1 and r.peak_unreduced_bytes <= 2000 + largest for r in recorder.reports)
        return distance(recorder.parameters, accumulate(oracle(), 12, 4))

    assert run_ranks(run) == [0.0, 0.0]


class OverItems(Module):
    """Batches of different lengths by batch and rank, with sums for losses."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = (part[: length(batch_idx, self.global_rank)] for part in batch)
        self.trainer.strategy.zerosync.mean_over(y.numel())
        return nn.functional.mse_loss(self.net(x), y, reduction="sum")


def length(batch: int, rank: int) -> int:
    return (batch + rank) % 3


@pytest.mark.extended(but=("2",))
@pytest.mark.parametrize("stage", [2, 3])
def test_a_mean_over_items(stage: int) -> None:
    """What Lightning divides a loss by for accumulation is undone, at the tail of an epoch too."""

    def run() -> float:
        recorder, _ = fit(OverItems(), strategy(stage, loss_reduction="sum"), 10, accumulate_grad_batches=4)
        plain, data = oracle(), Data(10)
        for first in (0, 4, 8):
            batches = range(first, min(first + 4, 10))
            items = sum(4 * length(batch, rank) for batch in batches for rank in range(2))
            for batch in batches:
                for rank in range(2):
                    x, y = (part[: length(batch, rank)] for part in data.batch(batch, rank))
                    loss = nn.functional.mse_loss(plain.module(x), y, reduction="sum")
                    plain.backward_on(rank, loss * 2 / items)
            plain.step()
        return distance(recorder.parameters, full_parameters(plain.module))

    for error in run_ranks(run):
        assert error == 0.0
