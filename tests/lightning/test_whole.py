"""Optimizers that need whole parameters, under Lightning: automatic, and beside another one in manual optimization."""

from typing import Any

import deepspeed
import pytest
import torch

from tests.harness.optimizers import Noted
from tests.harness.oracle import Oracle, backward_all, distance, full_parameters
from tests.harness.problem import WORLD, adafactor, loss_of, network, oracle
from tests.harness.ranks import run_ranks
from tests.lightning.runs import Data, Module, accumulate, assert_one_reduction_per_step, fit, strategy

pytestmark = pytest.mark.parametrize("stage", [2, 3])


def muon(module: Any) -> torch.optim.Optimizer:
    return torch.optim.Muon([param for param in module.parameters() if param.dim() == 2], lr=0.02)


def adamw(module: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([param for param in module.parameters() if param.dim() < 2], lr=0.01)


class Both(Module):
    """Muon for the matrices, AdamW for the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return [muon(self.net), adamw(self.net)]

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(loss_of(self.net, batch) / 2)
        if batch_idx % 2:
            for optimizer in self.optimizers():
                optimizer.step()
                optimizer.zero_grad()


class Built(Module):
    """Its parameters may be sharded from the beginning, and its optimizer goes by their shapes."""

    def __init__(self, gathers: bool) -> None:
        super().__init__(Noted)
        self.net: Any = None
        self.gathers = gathers

    def configure_model(self) -> None:
        if self.net is None:
            self.net = network()

    def configure_optimizers(self) -> Any:
        with deepspeed.zero.GatheredParameters(list(self.parameters()), enabled=self.gathers):
            return super().configure_optimizers()


def config(stage: int) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage}, "zero_allow_untested_optimizer": True}


@pytest.mark.extended
def test_automatic(stage: int) -> None:
    def run() -> Any:
        options = {"accumulate_grad_batches": 4, "gradient_clip_val": 0.5}
        recorder, _ = fit(Module(adafactor), strategy(stage, config=config(stage)), 8, **options)
        assert_one_reduction_per_step(recorder, [4, 4])
        return distance(recorder.parameters, accumulate(oracle(adafactor), 8, 4, clip=0.5))

    assert run_ranks(run, timeout=100) == [0.0, 0.0]


@pytest.mark.extended
@pytest.mark.parametrize("gathers", [False, True])
def test_an_optimizer_that_goes_by_shapes(stage: int, gathers: bool) -> None:
    def run() -> float:
        recorder, _ = fit(Built(gathers), strategy(stage, config=config(stage)), 8, accumulate_grad_batches=4)
        return distance(recorder.parameters, accumulate(oracle(Noted), 8, 4))

    assert run_ranks(run, timeout=100) == [0.0, 0.0]


@pytest.mark.extended
def test_muon_beside_adamw(stage: int) -> None:
    def run() -> float:
        recorder, _ = fit(Both(), strategy(stage, config=config(stage)), 6)
        plain = network()
        oracles = [Oracle(plain, muon(plain), WORLD), Oracle(plain, adamw(plain), WORLD)]
        data = Data(6)
        for batch in range(6):
            backward_all(oracles, lambda rank, batch=batch: loss_of(plain, data.batch(batch, rank)) / 2)
            if batch % 2:
                for each in oracles:
                    each.step()
        return distance(recorder.parameters, full_parameters(plain))

    assert run_ranks(run, timeout=100) == [0.0, 0.0]
