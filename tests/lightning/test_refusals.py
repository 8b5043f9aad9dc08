"""What would be wrong is refused, with an error that names the option and the remedy."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import StrategyRegistry
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from tests.harness.ranks import run_ranks
from tests.lightning.runs import Data, Module, make_trainer
from zerosync_strategy import ZeroSyncStrategy


def test_a_checkpoint_before_there_is_an_engine(tmp_path: Path) -> None:
    trainer = make_trainer(ZeroSyncStrategy(2))
    trainer.strategy.connect(Module())
    with pytest.raises(MisconfigurationException, match="to be saved before fit"):
        trainer.save_checkpoint(tmp_path / "early.ckpt")


@pytest.mark.parametrize("stage", [0, 4, True, "3"])
def test_stage(stage: Any) -> None:
    with pytest.raises(MisconfigurationException, match="stage 1, 2 or 3, got stage="):
        ZeroSyncStrategy(stage=stage)


def test_configuration(tmp_path: Path) -> None:
    given = {"zero_optimization": {"stage": 2}, "zerosync": {"coalesce": False}}
    path = tmp_path / "deepspeed.json"
    path.write_text(json.dumps(given))
    for config in (given, path, str(path)):
        strategy = ZeroSyncStrategy(config=config)
        assert strategy.stage == 2 and strategy.zerosync_config.coalesce is False
        assert "zerosync" not in strategy.config
    assert given == {"zero_optimization": {"stage": 2}, "zerosync": {"coalesce": False}}

    with pytest.raises(MisconfigurationException, match=r"stage=3, but .* stage 2"):
        ZeroSyncStrategy(stage=3, config=given)
    with pytest.raises(MisconfigurationException, match=r"config\['zero_optimization'\]\['stage'\]=0"):
        ZeroSyncStrategy(config={"zero_optimization": {"stage": 0}})
    with pytest.raises(MisconfigurationException, match=r"config= and also reduce_bucket_size"):
        ZeroSyncStrategy(config=given, reduce_bucket_size=10)
    with pytest.raises(ValueError, match=r"'coalesce' is False in the 'zerosync' block and True"):
        ZeroSyncStrategy(config=given, coalesce=True)
    with pytest.raises(ValueError, match=r"Unknown ZeroSync option 'coalesced'.* Did you mean 'coalesce'"):
        ZeroSyncStrategy(config={**given, "zerosync": {"coalesced": True}})
    with pytest.raises(TypeError, match=r"'zerosync' block .* takes a mapping, got 3"):
        ZeroSyncStrategy(config={**given, "zerosync": 3})


def test_a_configuration_may_leave_things_open(tmp_path: Path) -> None:
    """Stage and all: then stage= has it, and Lightning or DeepSpeed everything else."""
    auto = {"zero_optimization": {"stage": "auto", "reduce_bucket_size": "auto"}, "gradient_clipping": "auto"}
    auto |= dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), "auto")
    auto |= {dtype: {"enabled": "auto"} for dtype in ("fp16", "bf16")}
    for config in ({"bf16": {"enabled": False}}, {"zerosync": {"coalesce": False}}, {}, auto):
        assert ZeroSyncStrategy(config=config).stage == 3
        strategy = ZeroSyncStrategy(stage=2, config=config)
        assert strategy.stage == 2 and strategy.config["zero_optimization"] == {"stage": 2}

    (path := tmp_path / "auto.json").write_text(json.dumps(auto))
    enabled = {"32-true": (False, False), "bf16-mixed": (False, True)}
    for precision, expected in enabled.items():
        strategy = make_trainer(ZeroSyncStrategy(stage=1, config=path), precision=precision).strategy
        strategy._format_config()
        assert (strategy.config["fp16"]["enabled"], strategy.config["bf16"]["enabled"]) == expected
        assert "auto" not in str(strategy.config)

    def run() -> None:
        trainer = make_trainer(ZeroSyncStrategy(stage=1, config=path), gradient_clip_val=1.0)
        trainer.fit(Module(), Data(2).loader())
        engine = trainer.strategy.deepspeed_engine
        assert (engine.zero_optimization_stage(), engine.train_micro_batch_size_per_gpu()) == (1, 2)

    run_ranks(run)
    with pytest.raises(MisconfigurationException, match=r"'optimizer\.params\.lr' = 'auto'.*Set it, or leave"):
        ZeroSyncStrategy(config={"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}})


def test_options() -> None:
    with pytest.raises(TypeError, match=r"unknown option 'reduce_bucket'.* Did you mean 'reduce_bucket_size'"):
        ZeroSyncStrategy(stage=2, reduce_bucket=10)
    with pytest.raises(TypeError, match=r"'coalesce' takes True or False, got 1"):
        ZeroSyncStrategy(stage=2, coalesce=1)
    strategy = ZeroSyncStrategy(stage=2, reduce_bucket_size=10, coalesce=False)
    assert strategy.config["zero_optimization"]["reduce_bucket_size"] == 10


def test_names_are_registered() -> None:
    assert StrategyRegistry.get("zerosync").stage == 3
    assert [StrategyRegistry.get(f"zerosync_stage_{stage}").stage for stage in (1, 2, 3)] == [1, 2, 3]


def test_precision_plugin() -> None:
    with pytest.raises(MisconfigurationException, match=r"MixedPrecision. Use Trainer\(precision=...\)"):
        make_trainer(ZeroSyncStrategy(stage=3), plugins=[MixedPrecision("bf16-mixed", "cpu")])


class TwoOptimizers(Module):
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.net[k].parameters(), lr=0.1) for k in (0, 2)]

    def training_step(self, batch: Any, batch_idx: int) -> None: ...


class SharedParameters(TwoOptimizers):
    def configure_optimizers(self) -> Any:
        first, *rest = self.net.parameters()
        return [torch.optim.SGD(self.net.parameters(), lr=0.1), torch.optim.SGD([first, rest[-1]], lr=0.1)]


class ForeignParameter(TwoOptimizers):
    def configure_optimizers(self) -> Any:
        self.__dict__["own"] = torch.nn.Parameter(torch.ones(3))
        return [torch.optim.SGD(self.parameters(), lr=0.1), torch.optim.SGD([self.own], lr=0.1)]


class NothingToTrain(TwoOptimizers):
    def configure_optimizers(self) -> Any:
        self.net[2].requires_grad_(False)
        return super().configure_optimizers()


class NoOptimizer(Module):
    def configure_optimizers(self) -> None:
        pass


class TwoSchedulers(Module):
    """One of them by DeepSpeed's configuration."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


