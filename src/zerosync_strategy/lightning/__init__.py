"""ZeroSync for PyTorch Lightning. Importing this module registers the strategy names ``zerosync`` and
``zerosync_stage_1``, ``zerosync_stage_2``, ``zerosync_stage_3`` for ``Trainer(strategy=...)``.
"""

from zerosync_strategy.names import register

from .deepspeed import DeepSpeedAnyDeviceStrategy
from .monitor import ZeroSyncMonitor
from .strategy import ZeroSyncStrategy

__all__ = ["DeepSpeedAnyDeviceStrategy", "ZeroSyncMonitor", "ZeroSyncStrategy"]

register()
