"""LightningCLI: every option of the strategy on the command line and in YAML."""

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.strategies import DeepSpeedStrategy

from tests.harness.oracle import distance
from tests.harness.problem import WORLD, oracle
from tests.harness.ranks import run_ranks
from tests.lightning import runs
from zerosync_strategy import ZeroSyncConfig, ZeroSyncStrategy

pytest.importorskip("jsonargparse")
from lightning.pytorch.cli import LightningCLI

CLASS = "--trainer.strategy=zerosync_strategy.ZeroSyncStrategy"


class Module(runs.Module):
    def __init__(self) -> None:
        super().__init__()

    def train_dataloader(self) -> Any:
        return runs.Data(4).loader()

    def val_dataloader(self) -> Any:
        return runs.Data(4).loader()


def strategy_of(*arguments: str) -> ZeroSyncStrategy:
    trainer = {"accelerator": "cpu", "devices": WORLD, "logger": False, "enable_checkpointing": False}
    return LightningCLI(Module, args=list(arguments), run=False, trainer_defaults=trainer).trainer.strategy


@pytest.mark.extended
def test_options_on_the_command_line_and_in_yaml(tmp_path: Path) -> None:
    options = ("stage=2", "grad_memory_budget=500MB", "overlap_last=false", "reduce_bucket_size=10")
    strategy = strategy_of(CLASS, *(f"--trainer.strategy.{option}" for option in options))
    assert strategy.stage == 2 and strategy.config["zero_optimization"]["reduce_bucket_size"] == 10
    assert strategy.zerosync_config == ZeroSyncConfig(grad_memory_budget="500MB", overlap_last=False)
    assert strategy_of(CLASS, "--trainer.strategy.param_memory_budget=all").zerosync_config.parameters.device is None

    given = {"zero_optimization": {"stage": 1}, "zerosync": {"coalesce": False}}
    (tmp_path / "ds.json").write_text(json.dumps(given))
    from_file = strategy_of(CLASS, f"--trainer.strategy.config={tmp_path / 'ds.json'}")
    yaml = {"class_path": "zerosync_strategy.ZeroSyncStrategy", "init_args": {"config": given, "report_every": 2}}
    (tmp_path / "run.yaml").write_text(json.dumps({"trainer": {"strategy": yaml}}))
    from_yaml = strategy_of("--config", str(tmp_path / "run.yaml"))
    assert from_file.stage == from_yaml.stage == 1
    assert from_file.zerosync_config == ZeroSyncConfig(coalesce=False)
    assert from_yaml.zerosync_config == ZeroSyncConfig(coalesce=False, report_every=2)


def test_the_signature_names_every_option() -> None:
    stock = set(inspect.signature(DeepSpeedStrategy.__init__).parameters)
    ours = inspect.signature(ZeroSyncStrategy.__init__).parameters
    assert ours.keys() == stock | ZeroSyncConfig.option_names()
    defaults = {name: parameter.default for name, parameter in ours.items() if name != "self"}
    strategy = ZeroSyncStrategy(**defaults)  # all of them given, as LightningCLI does it
    assert (strategy.stage, strategy.zerosync_config) == (3, ZeroSyncConfig())
    assert strategy.config == ZeroSyncStrategy().config


def test_fit_by_command_line() -> None:
    def run() -> Any:
        recorder = runs.Recorder()
        quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "callbacks": [recorder]}
        LightningCLI(
            Module,
            args=["fit", CLASS, "--trainer.strategy.stage=3", "--trainer.strategy.param_memory_budget=all",
                  "--trainer.accelerator=cpu", f"--trainer.devices={WORLD}", "--trainer.max_epochs=1",
                  "--trainer.accumulate_grad_batches=2", "--trainer.use_distributed_sampler=false"],
            trainer_defaults=quiet, save_config_callback=None,
        )  # fmt: skip
        return distance(recorder.parameters, runs.accumulate(oracle(), 4, 2))

    assert run_ranks(run) == [0.0] * WORLD
