"""Averages of the parameters: torch's ``AveragedModel``, and ``EMAModel`` as diffusers has it (N1)."""

import copy
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.harness.copying import adamw, loss_of, network
from tests.harness.engines import make_engine, rank
from tests.harness.oracle import Oracle, distance, full_average, full_parameters, of_trained
from tests.harness.ranks import run_ranks
from tests.harness.rounding import excess
from zerosync_strategy import attach

SHARDED = {"stage3_param_persistence_threshold": 0}
KINDS = pytest.mark.parametrize(
    ("stage", "options"),
    [(1, {}), (2, {}), (3, {}), (3, {"param_memory_budget": "all"})],
    ids=["1", "2", "3, sharded", "3, held"],
)


def engine_of(net: nn.Module, stage: int, **options: Any) -> Any:
    engine = make_engine(net, adamw(net), stage, SHARDED if stage == 3 else None)
    return engine, attach(engine, **options)


@pytest.mark.extended(but=("ema-3, held",))
@KINDS
@pytest.mark.parametrize("ema", [True, False], ids=["ema", "swa"])
def test_averaged_model_over_a_checkpoint(stage: int, options: dict[str, Any], ema: bool, tmp_path: Path) -> None:
    def averaged(net: nn.Module) -> AveragedModel:
        return AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.7) if ema else None)

    def run() -> tuple[float, float]:
        net = network()
        average = averaged(net)
        engine, _ = engine_of(net, stage, **options)
        for k in range(5):
            if k == 3:  # go on in a new process, as it were
                engine.save_checkpoint(str(tmp_path / "engine"))
                torch.save(average.state_dict(), tmp_path / f"average{rank()}.pt")
                engine.destroy()
                net = network()
                average = averaged(net)
                engine, _ = engine_of(net, stage, **options)
                engine.load_checkpoint(str(tmp_path / "engine"))
                average.load_state_dict(torch.load(tmp_path / f"average{rank()}.pt"))
            engine.backward(loss_of(engine, k, rank()))
            engine.step()
            average.update_parameters(engine)
        plain = network()
        expected, oracle = averaged(plain), Oracle(plain, adamw(plain))
        for k in range(5):
            oracle.backward(lambda r, k=k: loss_of(plain, k, r))
            oracle.step()
            expected.update_parameters(plain)
        of_average = distance(full_parameters(average.module), full_average(expected.module, plain))
        return of_average, distance(full_parameters(net), full_parameters(plain))

    assert run_ranks(run) == [(0.0, 0.0)] * 2


def test_averaged_model_of_a_sharded_module() -> None:
    def run() -> None:
        net = network()
        engine_of(net, 3)
        with pytest.raises(ValueError, match=r"AveragedModel\(\) .* sharded.* before the engine"):
            AveragedModel(net)

    run_ranks(run)


class EMAModel:
    """The calls of diffusers' own."""

    def __init__(self, parameters: Iterable[nn.Parameter], decay: float) -> None:
        self.shadow_params = [param.clone().detach() for param in parameters]
        self.decay = decay

    @torch.no_grad()
    def step(self, parameters: Iterable[nn.Parameter]) -> None:
        for shadow, param in zip(self.shadow_params, parameters, strict=True):
            shadow.sub_((1 - self.decay) * (shadow - param))

    def store(self, parameters: Iterable[nn.Parameter]) -> None:
        self.temp_stored_params = [param.detach().cpu().clone() for param in parameters]

    def copy_to(self, parameters: Iterable[nn.Parameter]) -> None:
        for shadow, param in zip(self.shadow_params, parameters, strict=True):
            param.data.copy_(shadow.to(param.device).data)

    def restore(self, parameters: Iterable[nn.Parameter]) -> None:
        for stored, param in zip(self.temp_stored_params, parameters, strict=True):
            param.data.copy_(stored.data)


@pytest.mark.extended(but=("2",))
@KINDS
def test_diffusers_ema_over_a_checkpoint(stage: int, options: dict[str, Any], tmp_path: Path) -> None:
    """It evaluates with the average between steps, and trains on from the average after the fourth and a checkpoint."""

    def run() -> float:
        net = network()
        plain = copy.deepcopy(net)
        ema = EMAModel(net.parameters(), 0.7)
        expected, oracle = EMAModel(plain.parameters(), 0.7), Oracle(plain, adamw(plain))
        engine, _ = engine_of(net, stage, **options)
        differences = []
        for k in range(6):
            engine.backward(loss_of(engine, k, rank()))
            oracle.backward(lambda r, k=k: loss_of(plain, k, r))
            engine.step()
            oracle.step()
            for average, module in ((ema, net), (expected, plain)):
                average.step(module.parameters())
                average.store(module.parameters())
                average.copy_to(module.parameters())
            with torch.no_grad():
                of_plain = of_trained(plain, lambda k=k: loss_of(plain, k, 0))
                differences.append(excess(loss_of(engine, k, 0), of_plain))
            if k == 3:
                engine.save_checkpoint(str(tmp_path))
                engine.destroy()
                net = network()
                engine, _ = engine_of(net, stage, **options)
                engine.load_checkpoint(str(tmp_path))
                continue
            ema.restore(net.parameters())
            expected.restore(plain.parameters())
        return max(distance(full_parameters(net), full_parameters(plain)), *differences)

    assert run_ranks(run) == [0.0, 0.0]
