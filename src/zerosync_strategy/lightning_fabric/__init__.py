"""ZeroSync for the Fabric of the package ``lightning_fabric``; all else is as in ``zerosync_strategy.fabric``.

This package has a ``library.py`` of its own. Every other module is a file of ``zerosync_strategy/fabric``, run a second
time under this package's name, so that its classes are built on those of ``lightning_fabric``.
"""

from pathlib import Path

from zerosync_strategy.names import register

__path__.append(str(Path(__file__).parents[1] / "fabric"))

from .strategy import ZeroSyncFabricStrategy  # type: ignore[import-not-found]  # noqa: E402

__all__ = ["ZeroSyncFabricStrategy"]

register()
