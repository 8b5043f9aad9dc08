"""Logs the report of each optimizer step, and on request shows it in the progress bar."""

from __future__ import annotations

from typing_extensions import override

from zerosync_strategy.frontend import StepReport

from .library import Callback, LightningModule, MisconfigurationException, Trainer
from .strategy import ZeroSyncStrategy


class ZeroSyncMonitor(Callback):
    """Logs the :class:`~zerosync_strategy.StepReport` of each optimizer step, under ``zerosync/``.

    With several optimizers, the first is under ``zerosync/optimizer_0/``, and so on.

    Args:
        prog_bar: also show the bytes sent (in MB) and their ratio to the minimum in the progress bar.

    Raises:
        MisconfigurationException: at the start of ``fit``, under any strategy but ``ZeroSyncStrategy``.
    """

    def __init__(self, prog_bar: bool = False) -> None:
        self.prog_bar = prog_bar
        self._logged: dict[int, StepReport] = {}  # by optimizer, the last report

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if not isinstance(trainer.strategy, ZeroSyncStrategy):
            raise MisconfigurationException(
                f"ZeroSyncMonitor reports on ZeroSyncStrategy, found {type(trainer.strategy).__name__}. Remove the"
                " callback, or use Trainer(strategy=ZeroSyncStrategy(...))."
            )

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: object, **__: object) -> None:
        assert isinstance(trainer.strategy, ZeroSyncStrategy)
        several = len(trainer.strategy.zerosyncs) > 1
        for index, zerosync in enumerate(trainer.strategy.zerosyncs):
            report = zerosync.report
            if report is None or report is self._logged.get(index):
                continue
            self._logged[index] = report
            which = f"optimizer_{index}/" if several else ""
            logged = {f"zerosync/{which}{name}": value for name, value in report.numbers().items()}
            pl_module.log_dict(logged, batch_size=1)
            if self.prog_bar:
                shown = {f"{which}MB": report.bytes_sent / 1e6, f"{which}of_floor": report.ratio}
                pl_module.log_dict(shown, prog_bar=True, logger=False, batch_size=1)
