"""Every internal of Accelerate that this package relies on, verified when it is imported (rule C1)."""

from __future__ import annotations

import accelerate
from accelerate.accelerator import Accelerator
from accelerate.state import GradientState, PartialState
from accelerate.utils import DeepSpeedPlugin
from accelerate.utils.deepspeed import DeepSpeedEngineWrapper, DeepSpeedOptimizerWrapper, HfDeepSpeedConfig

from zerosync_strategy.core.engine.contract import ContractError, Internal, problem

TESTED_ACCELERATE = "1.11.0 to 1.15.0"

INTERNALS = (
    (Accelerator, Internal("preparation", "Accelerator", "_prepare_deepspeed", ("self",))),
    (Accelerator, Internal("gradient clipping", "Accelerator", "clip_grad_norm_", ("self", "parameters", "max_norm"))),
    (
        Accelerator,
        Internal("gradient clipping", "Accelerator", "clip_grad_value_", ("self", "parameters", "clip_value")),
    ),
    (Accelerator, Internal("end of training", "Accelerator", "end_training", ("self",))),
    (Accelerator, Internal("a second training", "Accelerator", "free_memory", ("self",))),
    (Accelerator, Internal("gradient accumulation", "Accelerator", "sync_gradients")),
    (DeepSpeedEngineWrapper, Internal("backward", "DeepSpeedEngineWrapper", "backward", ("self", "loss"))),
    (DeepSpeedEngineWrapper, Internal("gradient norm", "DeepSpeedEngineWrapper", "get_global_grad_norm", ("self",))),
    (DeepSpeedOptimizerWrapper, Internal("optimizer step", "DeepSpeedOptimizerWrapper", "step", ("self",))),
    (DeepSpeedOptimizerWrapper, Internal("zero_grad", "DeepSpeedOptimizerWrapper", "zero_grad", ("self",))),
    (DeepSpeedPlugin, Internal("configuration", "DeepSpeedPlugin", "__post_init__", ("self",))),
    (DeepSpeedPlugin, Internal("configuration", "DeepSpeedPlugin", "is_auto", ("self",))),
    (DeepSpeedPlugin, Internal("configuration", "DeepSpeedPlugin", "set_deepspeed_weakref", ("self",))),
    (HfDeepSpeedConfig, Internal("configuration", "HfDeepSpeedConfig", "get_value", ("self",))),
    (GradientState, Internal("gradient accumulation", "GradientState", "num_steps")),
    (PartialState, Internal("training on CPU", "PartialState", "_prepare_backend", ("self", "cpu"))),
)


def verify() -> None:
    """Check that the installed Accelerate has every internal that ZeroSync relies on.

    Raises:
        ContractError: one is missing or takes other arguments.
    """
    for owner, internal in INTERNALS:
        if found := problem(owner, internal):
            raise ContractError(
                f"ZeroSync's {internal.feature} relies on an internal of Accelerate that has changed:"
                f" {internal.owner}.{internal.name} {found}. Found Accelerate {accelerate.__version__}; tested with"
                f" {TESTED_ACCELERATE}. Install a tested version, or train without ZeroSync."
            )
