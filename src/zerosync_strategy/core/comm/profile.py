"""Names of ZeroSync's phases in profiles."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


def phase(name: str, detail: str = "") -> AbstractContextManager[object]:
    """Name what runs here ``zerosync::name(detail)`` in profiles; costs next to nothing where nobody profiles."""
    if not torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
        return nullcontext()
    return torch.profiler.record_function(f"zerosync::{name}({detail})" if detail else f"zerosync::{name}")
