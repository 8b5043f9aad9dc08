"""ZeroSync for Lightning Fabric. Importing this module registers the strategy names ``zerosync`` and
``zerosync_stage_1``, ``zerosync_stage_2``, ``zerosync_stage_3`` for ``Fabric(strategy=...)``.
"""

from zerosync_strategy.names import register

from .strategy import ZeroSyncFabricStrategy

__all__ = ["ZeroSyncFabricStrategy"]

register()
