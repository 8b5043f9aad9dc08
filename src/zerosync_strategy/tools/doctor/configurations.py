"""A configuration file of DeepSpeed, of ``accelerate launch`` or of LightningCLI, and the traps in it.

It does not look for what DeepSpeed, a framework or ZeroSync refuses by name at the start of a run.
"""

from __future__ import annotations

import difflib
import io
import json
import typing
from collections.abc import Iterator, Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from zerosync_strategy.core.options import BLOCK, ZeroSyncConfig
from zerosync_strategy.tools.doctor.findings import Finding, of_topic

ok, note, warning, error = of_topic("configuration")
_SMALLEST = {"train_micro_batch_size_per_gpu": 1}
_READ_ELSEWHERE = {BLOCK, "sequence_parallel_size"}
_PERSISTENT = 100_000  # DeepSpeed's default, in elements


def check(path: Path) -> list[Finding]:
    """Look for traps in a configuration file of DeepSpeed (JSON), Accelerate or LightningCLI (YAML), by its keys."""
    try:
        config = read(path)
        if "trainer" in config or "strategy" in config:
            kind, found = "Lightning", list(lightning(config))
        elif "distributed_type" in config or "deepspeed_config" in config:
            kind, found = "Accelerate", list(accelerate(config, path.parent))
        else:
            kind, found = "DeepSpeed", list(deepspeed(config))
    except (OSError, ValueError) as problem:
        return [error(f"{path}: {problem}", "Give a JSON or YAML file with a mapping.")]
    return found or [ok(f"{path.name}, read as a configuration of {kind}, has no known trap")]


def read(path: Path) -> dict[str, Any]:
    """Return the mapping in a JSON or YAML file; a ``ValueError`` if it contains something else."""
    import yaml

    text = path.read_text()
    try:
        config = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (ValueError, yaml.YAMLError) as problem:
        raise ValueError(f"cannot be read: {problem}") from None
    if not isinstance(config, Mapping):
        raise ValueError(f"found {type(config).__name__}, expected a mapping")
    return dict(config)


def deepspeed(config: Mapping[str, Any], framework: str = "") -> Iterator[Finding]:
    """Yield what is wrong with DeepSpeed's ``config``. A ``framework``, if any, may complete it, and clip by itself."""
    yield from _unread(config)
    zero = config.get("zero_optimization") or {}
    each = zero.get("stage3_param_persistence_threshold", _PERSISTENT)
    if zero.get("stage") == 3 and each and each != "auto" and zero.get("stage3_model_persistence_threshold") is None:
        yield note(
            f"parameters of up to {each:,} elements stay whole on every rank and are never released, however many they"
            " are: small models and thin layers are not sharded at all",
            "To bound them: 'stage3_model_persistence_threshold'; to shard all:"
            " 'stage3_param_persistence_threshold': 0.",
        )
    clipping = config.get("gradient_clipping")
    if clipping is None and not framework:
        yield warning(
            "'gradient_clipping' is left out: DeepSpeed then clips to a norm of 1.0, which nobody asked for",
            "Set 'gradient_clipping': 0.0 for none, or the norm that is wanted.",
        )
    elif framework and isinstance(clipping, (int, float)) and clipping > 0:
        found = f"'gradient_clipping' is {clipping} and holds at every step, whatever {framework} is asked for"
        yield note(found, f"Leave it out to have {framework}'s own clipping alone.")
    offloaded = (zero.get("offload_optimizer") or {}).get("device", "none") != "none"
    if offloaded and not ("optimizer" in config or framework) and config.get("zero_force_ds_cpu_optimizer", True):
        yield warning(
            "the optimizer is offloaded and 'zero_force_ds_cpu_optimizer' is left out: DeepSpeed refuses any optimizer"
            " of the program but its own DeepSpeedCPUAdam, which is compiled at the first use",
            "Set 'zero_force_ds_cpu_optimizer': false to step with the program's optimizer.",
        )
    if not framework and '"auto"' in json.dumps({**config, BLOCK: None}):
        yield error("a value is 'auto', which plain DeepSpeed does not fill in", "Give it a value.")
    try:
        ZeroSyncConfig.resolve(config.get(BLOCK))
    except (TypeError, ValueError) as problem:
        yield error(str(problem), "Correct it; docs/options.md has the options.")


