"""transformers, where a program uses it."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import Any


def tell_transformers(config: Any) -> Any:
    """Let ``from_pretrained`` know, as long as the returned object lives, that ZeRO-3 shards what is built."""
    if "transformers" not in sys.modules or importlib.util.find_spec("accelerate") is None:
        return None  # unused, or unable to
    transformers = importlib.import_module("transformers.integrations.deepspeed")
    return None if transformers.is_deepspeed_zero3_enabled() else transformers.HfDeepSpeedConfig(config)
