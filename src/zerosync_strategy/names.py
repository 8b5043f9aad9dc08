"""Where ZeroSync is found in Lightning's packages: modules, classes and names as ``zerosync_stage_3``.

The library is published as two packages with the same code, ``lightning`` and ``pytorch_lightning`` (with
``lightning_fabric``). Each has classes of its own. Neither has an entry point for strategies.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any


@dataclass(frozen=True)
class Home:
    """ZeroSync's module and strategy class for one package."""

    module: str
    strategy: str
    registry: str  # name of the package's registry, in its ``strategies``


HOMES = {
    "lightning.pytorch": Home("zerosync_strategy.lightning", "ZeroSyncStrategy", "StrategyRegistry"),
    "pytorch_lightning": Home("zerosync_strategy.pytorch_lightning", "ZeroSyncStrategy", "StrategyRegistry"),
    "lightning.fabric": Home("zerosync_strategy.fabric", "ZeroSyncFabricStrategy", "STRATEGY_REGISTRY"),
    "lightning_fabric": Home("zerosync_strategy.lightning_fabric", "ZeroSyncFabricStrategy", "STRATEGY_REGISTRY"),
}


_NAMES: dict[str, dict[str, Any]] = {
    "zerosync": {},
    **{f"zerosync_stage_{stage}": dict(stage=stage) for stage in (1, 2, 3)},
    "zerosync_stage_2_offload": dict(stage=2, offload_optimizer=True),
    "zerosync_stage_3_offload": dict(stage=3, offload_optimizer=True, offload_parameters=True),
}
"""Strategy names with their options. They offload what Lightning's names for DeepSpeed offload."""


def register() -> None:
    """Register the strategy names with every loaded package of :data:`HOMES`."""
    for package in HOMES:
        if package in sys.modules:
            register_with(package)


def register_with(package: str) -> None:
    """Register the strategy names with one package, whose ``strategies`` are loaded."""
    home = HOMES[package]
    registry = getattr(import_module(f"{package}.strategies"), home.registry)
    for name, options in _NAMES.items():
        description = f"DeepSpeed ZeRO-{options.get('stage', 3)} synchronised by ZeroSync"
        registry.register(name, partial(_make, home), description=description, override=True, **options)


def _make(home: Home, **options: object) -> object:
    return getattr(import_module(home.module), home.strategy)(**options)


def home_in_use(package: str, other: str) -> str:
    """Return ZeroSync's module for ``package``; for ``other``, if only that one is loaded or installed."""
    is_missing = package not in sys.modules and find_spec(package.split(".")[0]) is None
    is_other = other in sys.modules and package not in sys.modules
    return HOMES[other if is_missing or is_other else package].module


def represent(strategy: Any, package: str) -> str:
    """Return the ``repr`` of a strategy for ``package``. Other packages print it when they refuse the strategy."""
    elsewhere = "; ".join(
        f"{other}: from {home.module} import {home.strategy}" for other, home in HOMES.items() if other != package
    )
    name = type(strategy).__name__
    return f"{name}(stage={strategy.stage}) for {package}. For another package, use its own ({elsewhere})"
