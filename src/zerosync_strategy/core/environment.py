"""Settings of the environment and the machine that make training wrong or slow; logged when an engine attaches."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from zerosync_strategy.core.announcement import say
from zerosync_strategy.core.comm.collectives import backend_for
from zerosync_strategy.core.engine import zero, zero3
from zerosync_strategy.core.engine.types import DeepSpeedEngine
from zerosync_strategy.core.options import AUTO, ZeroSyncConfig

MOST_RANKS = {torch.bfloat16: 64, torch.float16: 512}
"""Ranks over which a ring's sums in a dtype stay within 2 % (W2): each addition rounds to its precision."""
STORE_CONNECTIONS = 2
"""Connections of each rank to the process group's store: torch's, and for a moment the watch's."""
OTHER_FILES = 256
"""Files that a process has open otherwise."""
_said: set[str] = set()


@dataclass(frozen=True)
class Surroundings:
    """The input of :func:`problems`.

    Attributes:
        variables: of the environment.
        on_nccl: gradients are reduced by NCCL.
        ranks: of the group that shares the gradients; ``everyone``: of the job.
        communicators: that the engine uses at once, at least.
        dtype: in which NCCL sums gradients.
        files: that this process may have open; ``None``: any number.
    """

    variables: Mapping[str, str]
    on_nccl: bool
    ranks: int
    everyone: int
    communicators: int
    dtype: torch.dtype
    files: int | None


def problems(of: Surroundings) -> Iterator[str]:
    """Yield a sentence for each problem, with its remedy."""
    needed = STORE_CONNECTIONS * of.everyone + OTHER_FILES
    if of.files is not None and of.files < needed:
        yield (
            f"this process may open {of.files} files, and the one that hosts the store of {of.everyone} ranks opens"
            f" some {needed}; beyond the limit, ranks cannot start: raise it before the launch (ulimit -n {needed})."
        )
    if not of.on_nccl:
        return
    if of.variables.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        yield (
            "CUDA_DEVICE_MAX_CONNECTIONS=1 lets compute wait behind a collective that waits for its data, so that none"
            " is hidden: unset it."
        )
    if of.communicators > 1 and of.variables.get("NCCL_LAUNCH_ORDER_IMPLICIT") != "1":
        yield (
            f"this engine uses {of.communicators} NCCL communicators at once, whose kernels may wait for one another if"
            " they start in different orders on two ranks: set NCCL_LAUNCH_ORDER_IMPLICIT=1 (NCCL 2.26 or newer)."
        )
    most = MOST_RANKS.get(of.dtype, of.ranks)
    if of.ranks > most:
        yield (
            f"gradients are summed in {str(of.dtype).removeprefix('torch.')} over {of.ranks} ranks, and over more than"
            f" {most} such sums may be wrong by more than 2 %: set 'communication_data_type': 'fp32' (twice the bytes),"
            " or reduction='ordered', which sums in fp32."
        )


def surroundings(engine: DeepSpeedEngine, config: ZeroSyncConfig) -> Surroundings:
    """Return the surroundings of ``engine``. Sends nothing."""
    group, native = zero.data_parallel_group(engine.optimizer), config.reduction == "native"
    ranks, everyone = dist.get_world_size(group), dist.get_world_size()
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    communicators = len(zero.process_groups(engine))
    if zero.stage(engine) == 3:  # its group of all data-parallel ranks is another one, which sends a norm alone
        communicators = len(set(map(zero3.process_group, engine.module.parameters())))
        communicators *= 2 if config.unshard_streams == "own_communicator" else 1
    own = int(os.environ.get("LOCAL_WORLD_SIZE", 0)) if config.node_size == AUTO else int(config.node_size)
    keeps_node_shards = config.gradients.keeps_node_shards or config.parameters.keeps_node_shards
    if 1 < own < ranks and (keeps_node_shards or not native):
        communicators += 2  # within nodes, and between them
    return Surroundings(
        variables=os.environ,
        on_nccl=backend_for(group, engine.device.type) == "nccl",
        ranks=ranks,
        everyone=everyone,
        communicators=communicators,
        dtype=zero.reduction_dtype(engine) if native else torch.float32,
        files=None if files == resource.RLIM_INFINITY else files,
    )


def say_problems(engine: DeepSpeedEngine, config: ZeroSyncConfig) -> None:
    """Log each problem of ``engine`` on the first rank, once in this process."""
    if dist.get_rank() != 0:
        return
    for problem in problems(surroundings(engine, config)):
        if problem not in _said:
            _said.add(problem)
            say(problem)
