"""DeepSpeed on CPU with gloo, without a compiler."""

from __future__ import annotations

import atexit
import functools
import time
from typing import Any

import torch.distributed as dist

from zerosync_strategy.core.engine import patches
from zerosync_strategy.core.engine.compat import allow_any_model


def prepare_cpu() -> None:
    """Make DeepSpeed run on CPU in this process. Call it before ``deepspeed.init_distributed`` or ``initialize``.

    DeepSpeed 0.19.8 compiles a shared-memory collective on CPU at every start. This takes 35 to 90 s, and a killed run
    leaves a lock on which later runs hang. Plain gloo does not need it, so the operator is marked as unavailable.

    This, and the support of parameters without dimensions, is undone when the last engine is detached or destroyed.
    Call it again before the next one is made.

    Raises:
        RuntimeError: DeepSpeed's process group exists already, on another accelerator.
    """
    import deepspeed.ops
    from deepspeed import comm
    from deepspeed.accelerator import get_accelerator, set_accelerator

    _start_without_compiler(deepspeed.ops.__compatible_ops__)
    _pause_at_exit()
    allow_any_model()
    if get_accelerator().device_name() != "cpu":
        if comm.is_initialized():
            raise RuntimeError(
                f"DeepSpeed already runs on {get_accelerator().device_name()!r} in this process and cannot move to the"
                " CPU. Call prepare_cpu() before the process group is made, or set DS_ACCELERATOR=cpu."
            )
        from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

        set_accelerator(CPU_Accelerator())
        patches.install(patches.ACCELERATOR)


def take_process_group() -> None:
    """Make DeepSpeed use a process group that torch has made, before it builds an engine.

    ``zero.Init`` reads the configuration first, and would assume a world of one process.
    """
    from deepspeed import comm
    from deepspeed.accelerator import get_accelerator

    if dist.is_initialized() and not comm.is_initialized():
        if dist.get_backend() == "gloo" or get_accelerator().device_name() == "cpu":
            prepare_cpu()
        comm.init_distributed(dist.get_backend(), auto_mpi_discovery=False, verbose=False)


def leave_out_ranges() -> None:
    """Disable DeepSpeed's ranges for profilers, which do not exist on CPUs.

    They have no effect, but make one in six of the Python calls of a ZeRO-3 step.
    """
    patches.replace(patches.RANGES, lambda _: False)


def _start_without_compiler(operators: Any) -> None:
    if patches.is_installed(patches.SHARED_MEMORY):
        return
    name = "deepspeed_shm_comm"
    before = operators.get(name)
    operators[name] = False

    def undo() -> None:
        if before is None:
            operators.pop(name, None)
        else:
            operators[name] = before

    patches.install(patches.SHARED_MEMORY, undo)


@functools.cache
def _pause_at_exit() -> None:
    # A thread of gloo still drops the tensors of the last collectives, which takes Python's lock; if Python ends
    # meanwhile, torch 2.13 aborts the process: 13 of 25 runs of 50 all-gathers, and none of 20 after this pause.
    atexit.register(time.sleep, 0.1)
    patches.install(patches.EXIT)
