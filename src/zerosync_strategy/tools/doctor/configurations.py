"""A configuration file, of whichever library, and what is wrong with it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zerosync_strategy.tools.doctor import accelerate_traps, deepspeed_traps, lightning_traps
from zerosync_strategy.tools.doctor.findings import Finding, error, or_ok

TOPIC = "configuration"


def check(path: Path) -> list[Finding]:
    """Look for traps in a configuration of DeepSpeed (JSON), Accelerate (YAML) or LightningCLI (YAML).

    Args:
        path: of the file. What it is follows from its keys.
    """
    try:
        config = read(path)
    except (OSError, ValueError) as problem:
        return [error(TOPIC, f"{path}: {problem}", "Give a JSON or YAML file with a mapping.")]
    if "trainer" in config or "strategy" in config:
        kind, found = "Lightning", list(lightning_traps.find(config))
    elif "distributed_type" in config or "deepspeed_config" in config:
        kind, found = "Accelerate", list(accelerate_traps.find(config, path.parent))
    else:
        kind, found = "DeepSpeed", list(deepspeed_traps.find(config))
    return or_ok(found, TOPIC, f"{path.name}, read as a configuration of {kind}, has no known trap")


def read(path: Path) -> dict[str, Any]:
    """Return the mapping in a JSON or YAML file.

    Raises:
        OSError: it cannot be read.
        ValueError: it has something else, or YAML is not installed.
    """
    text = path.read_text()
    try:
        config = json.loads(text)
    except ValueError as problem:
        if path.suffix == ".json":
            raise ValueError(f"no JSON: {problem}") from None
        config = _yaml(text)
    if not isinstance(config, Mapping):
        raise ValueError(f"found {type(config).__name__}, expected a mapping")
    return dict(config)


def _yaml(text: str) -> Any:
    try:
        import yaml
    except ImportError:
        raise ValueError("YAML needs PyYAML: pip install 'zerosync-strategy[cli]'") from None
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as problem:
        raise ValueError(f"neither JSON nor YAML: {problem}") from None
