"""The size of messages, and how many are in flight.

On NCCL, a collective has DeepSpeed's bucket size, but at least 128 MiB and 2 MiB per rank. It takes that much to fill a
link, and the Trainer's ``"auto"``, the square of a model's width, is far less. Between gathers, it has at most 256 MiB,
for which they wait a few ms. Off NCCL, ranks send point to point. Between hosts, messages are small, because the first
leaves early and the last ends soon after it is complete. Within a host, they are large, because each wakes a thread on
both sides.
"""

from __future__ import annotations

import os
import socket
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from zerosync_strategy.core.comm.collectives import digest, is_alike, is_native


@dataclass(frozen=True)
class Messages:
    """The messages of one process group.

    Attributes:
        nbytes: most bytes of a bucket, and of a part of a larger parameter.
        in_flight: reductions at a time.
        least: least bytes of a bucket, if there is as much and budgets of memory allow it.
    """

    nbytes: int
    in_flight: int
    least: int = 0


NATIVE = Messages(sys.maxsize, 2)
LEAST, LEAST_OF_RANK = 128 * 2**20, 2 * 2**20
AMONG_GATHERS = 256 * 2**20
"""The most bytes of a reduction by NCCL between gathers of the same process group."""
WITHIN_HOST = Messages(16 * 2**20, 2)
BETWEEN_HOSTS = Messages(4 * 2**20, 4)


def messages_of(process_group: Any, device: torch.device) -> Messages:
    """Return the messages of ``process_group`` for tensors on ``device``, the same on all ranks. Collective."""
    if is_native(process_group, device):
        return replace(NATIVE, least=max(LEAST, LEAST_OF_RANK * dist.get_world_size(process_group)))
    return WITHIN_HOST if on_one_host(process_group) else BETWEEN_HOSTS


def on_one_host(process_group: Any) -> bool:
    """Return whether all ranks of ``process_group`` share a loopback interface. Collective: reduces 64 bytes."""
    return is_alike(loopback(), process_group)


def loopback() -> list[int]:
    """Return words for the kernel and network namespace, equal for processes that share a loopback interface."""
    try:
        text = Path("/proc/sys/kernel/random/boot_id").read_text() + os.readlink("/proc/self/ns/net")
    except OSError:
        text = socket.gethostname()
    return digest(text)