class SecondOrder(Module):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


class OneForeignParameter(Module):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([*self.parameters(), torch.nn.Parameter(torch.ones(3))], lr=0.1)


class Complex(Module):
    def __init__(self) -> None:
        super().__init__()
        self.phase = torch.nn.Parameter(torch.ones(3, dtype=torch.complex64))


class ClipsByValue(Module):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(super().training_step(batch, batch_idx))
        self.clip_gradients(self.optimizers(), gradient_clip_val=0.5, gradient_clip_algorithm="value")


class StepsTwice(Module):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(super().training_step(batch, batch_idx))
        self.optimizers().step()
        self.optimizers().step()


def manual(module: Module) -> Module:
    module.automatic_optimization = False
    return module


@pytest.mark.parametrize(
    ("make", "options", "error", "names"),
    [
        (Module, {"precision": "16-mixed"}, MisconfigurationException, "'16-mixed' on CPU. Use '32-true'"),
        (Module, {"precision": "16-true"}, MisconfigurationException, "'16-true' on CPU. Use '32-true'"),
        (
            Module,
            {"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"},
            MisconfigurationException,
            "gradient_clip_algorithm='value'; use 'norm'",
        ),
        (lambda: manual(ClipsByValue()), {}, MisconfigurationException, "gradient_clip_algorithm='value'; use 'norm'"),
        (TwoOptimizers, {}, RuntimeError, "multiple optimizers is only supported with manual optimization"),
        (
            lambda: manual(SharedParameters()),
            {},
            MisconfigurationException,
            r"share some: net\.0\.weight in optimizers 0 and 1; net\.4\.bias in optimizers 0 and 1",
        ),
        (
            lambda: manual(TwoOptimizers()),
            {"config": {"fp16": {"enabled": True}}},
            MisconfigurationException,
            "and 2 optimizers.* Use 'bf16-mixed'",
        ),
        (
            lambda: manual(ForeignParameter()),
            {},
            MisconfigurationException,
            r"optimizer 1 .* not in the ForeignParameter: number 0 of group 0 with shape \(3,\)",
        ),
        (NoOptimizer, {}, MisconfigurationException, "returned no optimizer.* Return one"),
        (lambda: manual(NothingToTrain()), {}, MisconfigurationException, "Optimizer 1 .* no parameter that requires"),
        (
            TwoSchedulers,
            {"config": {"scheduler": {"type": "WarmupLR", "params": {}}}},
            MisconfigurationException,
            "Both the DeepSpeed configuration and configure_optimizers",
        ),
        (
            SecondOrder,
            {},
            MisconfigurationException,
            "optimizer 0 .* LBFGS computes with all parameters at once.* Use AdamW",
        ),
        (
            OneForeignParameter,
            {},
            MisconfigurationException,
            r"not in the OneForeignParameter: number 6 of group 0 with shape \(3,\)",
        ),
        (Complex, {}, MisconfigurationException, "parameters are complex: phase.*view_as_complex"),
        (lambda: manual(StepsTwice()), {}, RuntimeError, "no backward ran since the last optimizer step"),
    ],
)
def test_refused_in_a_run_on_every_rank(make: Any, options: Any, error: Any, names: str) -> None:
    def run() -> None:
        config = {"zero_optimization": {"stage": 3}, "zero_allow_untested_optimizer": True, **options.pop("config", {})}
        with pytest.raises(error, match=names):
            make_trainer(ZeroSyncStrategy(config=config), **options).fit(make(), Data(2).loader())

    run_ranks(run, timeout=60)


class KeepsItsOptimizer(Module):
    def configure_optimizers(self) -> Any:
        self.__dict__.setdefault("kept", torch.optim.SGD(self.parameters(), lr=0.1))
        return self.__dict__["kept"]


@pytest.mark.extended(but=("2",))
@pytest.mark.parametrize("stage", [2, 3])
def test_an_optimizer_serves_one_fit(stage: int) -> None:
    def run() -> None:
        module = KeepsItsOptimizer()
        make_trainer(ZeroSyncStrategy(stage=stage)).fit(module, Data(2).loader())
        with pytest.raises(MisconfigurationException, match=r"optimizer 0 .* SGD has been given to an engine before"):
            make_trainer(ZeroSyncStrategy(stage=stage)).fit(module, Data(2).loader())
        del module.__dict__["kept"]
        make_trainer(ZeroSyncStrategy(stage=stage)).fit(module, Data(2).loader())  # the module is as it was

    run_ranks(run, timeout=60)
