"""Traps in a DeepSpeed configuration, and the keys and values that the installed DeepSpeed would refuse."""

from __future__ import annotations

import difflib
import io
import typing
from collections.abc import Iterable, Iterator, Mapping
from contextlib import redirect_stdout
from typing import Any

from zerosync_strategy.core.options.config import BLOCK, ZeroSyncConfig
from zerosync_strategy.tools.doctor.findings import Finding, Topic

TOPIC = Topic("configuration")
_SMALLEST = {"train_micro_batch_size_per_gpu": 1}
_READ_ELSEWHERE = {BLOCK, "sequence_parallel_size"}
_PERSISTENT = 100_000  # DeepSpeed's default, in elements
_FOR_FLAT_SHARDS = ("lamb", "onebitlamb", "muon")  # made by DeepSpeed, and compute with whole parameters
_UNUSED = ("overlap_comm", "contiguous_gradients", "reduce_scatter")
_REFUSED = {"zenflow": "ZenFlow", "mics_shard_size": "MiCS", "zero_quantized_gradients": "quantized gradients"}


def find(config: Mapping[str, Any], framework: str = "") -> Iterator[Finding]:
    """Yield what is wrong with ``config``.

    Args:
        config: DeepSpeed's configuration.
        framework: which fills in the stage and ``"auto"``, and clips by itself: ``"Accelerate"``, ``"Lightning"``, or
            empty for plain DeepSpeed.
    """
    zero = config.get("zero_optimization") or {}
    yield from refused(config)
    yield from _zero(zero, config, framework)
    yield from _clipping(config, framework)
    yield from _precision(config, zero)
    yield from _optimizer(config, zero, framework)
    if not framework:
        for path in _autos(config):
            yield TOPIC.error(f"{path!r} is 'auto', which plain DeepSpeed does not fill in", f"Give {path!r} a value.")
    try:
        ZeroSyncConfig.resolve(config.get(BLOCK))
    except (TypeError, ValueError) as problem:
        yield TOPIC.error(str(problem), "Correct it; docs/options.md has the options.")


def _zero(zero: Mapping[str, Any], config: Mapping[str, Any], framework: str) -> Iterator[Finding]:
    stage = zero.get("stage", "auto" if framework else 0)
    if stage not in (1, 2, 3, "auto"):
        yield TOPIC.error(f"'zero_optimization.stage' is {stage!r}, which ZeroSync refuses", "Set it to 1, 2 or 3.")
    for name, what in _REFUSED.items():
        if (value := zero.get(name)) and value != -1:
            found = f"'zero_optimization.{name}' is {value!r}; ZeroSync refuses {what}"
            yield TOPIC.error(found, f"Remove {name!r}.")
    if config.get("pipeline"):
        found = "'pipeline' is set; ZeroSync refuses pipeline parallelism"
        yield TOPIC.error(found, "Remove it, and use a plain module.")
    if unused := [name for name in _UNUSED if name in zero]:
        found = f"{', '.join(unused)}: changes nothing under ZeroSync, which does not use DeepSpeed's gradient buckets"
        yield TOPIC.note(found, "Leave it out, or leave it.")
    each = zero.get("stage3_param_persistence_threshold", _PERSISTENT)
    if stage == 3 and each and each != "auto" and zero.get("stage3_model_persistence_threshold") is None:
        default = "" if "stage3_param_persistence_threshold" in zero else " (DeepSpeed's default)"
        yield TOPIC.note(
            f"parameters of up to {each:,} elements{default} stay whole on every rank and are never released, however"
            " many they are: small models and thin layers are not sharded at all",
            "To bound them: 'stage3_model_persistence_threshold'; to shard all:"
            " 'stage3_param_persistence_threshold': 0.",
        )


def _clipping(config: Mapping[str, Any], framework: str) -> Iterator[Finding]:
    clipping = config.get("gradient_clipping")
    if clipping is None and not framework:
        yield TOPIC.warning(
            "'gradient_clipping' is left out: DeepSpeed then clips to a norm of 1.0, which nobody asked for",
            "Set 'gradient_clipping': 0.0 for none, or the norm that is wanted.",
        )
    elif framework and isinstance(clipping, (int, float)) and clipping > 0:
        yield TOPIC.note(
            f"'gradient_clipping' is {clipping} in DeepSpeed's configuration and holds at every step, whatever"
            f" {framework} is asked for",
            f"Leave it out to have {framework}'s own clipping alone.",
        )


def _precision(config: Mapping[str, Any], zero: Mapping[str, Any]) -> Iterator[Finding]:
    bf16, fp16 = ((config.get(name) or {}).get("enabled") is True for name in ("bf16", "fp16"))
    if bf16 and fp16:
        yield TOPIC.error("'bf16' and 'fp16' are both enabled", "Enable one of them.")
    if fp16:
        yield TOPIC.note(
            "'fp16' is enabled, which ZeroSync refuses with several optimizers, and DeepSpeed on CPUs without it",
            "Use bf16 there.",
        )
    accumulation = (config.get("data_types") or {}).get("grad_accum_dtype")
    if bf16 and zero.get("stage") == 1 and accumulation == "fp32":
        yield TOPIC.error(
            "stage 1 with bf16 and 'data_types.grad_accum_dtype' = 'fp32' selects DeepSpeed's BF16_Optimizer, which"
            " ZeroSync refuses",
            "Use stage 2, or leave 'grad_accum_dtype' out.",
        )