def accelerate(config: Mapping[str, Any], folder: Path) -> Iterator[Finding]:
    """Yield what is wrong with Accelerate's ``config``. A ``deepspeed_config_file`` is relative to ``folder``."""
    kind = str(config.get("distributed_type", "NO")).upper()
    if kind != "DEEPSPEED":
        found = f"'distributed_type' is {kind!r}: DeepSpeed is not used, and ZeroSyncPlugin does nothing"
        yield error(found, "Set 'distributed_type: DEEPSPEED' with a 'deepspeed_config'.")
    if config.get("use_cpu") and int(config.get("num_processes") or 1) > 1:
        yield note(
            "'use_cpu' is set: Accelerate by itself makes the process group without a backend there, and every rank"
            " takes itself for the only one",
            "Train with ZeroSyncPlugin, or by python -m zerosync_strategy.accelerate.run, which name gloo.",
        )
    inner = str((config.get("deepspeed_config") or {}).get("deepspeed_config_file") or "")
    if inner:  # else Accelerate makes DeepSpeed's configuration from its own fields
        given = json.loads(inner) if inner.lstrip().startswith("{") else read(folder / inner)
        yield from deepspeed(given, "Accelerate")


def lightning(config: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield what is wrong with LightningCLI's ``config``, a Trainer's arguments under ``trainer`` or by themselves."""
    strategy = (config.get("trainer") or config).get("strategy") or ""
    options: Mapping[str, Any] = {}
    name = strategy
    if isinstance(strategy, Mapping):
        name, options = strategy.get("class_path", ""), strategy.get("init_args") or {}
    if "zerosync" not in str(name).lower():
        own = "deepspeed" in str(name).lower()
        yield (error if own else warning)(
            f"'strategy' is {name or 'left out'}: ZeroSync is not used"
            + (", and manual optimization and clipping are silently wrong (docs/faults.md)" if own else ""),
            "Use zerosync_stage_2, zerosync_stage_3, or class_path: zerosync_strategy.ZeroSyncStrategy.",
        )
    given = options.get("config")
    if isinstance(given, str):
        yield note(f"DeepSpeed's configuration is in {given}, which was not read", f"Check {given}, too.")
    elif isinstance(given, Mapping):
        yield from deepspeed(given, "Lightning")


class _Asked(dict[str, Any]):
    """A configuration that records the keys that DeepSpeed reads."""

    names: typing.ClassVar[set[str]] = set()

    def get(self, name: str, default: object = None) -> Any:
        self.names.add(name)
        return super().get(name, default)

    def __getitem__(self, name: str) -> Any:
        self.names.add(name)
        return super().__getitem__(name)

    def __contains__(self, name: object) -> bool:
        self.names.add(str(name))
        return super().__contains__(name)

    def keys(self) -> Any:
        return self  # so that DeepSpeed's tests with `in` are recorded, too


def _unread(config: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield the keys of ``config`` that DeepSpeed does not read."""
    try:
        from deepspeed import DeepSpeedConfig
    except ImportError:
        return  # installation.py reports it
    with redirect_stdout(io.StringIO()):  # DeepSpeed logs to it; here it is for the report
        DeepSpeedConfig(_Asked(_SMALLEST))
    for name in [name for name in config if name not in _Asked.names | _READ_ELSEWHERE]:
        close = difflib.get_close_matches(name, _Asked.names, n=1)
        found = f"{name!r} is no key that DeepSpeed reads, so it changes nothing."
        if close:
            yield error(f"{found} Did you mean {close[0]!r}?", "Correct it.")
        else:
            yield warning(found, "Leave it out.")
