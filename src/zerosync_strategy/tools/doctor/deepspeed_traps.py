"""Traps in a DeepSpeed configuration."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from zerosync_strategy.core.options.config import BLOCK, ZeroSyncConfig
from zerosync_strategy.tools.doctor import deepspeed_keys
from zerosync_strategy.tools.doctor.findings import Finding, error, note, warning

TOPIC = "configuration"
_PERSISTENT = 100_000  # DeepSpeed's default, in elements
_WHOLE_PARAMETERS = ("lamb", "onebitlamb", "muon", "adafactor", "lars", "shampoo", "lbfgs")
_UNUSED = ("overlap_comm", "contiguous_gradients", "reduce_scatter")


def find(config: Mapping[str, Any], framework: str = "") -> Iterator[Finding]:
    """Yield what is wrong with ``config``.

    Args:
        config: DeepSpeed's configuration.
        framework: which fills in the stage and ``"auto"``, and clips by itself: ``"Accelerate"``, ``"Lightning"``, or
            empty for plain DeepSpeed.
    """
    zero = config.get("zero_optimization") or {}
    yield from deepspeed_keys.find(config)
    yield from _zero(zero, config, framework)
    yield from _clipping(config, framework)
    yield from _precision(config, zero)
    yield from _optimizer(config, zero, framework)
    if not framework:
        for path in _autos(config):
            yield error(TOPIC, f"{path!r} is 'auto', which plain DeepSpeed does not fill in", f"Give {path!r} a value.")
    try:
        ZeroSyncConfig.resolve(config.get(BLOCK))
    except (TypeError, ValueError) as problem:
        yield error(TOPIC, str(problem), "Correct it; docs/options.md has the options.")


def _zero(zero: Mapping[str, Any], config: Mapping[str, Any], framework: str) -> Iterator[Finding]:
    stage = zero.get("stage", "auto" if framework else 0)
    if stage not in (1, 2, 3, "auto"):
        yield error(TOPIC, f"'zero_optimization.stage' is {stage!r}, which ZeroSync refuses", "Set it to 1, 2 or 3.")
    for name, what in (
        ("zenflow", "ZenFlow"), ("mics_shard_size", "MiCS"), ("zero_quantized_gradients", "quantized gradients"),
    ):  # fmt: skip
        value = zero.get(name)
        if value and value != -1:
            yield error(TOPIC, f"'zero_optimization.{name}' is {value!r}; ZeroSync refuses {what}", f"Remove {name!r}.")
    if config.get("pipeline"):
        yield error(
            TOPIC, "'pipeline' is set; ZeroSync refuses pipeline parallelism", "Remove it, and use a plain module."
        )
    if unused := [name for name in _UNUSED if name in zero]:
        yield note(
            TOPIC,
            f"{', '.join(unused)}: changes nothing under ZeroSync, which does not use DeepSpeed's gradient buckets",
            "Leave it out, or leave it.",
        )
    if stage == 3:
        yield from _persistence(zero)


def _persistence(zero: Mapping[str, Any]) -> Iterator[Finding]:
    each = zero.get("stage3_param_persistence_threshold", _PERSISTENT)
    in_all = zero.get("stage3_model_persistence_threshold")
    if each != "auto" and in_all is None and each:
        default = "" if "stage3_param_persistence_threshold" in zero else " (DeepSpeed's default)"
        yield note(
            TOPIC,
            f"parameters of up to {each:,} elements{default} stay whole on every rank and are never released, however"
            " many they are: small models and thin layers are not sharded at all",
            "To bound them: 'stage3_model_persistence_threshold'; to shard all:"
            " 'stage3_param_persistence_threshold': 0.",
        )


def _clipping(config: Mapping[str, Any], framework: str) -> Iterator[Finding]:
    clipping = config.get("gradient_clipping")
    if clipping is None and not framework:
        yield warning(
            TOPIC,
            "'gradient_clipping' is left out: DeepSpeed then clips to a norm of 1.0, which nobody asked for",
            "Set 'gradient_clipping': 0.0 for none, or the norm that is wanted.",
        )
    elif framework and isinstance(clipping, (int, float)) and clipping > 0:
        yield note(
            TOPIC,
            f"'gradient_clipping' is {clipping} in DeepSpeed's configuration and holds at every step, whatever"
            f" {framework} is asked for",
            f"Leave it out to have {framework}'s own clipping alone.",
        )


def _precision(config: Mapping[str, Any], zero: Mapping[str, Any]) -> Iterator[Finding]:
    bf16 = (config.get("bf16") or {}).get("enabled") is True
    fp16 = (config.get("fp16") or {}).get("enabled") is True
    if bf16 and fp16:
        yield error(TOPIC, "'bf16' and 'fp16' are both enabled", "Enable one of them.")
    if fp16:
        yield note(
            TOPIC,
            "'fp16' is enabled, which ZeroSync refuses with several optimizers, and DeepSpeed on CPUs without it",
            "Use bf16 there.",
        )
    accumulation = (config.get("data_types") or {}).get("grad_accum_dtype")
    if bf16 and zero.get("stage") == 1 and accumulation == "fp32":
        yield error(
            TOPIC,
            "stage 1 with bf16 and 'data_types.grad_accum_dtype' = 'fp32' selects DeepSpeed's BF16_Optimizer, which"
            " ZeroSync refuses",
            "Use stage 2, or leave 'grad_accum_dtype' out.",
        )


def _optimizer(config: Mapping[str, Any], zero: Mapping[str, Any], framework: str) -> Iterator[Finding]:
    kind = str((config.get("optimizer") or {}).get("type", ""))
    if kind.lower() in _WHOLE_PARAMETERS:
        yield error(
            TOPIC,
            f"'optimizer.type' is {kind!r}, which computes with whole parameters; ZeRO gives it flat shards",
            "Use AdamW, SGD or another that works element by element.",
        )
    offloaded = (zero.get("offload_optimizer") or {}).get("device", "none") != "none"
    if offloaded and not kind and not framework and config.get("zero_force_ds_cpu_optimizer", True):
        yield warning(
            TOPIC,
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
