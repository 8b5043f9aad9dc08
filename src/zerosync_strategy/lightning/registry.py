"""The names under which ``Trainer(strategy=...)`` finds ZeroSync. Lightning has no entry point for strategies."""

from __future__ import annotations

import sys
from typing import Any, NoReturn

from lightning.pytorch.strategies import Strategy, StrategyRegistry

WRONG_TRAINER = (
    "ZeroSyncStrategy belongs to `lightning.pytorch`; the Trainer of the separate package `pytorch_lightning` cannot"
    " run it. Use `from lightning.pytorch import Trainer, LightningModule`."
)


def register(strategy: type[Strategy]) -> None:
    """Register ``strategy`` as ``zerosync`` and ``zerosync_stage_1|2|3``."""
    _register_in(StrategyRegistry, strategy)
    # Where the other package is in use too, its Trainer should say what is wrong and not that the name is unknown.
    if "pytorch_lightning" in sys.modules:
        from pytorch_lightning.strategies import StrategyRegistry as OtherRegistry

        _register_in(OtherRegistry, _refuse_other_trainer)


def _register_in(registry: Any, factory: Any) -> None:
    registry.register("zerosync", factory, description="DeepSpeed ZeRO-3 synchronised by ZeroSync", override=True)
    for stage in (1, 2, 3):
        description = f"DeepSpeed ZeRO-{stage} synchronised by ZeroSync"
        registry.register(f"zerosync_stage_{stage}", factory, description=description, override=True, stage=stage)


def _refuse_other_trainer(**_: Any) -> NoReturn:
    raise TypeError(WRONG_TRAINER)
