"""ZeroSync: gradient and parameter synchronisation for DeepSpeed ZeRO-1/2/3, right first, then minimal.

Importing this package loads neither Lightning, Accelerate nor DeepSpeed; each public name loads what it needs when
first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from zerosync_strategy.names import home_in_use
from zerosync_strategy.version import __version__

if TYPE_CHECKING:
    from zerosync_strategy.accelerate.plugin import ZeroSyncPlugin
    from zerosync_strategy.core.attaching import attach
    from zerosync_strategy.core.engine.compat import prepare_cpu
    from zerosync_strategy.core.engine.contract import ContractError
    from zerosync_strategy.core.failures.errors import CheckpointError, RankError
    from zerosync_strategy.core.handle import ZeroSync
    from zerosync_strategy.core.options import ZeroSyncConfig
    from zerosync_strategy.core.params.shard_groups import shard_over
    from zerosync_strategy.core.report import StepReport
    from zerosync_strategy.fabric.strategy import ZeroSyncFabricStrategy
    from zerosync_strategy.lightning.monitor import ZeroSyncMonitor
    from zerosync_strategy.lightning.strategy import ZeroSyncStrategy

__all__ = [
    "CheckpointError",
    "ContractError",
    "RankError",
    "StepReport",
    "ZeroSync",
    "ZeroSyncConfig",
    "ZeroSyncFabricStrategy",
    "ZeroSyncMonitor",
    "ZeroSyncPlugin",
    "ZeroSyncStrategy",
    "__version__",
    "attach",
    "prepare_cpu",
    "shard_over",
]

_HOME = {
    "CheckpointError": "zerosync_strategy.core.failures.errors",
    "ContractError": "zerosync_strategy.core.engine.contract",
    "RankError": "zerosync_strategy.core.failures.errors",
    "StepReport": "zerosync_strategy.core.report",
    "ZeroSync": "zerosync_strategy.core.handle",
    "ZeroSyncConfig": "zerosync_strategy.core.options",
    "ZeroSyncFabricStrategy": "zerosync_strategy.fabric",
    "ZeroSyncMonitor": "zerosync_strategy.lightning",
    "ZeroSyncPlugin": "zerosync_strategy.accelerate",
    "ZeroSyncStrategy": "zerosync_strategy.lightning",
    "attach": "zerosync_strategy.core.attaching",
    "prepare_cpu": "zerosync_strategy.core.engine.compat",
    "shard_over": "zerosync_strategy.core.params.shard_groups",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_module_of(name)), name)
    globals()[name] = value  # later look-ups find it without __getattr__
    return value


def _module_of(name: str) -> str:
    """Return the module that has ``name``. For classes built on Lightning, it serves the Lightning package in use."""
    packages = {"zerosync_strategy.lightning": ("lightning.pytorch", "pytorch_lightning")}
    packages["zerosync_strategy.fabric"] = ("lightning.fabric", "lightning_fabric")
    home = _HOME[name]
    return home_in_use(*packages[home]) if home in packages else home


def __dir__() -> list[str]:
    return sorted(__all__)
