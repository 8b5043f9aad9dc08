import csv
from pathlib import Path

import pytest
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from tests.harness.ranks import run_ranks
from tests.lightning.runs import Data, Module, make_trainer
from zerosync_strategy import ZeroSyncMonitor, ZeroSyncStrategy


def test_reports_reach_the_logger_and_the_progress_bar(tmp_path: Path) -> None:
    def run() -> dict[str, float]:
        trainer = make_trainer(
            ZeroSyncStrategy(stage=3, param_memory_budget="all"), [ZeroSyncMonitor(prog_bar=True), TQDMProgressBar()],
            accumulate_grad_batches=4, logger=CSVLogger(tmp_path), log_every_n_steps=1, enable_progress_bar=True,
        )  # fmt: skip
        trainer.fit(Module(), Data(10).loader())
        return {name: float(value) for name, value in trainer.progress_bar_metrics.items()}

    shown = run_ranks(run)[0]
    assert shown["MB"] > 0 and shown["of_floor"] > 0
    rows = list(csv.DictReader(next(tmp_path.rglob("metrics.csv")).open()))
    logged = [row for row in rows if row.get("zerosync/backwards")]
    assert [float(row["zerosync/backwards"]) for row in logged] == [4.0, 4.0, 2.0]
    assert {float(row["zerosync/reductions"]) for row in logged} == {1.0}
    kinds = [name for name in logged[0] if name.startswith("zerosync/") and name.endswith("/bytes")]
    assert all(any(float(row[name] or 0) > 0 for name in kinds) for row in logged)


def test_only_under_our_strategy() -> None:
    def run() -> None:
        with pytest.raises(MisconfigurationException, match="found DDPStrategy"):
            make_trainer(DDPStrategy(), [ZeroSyncMonitor()]).fit(Module(), Data(2).loader())

    run_ranks(run)
