"""Checks that ZeroSync supports a DeepSpeed engine and its release."""

from __future__ import annotations

from zerosync_strategy.core.engine import contract, deepspeed_internals, torch_internals, zero
from zerosync_strategy.core.engine.contract import ContractError, Internal
from zerosync_strategy.core.engine.types import DeepSpeedEngine


def require_supported(engine: DeepSpeedEngine) -> None:
    """Check that ZeroSync supports ``engine``, and that it has every internal that ZeroSync uses on it.

    ``TypeError``: it is not a ``DeepSpeedEngine``. ``ValueError``: its configuration is not supported.
    """
    check_release()
    contract.require(torch_internals.TRAINING)
    _check_configuration(engine)
    require_supported_optimizer(engine)
    contract.require(internals_of(engine), engine)
    if zero.user_config(engine).get("compile", {}).get("deepcompile"):
        contract.need(deepspeed_internals.COMPILE_BACKEND, "set 'compile.deepcompile' to false")
    if getattr(engine.optimizer, "swap_optimizer", False):
        contract.need(deepspeed_internals.STEPPED_OFFLOADED, "offload the optimizer to the CPU")
    if engine.is_deepcompile_active():
        raise ValueError(
            "attach() found an engine that DeepCompile has compiled already, and its graphs reduce gradients by"
            " themselves. Call engine.compile() after attach()."
        )


def internals_of(engine: DeepSpeedEngine) -> tuple[Internal, ...]:
    """Return the internals that ZeroSync uses on an engine of this stage, without optional features."""
    is_3 = engine.zero_optimization_stage() == 3
    of_stage = deepspeed_internals.STAGE_3 if is_3 else deepspeed_internals.STAGE_1_2
    return (*deepspeed_internals.ALL_STAGES, *deepspeed_internals.REFUSED, *of_stage)


def trains(engine: DeepSpeedEngine) -> bool:
    from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload

    return engine.optimizer is not None and not isinstance(engine.optimizer, DeepSpeedZeRoOffload)


def without_zero(engine: DeepSpeedEngine) -> str:
    """Return how ``engine`` is parallel if not by ZeRO; empty if by ZeRO."""
    from deepspeed.runtime.engine import PipelineModule

    if isinstance(engine.module, PipelineModule):
        return "with pipeline parallelism"
    return "" if engine.zero_optimization_stage() in (1, 2, 3) else "without ZeRO (stage 0)"


def check_release() -> None:
    """Raise a ``ContractError`` if the installed DeepSpeed is too old."""
    oldest, found = contract.DEEPSPEED.oldest, contract.release_of("deepspeed")
    if contract.is_before(found, oldest):
        raise ContractError(
            f"ZeroSync needs DeepSpeed {oldest} or newer, found {found}. DeepSpeed 0.17 and older reduce gradients"
            " inside of engine.backward() and do not notice a loss.backward() of the program; what later releases have"
            " for it changed until 0.18.4. Install a newer DeepSpeed, or train without ZeroSync."
        )


def require_supported_optimizer(engine: DeepSpeedEngine) -> None:
    """Raise ``ValueError`` if DeepSpeed makes, by its configuration, an optimizer that ZeroSync does not support."""
    of_optimizer = zero.user_config(engine).get("optimizer") or {}
    if str(of_optimizer.get("type")).lower() == "muon":
        raise ValueError(
            "ZeroSync does not support DeepSpeed's own Muon, found in 'optimizer.type'. Leave that out, and give"
            " deepspeed.initialize() an optimizer: torch.optim.Muon, or a class with groups for what is no matrix."
        )


def _check_configuration(engine: DeepSpeedEngine) -> None:
    from deepspeed import DeepSpeedEngine
    from deepspeed.runtime.base_optimizer import ZeROOptimizer
    from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
    from deepspeed.runtime.engine import PipelineModule

    if not isinstance(engine, DeepSpeedEngine):
        raise TypeError(f"attach() takes the engine that deepspeed.initialize() returned, got {type(engine).__name__}.")
    contract.require(deepspeed_internals.CONFIGURATION, engine)
    stage, optimizer = int(engine.zero_optimization_stage()), engine.optimizer
    given, folding = zero.user_config(engine), getattr(engine, "_autoep_folding_spec", None)
    of_zero = given.get("zero_optimization", {})
    for is_so, problem in (
        (stage not in (1, 2, 3), f"needs ZeRO stage 1, 2 or 3, found 'zero_optimization.stage' = {stage}."),
        (isinstance(engine.module, PipelineModule),
         "does not support DeepSpeed pipeline parallelism; use a plain module."),
        (isinstance(optimizer, BF16_Optimizer),
         "does not support DeepSpeed's BF16_Optimizer, which ZeRO stage 1 with bf16 parameters and"
         " 'data_types.grad_accum_dtype' = 'fp32' selects. Use stage 2, or leave grad_accum_dtype out."),
        (of_zero.get("zenflow"),
         "does not support ZenFlow; remove 'zero_optimization.zenflow' from the configuration."),
        (of_zero.get("mics_shard_size", -1) > 0,
         "does not support MiCS; remove 'zero_optimization.mics_shard_size'."),
        (of_zero.get("zero_quantized_gradients"),
         "does not support quantized gradients; set 'zero_quantized_gradients' to false."),
        (getattr(folding, "tp_size", 1) > 1,
         "does not support AutoEP folded with tensor parallelism. Use one of the two."),
        (not isinstance(optimizer, ZeROOptimizer),
         f"needs an engine with an optimizer, found {type(optimizer).__name__}. Pass one to deepspeed.initialize(), or"
         " name one in the DeepSpeed configuration."),
    ):  # fmt: skip
        if is_so:
            raise ValueError(f"ZeroSync {problem}")