def _optimizer(config: Mapping[str, Any], zero: Mapping[str, Any], framework: str) -> Iterator[Finding]:
    kind = str((config.get("optimizer") or {}).get("type", ""))
    if kind.lower() in _FOR_FLAT_SHARDS:
        yield TOPIC.error(
            f"'optimizer.type' is {kind!r}, which computes with whole parameters; DeepSpeed's own steps flat shards",
            "Leave it out, and give deepspeed.initialize() an optimizer of the program's, such as torch.optim.Muon.",
        )
    offloaded = (zero.get("offload_optimizer") or {}).get("device", "none") != "none"
    if offloaded and not kind and not framework and config.get("zero_force_ds_cpu_optimizer", True):
        yield TOPIC.warning(
            "the optimizer is offloaded and 'zero_force_ds_cpu_optimizer' is left out: DeepSpeed refuses any optimizer"
            " of the program but its own DeepSpeedCPUAdam, which is compiled at the first use",
            "Set 'zero_force_ds_cpu_optimizer': false to step with the program's optimizer.",
        )


def _autos(block: Mapping[str, Any], *path: str) -> Iterator[str]:
    for name, value in block.items():
        if isinstance(value, Mapping):
            yield from _autos(value, *path, name)
        elif value == "auto":
            yield ".".join((*path, name))


# ---- by the configuration classes of the installed DeepSpeed ---------------------------------------------------------


class _Asked(dict[str, Any]):
    """A configuration that notes which keys DeepSpeed asks it for."""

    names: typing.ClassVar[set[str]] = set()

    def get(self, name: str, default: Any = None) -> Any:
        self.names.add(name)
        return super().get(name, default)

    def __getitem__(self, name: str) -> Any:
        self.names.add(name)
        return super().__getitem__(name)

    def __contains__(self, name: object) -> bool:
        self.names.add(str(name))
        return super().__contains__(name)

    def keys(self) -> Any:
        return self  # of which DeepSpeed asks what is in it


def refused(config: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield what DeepSpeed would refuse in ``config``, or leave unread.

    Values of ``"auto"`` are left out. Nothing is said where DeepSpeed is not installed.
    """
    try:
        with redirect_stdout(io.StringIO()):  # where DeepSpeed logs, which is for a report here
            from deepspeed import DeepSpeedConfig, __version__

            default = DeepSpeedConfig(_Asked(_SMALLEST))
    except ImportError:
        return
    for name in [name for name in config if name not in _Asked.names | _READ_ELSEWHERE]:
        close = _closest(name, _Asked.names)
        found = f"{name!r} is no key that DeepSpeed {__version__} reads, so it changes nothing.{close}"
        yield (TOPIC.error if close else TOPIC.warning)(found, "Correct it, or leave it out.")
    for name, block in config.items():
        if isinstance(block, Mapping) and name in _Asked.names:
            for path, problem in _refused(DeepSpeedConfig, default, name, block):
                yield TOPIC.error(f"{path!r}: {problem}", f"Correct it; DeepSpeed {__version__} refuses it.")


def _refused(make: Any, default: Any, name: str, block: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield what DeepSpeed's class for the block ``name`` refuses, with its path."""
    from pydantic import BaseModel, ValidationError

    try:
        with redirect_stdout(io.StringIO()):
            make({**_SMALLEST, name: _without_autos(block)})
    except ValidationError as problem:
        models = {type(each).__name__: type(each) for each in vars(default).values() if isinstance(each, BaseModel)}
        for each in problem.errors():
            *parents, key = map(str, each["loc"] or ("",))
            path = ".".join(filter(None, (name, *parents, key)))
            if each["type"] == "extra_forbidden":
                yield path, f"unknown key.{_closest(key, _keys(models.get(problem.title), parents))}"
            else:
                yield path, f"{each['msg']}, got {each['input']!r}."
    except Exception:  # of this block alone, as it does not stand: one that needs others, or the number of ranks
        return


def _keys(model: Any, parents: Iterable[str]) -> list[str]:
    """Return the keys that ``model`` takes in the block at the end of ``parents``."""
    for parent in parents:
        fields = getattr(model, "model_fields", {})
        field = next((each for name, each in fields.items() if parent in (name, each.alias)), None)
        kinds = () if field is None else (field.annotation, *typing.get_args(field.annotation))
        model = next((kind for kind in kinds if hasattr(kind, "model_fields")), None)
    return [each.alias or name for name, each in getattr(model, "model_fields", {}).items()]


def _closest(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


def _without_autos(block: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: _without_autos(value) if isinstance(value, Mapping) else value
        for name, value in block.items()
        if value != "auto"
    }
