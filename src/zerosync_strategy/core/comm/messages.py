"""How large a message is, and how many are under way.

A collective of NCCL is as large as DeepSpeed's bucket sizes say. Off NCCL ranks send point to point: between hosts in
small messages, because the first leaves early and the last ends soon after it is complete; within a host in large ones,
because each wakes a thread on both sides.
"""

from __future__ import annotations

import os
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from zerosync_strategy.core.comm.collectives import digest, is_alike, is_native


@dataclass(frozen=True)
class Messages:
    """Messages of one process group.

    Attributes:
        nbytes: of a bucket at most, and of a part of a larger parameter.
        in_flight: reductions at a time.
    """

    nbytes: int
    in_flight: int


NATIVE = Messages(sys.maxsize, 2)
WITHIN_HOST = Messages(16 * 2**20, 2)
BETWEEN_HOSTS = Messages(4 * 2**20, 4)


def messages_of(process_group: Any, device: torch.device) -> Messages:
    """Return the messages of ``process_group`` for tensors on ``device``, the same on all ranks. Collective."""
    if is_native(process_group, device):
        return NATIVE
    return WITHIN_HOST if on_one_host(process_group) else BETWEEN_HOSTS


def on_one_host(process_group: Any) -> bool:
    """Return whether all ranks of ``process_group`` share a loopback interface. Collective: 64 bytes are reduced."""
    return is_alike(loopback(), process_group)


def loopback() -> list[int]:
    """Return what two processes have alike if they share a loopback interface: kernel, and network namespace."""
    try:
        text = Path("/proc/sys/kernel/random/boot_id").read_text() + os.readlink("/proc/self/ns/net")
    except OSError:
        text = socket.gethostname()
    return digest(text)
