"""What Fabric is told that would be wrong is refused, with an error that names it and the remedy."""

from typing import Any

import lightning_fabric
import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins.precision import MixedPrecision
from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn

from tests.fabric.runs import backward, losses, make_fabric, trained
from tests.harness.oracle import distance, full_parameters
from tests.harness.problem import adamw, network, oracle, sgd
from tests.harness.ranks import run_ranks
from zerosync_strategy import lightning_fabric as other
from zerosync_strategy.fabric import ZeroSyncFabricStrategy


def test_names_are_registered() -> None:
    assert STRATEGY_REGISTRY.get("zerosync").stage == 3
    assert [STRATEGY_REGISTRY.get(f"zerosync_stage_{stage}").stage for stage in (1, 2, 3)] == [1, 2, 3]
    assert STRATEGY_REGISTRY.get("zerosync_stage_2_offload").config["zero_optimization"]["offload_optimizer"]
    assert STRATEGY_REGISTRY.get("zerosync_stage_3_offload").config["zero_optimization"]["offload_param"]


@pytest.mark.extended
@pytest.mark.parametrize("stage", [2, 3])
def test_fabric_of_the_other_package(stage: int) -> None:
    """By name; the same files, with the other package's classes."""

    def run() -> float:
        named = lambda stage: f"zerosync_stage_{stage}"  # noqa: E731
        fabric = make_fabric(stage, lightning_fabric.Fabric, named if stage == 2 else other.ZeroSyncFabricStrategy)
        assert isinstance(fabric.strategy, other.ZeroSyncFabricStrategy)
        model, optimizer = trained(fabric, adamw)
        plain = oracle(adamw)
        for step in range(2):
            for loss in losses(fabric, model, range(2 * step, 2 * step + 2), 2):
                fabric.backward(loss)
            fabric.clip_gradients(model, optimizer, max_norm=0.05)
            optimizer.step()
            optimizer.zero_grad()
            backward(plain, range(2 * step, 2 * step + 2), 2)
            plain.step(clip=0.05)
        return distance(full_parameters(model.module), full_parameters(plain.module))

    assert run_ranks(run, timeout=60) == [0.0, 0.0]


def test_options() -> None:
    strategy = ZeroSyncFabricStrategy(stage=2, reduce_bucket_size=10, coalesce=False)
    assert strategy.config["zero_optimization"]["reduce_bucket_size"] == 10 and not strategy.zerosync_config.coalesce
    strategy = ZeroSyncFabricStrategy(config={"zerosync": {"param_memory_budget": "all"}})
    assert strategy.stage == 3 and strategy.zerosync_config.param_memory_budget == "all"
    refused: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (MisconfigurationException, "stage 1, 2 or 3, got stage=0", {"stage": 0}),
        (TypeError, r"unknown option 'reduce_bucket'.* Did you mean 'reduce_bucket_size'", {"reduce_bucket": 1}),
        (MisconfigurationException, "got 'optimizer' in .* for fabric.setup", {"config": {"optimizer": {}}}),
        (
            MisconfigurationException,
            r"'gradient_accumulation_steps' = 4 .* call optimizer.step\(\)",
            {"config": {"gradient_accumulation_steps": 4}},
        ),
    ]
    for error, names, options in refused:
        with pytest.raises(error, match=names):
            ZeroSyncFabricStrategy(**options)
    for options in ({"precision": "16-mixed"}, {"plugins": [MixedPrecision("bf16-mixed", "cpu")]}):
        with pytest.raises(MisconfigurationException, match=r"'16-mixed' on CPU|MixedPrecision. Use Fabric\(precision"):
            Fabric(accelerator="cpu", strategy=ZeroSyncFabricStrategy(), **options).launch()


@pytest.mark.extended(but=("2",))
@pytest.mark.parametrize("stage", [2, 3])
def test_in_a_run(stage: int) -> None:
    def run() -> None:
        fabric = make_fabric(stage)
        model, optimizer = trained(fabric)
        net = network()

        def refused(error: type[Exception], names: str, call: Any, *args: Any, **options: Any) -> None:
            with pytest.raises(error, match=names):
                call(*args, **options)

        halves = [sgd(net[part].parameters()) for part in (slice(0, 2), slice(2, 5))]
        refused(ValueError, "got 2 optimizers for one model.* as a model of its own", fabric.setup, net, *halves)
        refused(ValueError, "LBFGS computes with all", fabric.setup, net, torch.optim.LBFGS(net.parameters()))
        both = nn.Sequential(net, model.module)
        refused(ValueError, r"'1\.0\.weight' is one of 6", fabric.setup, both, sgd(net.parameters()))
        refused(RuntimeError, "this rank's shard alone. Save it with its model", optimizer.state_dict)
        refused(RuntimeError, "an optimizer without ZeRO", optimizer.load_state_dict, halves[0].state_dict())
        refused(RuntimeError, "no backward ran since the last", optimizer.step)
        refused(
            ValueError, r"create_graph=True.* torch.autograd.grad\(\) of what model.module computes",
            fabric.backward, next(losses(fabric, model, range(1))), create_graph=True,
        )  # fmt: skip
        x = torch.randn(2, 16, requires_grad=True)
        assert torch.autograd.grad(model.module(x).sum(), x)[0].any()
        refused(
            TypeError, r"fabric.save\(\) got filter=", fabric.save, "nowhere", {"model": model}, filter={"model": bool}
        )
        refused(ValueError, "found no model in the state", fabric.save, "nowhere", {"optimizer": optimizer})
        refused(FileNotFoundError, "no checkpoint of the model 'model'", fabric.load, "nowhere", {"model": model})
        refused(RuntimeError, "was not set up by fabric.setup", fabric.clip_gradients, model, halves[0], max_norm=1.0)
        fabric.backward(next(losses(fabric, model, range(1))))
        refused(
            RuntimeError, "in Fabric, fabric.strategy.zerosync", lambda: model.module[0].weight.grad.clamp_(max=0.1)
        )

    run_ranks(run, timeout=60)


def test_a_step_without_zero_grad() -> None:
    """PyTorch would step the sum of its gradients and those of the last step."""

    def run() -> None:
        fabric = make_fabric(2)
        model, optimizer = trained(fabric, adamw)
        for loss in losses(fabric, model, range(2)):
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        for loss in losses(fabric, model, range(2)):
            fabric.backward(loss)
        optimizer.step()
        for loss in losses(fabric, model, range(2)):
            fabric.backward(loss)
        with pytest.raises(RuntimeError, match=r"no optimizer.zero_grad\(\) since the last"):
            optimizer.step()

    run_ranks(run)
