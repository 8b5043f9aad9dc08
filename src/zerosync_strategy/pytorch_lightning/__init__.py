"""ZeroSync for the Trainer of the package ``pytorch_lightning``; all else is as in ``zerosync_strategy.lightning``.

This package has a ``library.py`` of its own. Every other module is a file of ``zerosync_strategy/lightning``, run a
second time under this package's name, so that its classes are built on those of ``pytorch_lightning``.
"""

from pathlib import Path

from zerosync_strategy.names import register

__path__.append(str(Path(__file__).parents[1] / "lightning"))

from .deepspeed import DeepSpeedAnyDeviceStrategy  # type: ignore[import-not-found]  # noqa: E402
from .monitor import ZeroSyncMonitor  # type: ignore[import-not-found]  # noqa: E402
from .strategy import ZeroSyncStrategy  # type: ignore[import-not-found]  # noqa: E402

__all__ = ["DeepSpeedAnyDeviceStrategy", "ZeroSyncMonitor", "ZeroSyncStrategy"]

register()
