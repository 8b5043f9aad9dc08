"""How tests make an engine of plain DeepSpeed on a rank: on CPU with gloo, unless there is a process group already."""

import os
from datetime import timedelta
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import nn
from torch.distributed.constants import default_pg_timeout

from zerosync_strategy import ZeroSync, prepare_cpu
from zerosync_strategy.core.attached.engine import AttachedEngine


def rank() -> int:
    return int(os.environ["RANK"])


def start(timeout: timedelta = default_pg_timeout) -> None:
    if deepspeed.comm.is_initialized() and get_accelerator().device_name() == "cuda":
        return  # a test on a GPU, which has made its process group
    prepare_cpu()  # anew: the last detach() of an engine undoes it
    if not deepspeed.comm.is_initialized():
        deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False, timeout=timeout)


def expect_timeout(timeout: timedelta = timedelta(seconds=3)) -> None:
    """Let the groups that there are wait no longer from here on.

    Setting up takes longer on a busy machine, and ranks come to its end at different times.
    """
    dist.barrier()
    for group in list(dist.distributed_c10d._world.pg_map):
        dist.distributed_c10d._set_pg_timeout(timeout, group)


def configuration(stage: int, zero: dict[str, Any] | None = None, **config: Any) -> dict[str, Any]:
    """DeepSpeed's, without the clipping that it has by default, and for any optimizer."""
    defaults = {
        "train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False,
    }  # fmt: skip
    return {**defaults, **config, "zero_optimization": {"stage": stage, **(zero or {})}}


def make_engine(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    stage: int = 3,
    zero: dict[str, Any] | None = None,
    **config: Any,
) -> Any:
    """An engine that ZeroSync is not attached to. `zero` has the options of that block, `config` all others."""
    start()
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, config=configuration(stage, zero, **config), dist_init_required=False
    )
    return engine


def attached_of(zerosync: ZeroSync) -> AttachedEngine:
    """The parts behind a handle, for what no public name says: how many buckets there are, what is on its way."""
    return zerosync._attached
