"""``fabric.setup_module()``, then the optimizer, then ``fabric.setup_optimizers()``, as programs for FSDP have it."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fabric.runs import backward, losses, make_fabric, trained
from tests.harness.extended import STAGES
from tests.harness.oracle import distance, full_parameters
from tests.harness.problem import adamw, network, oracle, sgd
from tests.harness.ranks import run_ranks


def hooks(model: Any) -> list[int]:
    return [len(module._forward_pre_hooks) + len(module._forward_hooks) for module in model.module.modules()]


@pytest.mark.extended(but=("2",))
@pytest.mark.parametrize("stage", STAGES)
def test_a_model_trains_once_it_has_an_optimizer(stage: int, tmp_path: Path) -> None:
    """It is evaluated before; forwards, clipping, saving and loading go to the engine afterwards."""

    def run() -> Any:
        fabric = make_fabric(stage)
        model = fabric.setup_module(network())
        names = [name for name, _ in model.named_parameters()]
        plain = oracle(adamw)
        with torch.no_grad():
            for ours, theirs in zip(
                losses(fabric, model, range(2)), losses(fabric, plain.module, range(2)), strict=True
            ):
                torch.testing.assert_close(ours, theirs)
        with pytest.raises(RuntimeError, match="found a model that was set up without an optimizer"):
            fabric.backward(next(losses(fabric, model, range(1))))
        optimizer = fabric.setup_optimizers(adamw(model.parameters()))
        assert names == [name for name, _ in model.named_parameters()]
        together, _ = trained(fabric)
        assert hooks(model) == hooks(together)  # one engine has them

        def train(steps: range) -> None:
            for step in steps:
                for loss in losses(fabric, model, range(2 * step, 2 * step + 2), 2):
                    fabric.backward(loss, model=model)
                fabric.clip_gradients(model, optimizer, max_norm=0.05)
                optimizer.step()
                optimizer.zero_grad()

        train(range(2))
        fabric.save(tmp_path, {"model": model, "optimizer": optimizer})
        train(range(3, 5))  # forgotten
        fabric.load(tmp_path, {"model": model, "optimizer": optimizer})
        train(range(2, 3))
        for step in range(3):
            backward(plain, range(2 * step, 2 * step + 2), 2)
            plain.step(clip=0.05)
        return distance(full_parameters(model.module), full_parameters(plain.module)), fabric.strategy.zerosyncs[
            0
        ].report.reductions

    results = run_ranks(run, timeout=60)
    assert max(error for error, _ in results) == 0.0
    assert [reductions for _, reductions in results] == [1, 1]


def test_an_optimizer_without_one_prepared_model() -> None:
    def run() -> None:
        fabric = make_fabric(2)
        trains, _ = trained(fabric)
        first, second = fabric.setup_module(network()), fabric.setup_module(network())

        def refused(names: str, *optimizers: Any) -> None:
            with pytest.raises(ValueError, match=names):
                fabric.setup_optimizers(*optimizers)

        refused("got no optimizer")
        refused("parameters of 0 models that fabric.setup_module", sgd(trains.parameters()))
        refused("parameters of 2 models", sgd([*first.parameters(), *second.parameters()]))
        fabric.setup_optimizers(sgd(first.parameters()))
        refused("belong to a model that was set up before", sgd(first.parameters()))

    run_ranks(run, timeout=60)
