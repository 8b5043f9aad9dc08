"""transformers, where a program uses it."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def tell_transformers(config: Any) -> Any:
    """Let ``from_pretrained`` know, as long as the returned object lives, that ZeRO-3 shards what is built."""
    if "transformers" not in sys.modules or importlib.util.find_spec("accelerate") is None:
        return None  # unused, or unable to
    transformers = importlib.import_module("transformers.integrations.deepspeed")
    return None if transformers.is_deepspeed_zero3_enabled() else transformers.HfDeepSpeedConfig(config)


@contextmanager
def nothing_is_sharded() -> Iterator[None]:
    """While active, transformers takes no model to be sharded, and its ``generate()`` ends on each rank by itself.

    Else it exchanges after every token whether all ranks have ended, and goes on until they have (``synced_gpus``).
    """
    deepspeed: Any = sys.modules.get("transformers.integrations.deepspeed")
    config = getattr(deepspeed, "_hf_deepspeed_config_weak_ref", lambda: None)
    config = None if config is None else config()
    if config is None:
        yield
        return
    deepspeed.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        deepspeed.set_hf_deepspeed_config(config)
