"""What a program that has made backwards and no optimizer step is told as it ends: nothing was trained."""

from __future__ import annotations

import atexit
import functools
import sys

import torch.distributed as dist

from zerosync_strategy.core.announcement import say
from zerosync_strategy.core.attached.engine import AttachedEngine


@functools.cache
def watch_end() -> None:
    """Look at the end of this process. Once is enough."""
    atexit.register(_check)


def _check() -> None:
    if getattr(sys, "last_type", None) is not None:  # an exception ends it, and has said why
        return
    if not dist.is_initialized() or dist.get_rank() != 0:
        return
    for attached in AttachedEngine.all:
        made, name = attached.parts.window.unused, type(attached.parts.engine.module).__name__
        if attached.meter.steps == 0 and made > 1:  # one may have been all that was wanted
            say(
                f"{made} backwards were made of {name}, and no optimizer step: nothing was trained. Call engine.step(),"
                " or optimizer.step() under a framework; under Accelerate, a program that relies on the step in"
                " accelerator.backward() needs the option step_on='backward'."
            )
