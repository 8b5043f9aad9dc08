"""What some stages or devices have no use for: options, and backends of process groups."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from zerosync_strategy.core.comm.collectives import is_native
from zerosync_strategy.core.engine import zero, zero3
from zerosync_strategy.core.options.config import ZeroSyncConfig


def check_stage(engine: Any, config: ZeroSyncConfig) -> None:
    """Raise where an option of ``config`` is for another stage or device than those of ``engine``.

    Raises:
        ValueError: naming the option, what was found, and what to do.
    """
    stage = zero.stage(engine)
    for name, is_automatic in (
        ("param_memory_budget", config.auto_parameters), ("grad_memory_budget", config.auto_gradients),
    ):  # fmt: skip
        if is_automatic and config.auto_limit is None and engine.device.type != "cuda":
            raise ValueError(
                f'ZeroSync option {name!r} got "auto" on a device of type {engine.device.type!r}, whose free memory is'
                ' not known. Give a limit: {"auto": "8GiB"}, the resident memory that each rank\'s process may have.'
            )
    if stage == 3:
        if config.overlap_gather:
            raise ValueError(
                "ZeroSync option 'overlap_gather' is for the gather after a step of ZeRO stages 1 and 2, found stage 3,"
                " which gathers parameters when modules need them. Leave it out."
            )
        return
    if config.keeps_parameters:
        raise ValueError(
            "ZeroSync option 'param_memory_budget' holds the gathered parameters of ZeRO stage 3, found stage"
            f" {stage}. Leave it out, or use stage 3."
        )
    if any(map(zero3.has_own_group, engine.module.parameters())):
        raise ValueError(
            f"shard_over() shards parameters of ZeRO stage 3, found stage {stage}. Use stage 3, or leave it out."
        )
    if config.trace_gathers:
        raise ValueError(
            f"ZeroSync option 'trace_gathers' is for the gathers of ZeRO stage 3, found stage {stage}. Leave it out,"
            " or use stage 3."
        )


def check_backends(process_groups: Iterable[Any], device: torch.device) -> None:
    """Raise where the backend of one of ``process_groups`` cannot send what is on ``device`` point to point.

    gloo would take an address of the device for one of the host.

    Raises:
        ValueError: naming the ranks, what was found, and what to do.
    """
    for group in process_groups:
        if device.type != "cpu" and dist.get_world_size(group) > 1 and not is_native(group, device):
            raise ValueError(
                f"attach() found the process group of the ranks {dist.get_process_group_ranks(group)} with the backends"
                f" {dist.get_backend_config(group)!r}, and parameters on {device}, which gloo cannot send. Make the"
                " process group with 'nccl', or 'cpu:gloo,cuda:nccl', or train on the CPU."
            )
