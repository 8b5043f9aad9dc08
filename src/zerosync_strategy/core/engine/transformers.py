"""Access to transformers, if a program uses it."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from zerosync_strategy.core.engine.contract import require, rows

_MODULE = "transformers.integrations.deepspeed"
_CONFIGURATION = "_hf_deepspeed_config_weak_ref"
INTERNALS = (
    *rows("evaluation", _MODULE, f"{_CONFIGURATION} set_hf_deepspeed_config unset_hf_deepspeed_config()"),
    *rows("units", "transformers.PreTrainedModel", "_no_split_modules"),
)


def not_split(module: torch.nn.Module) -> set[str]:
    """Return the names of classes that models in ``module`` say not to split, in transformers and elsewhere."""
    return {name for each in module.modules() for name in getattr(each, "_no_split_modules", None) or ()}


def tell_transformers(config: object) -> object:
    """Tell ``from_pretrained``, while the returned object lives, that ZeRO-3 shards the models that it builds."""
    if "transformers" not in sys.modules or importlib.util.find_spec("accelerate") is None:
        return None  # transformers is unused, or does not support it
    transformers = importlib.import_module(_MODULE)
    return None if transformers.is_deepspeed_zero3_enabled() else transformers.HfDeepSpeedConfig(config)


@contextmanager
def nothing_is_sharded() -> Iterator[None]:
    """While active, transformers assumes that no model is sharded, and its ``generate()`` ends on each rank separately.

    Else the ranks report after every token whether they have ended, and go on until all have (``synced_gpus``).
    """
    deepspeed: Any = sys.modules.get(_MODULE)
    if deepspeed is not None:
        require(INTERNALS)
    known = getattr(deepspeed, _CONFIGURATION, None)
    config = None if known is None else known()
    if config is None:
        yield
        return
    deepspeed.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        deepspeed.set_hf_deepspeed_config(config)
