"""ZeroSync for PyTorch Lightning. Importing this module registers the strategy names ``zerosync`` and
``zerosync_stage_1``, ``zerosync_stage_2``, ``zerosync_stage_3`` for ``Trainer(strategy=...)``.
"""

from zerosync_strategy.lightning.deepspeed import DeepSpeedAnyDeviceStrategy
from zerosync_strategy.lightning.monitor import ZeroSyncMonitor
from zerosync_strategy.lightning.registry import register
from zerosync_strategy.lightning.strategy import ZeroSyncStrategy

__all__ = ["DeepSpeedAnyDeviceStrategy", "ZeroSyncMonitor", "ZeroSyncStrategy"]

register(ZeroSyncStrategy)
