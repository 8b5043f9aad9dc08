"""What modules may return under ZeRO-3: DeepSpeed 0.19.8 looks for tensors in the attributes of anything unknown.

A number has no attributes, and ends in its hook: ``vars() argument must have __dict__ attribute``.
"""

from __future__ import annotations

import functools
from typing import Any


@functools.cache
def allow_any_output() -> None:
    """Let the modules of this process return what has no attributes, which then has no tensors either."""
    from deepspeed.runtime.zero import parameter_offload

    parameter_offload.vars = _attributes  # in place of the builtin, in that file alone


def _attributes(output: Any) -> Any:
    return getattr(output, "__dict__", {})
