"""What one rank of one system does: join its others, step when it is its turn, show what it has trained."""

from __future__ import annotations

import ctypes
import enum
import logging
import os
import resource
import signal
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from hosts import Host, tune, variables_of_rank
from lightning_systems import make_lightning_system
from phases import Phases
from systems import System, full, make_batches, make_system
from tensor_memory import TensorMemory

from zerosync_strategy.core.attached import budgets

_PR_SET_PDEATHSIG = 1


class Turn(enum.Enum):
    """What the conductor sends."""

    STEP = enum.auto()  # make an optimizer step
    END = enum.auto()  # send the result


@dataclass(frozen=True)
class Job:
    """What the ranks of one system are to do.

    Attributes:
        system: its name.
        model: the size of the GPT.
        accumulate: micro-batches of an optimizer step.
        batch: pieces of a micro-batch.
        hosts: where the ranks run.
        port: where they meet.
        parameters: the file for rank 0's view of the final parameters.
        counts_tensors: automatic budgets go by the memory of tensors, which is counted.
    """

    system: str
    model: str
    accumulate: int
    batch: int
    hosts: Sequence[Host]
    port: int
    parameters: Path
    counts_tensors: bool = False


@dataclass(frozen=True)
class Failure:
    """Sent to the conductor in the place of anything else; the error with its traceback."""

    error: str


def main(conductor: Connection, job: Job, rank: int) -> None:
    """The life of a rank, in a process that was forked for it. It ends by being killed.

    It sends the number of optimizer steps that it has made, whenever it is ready for another :class:`Turn`.
    """
    # Ctrl-C reaches the conductor alone, which then ends the ranks; none outlives it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    try:
        conductor.send(_work(conductor, job, rank))
    except Exception:
        conductor.send(Failure(traceback.format_exc()))
    # To leave now would make the other ranks fail, with errors that hide this one's.
    signal.pause()


def _work(conductor: Connection, job: Job, rank: int) -> dict[str, Any]:
    warnings.filterwarnings("ignore")
    for name in ("DeepSpeed", "lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    tune()
    job.hosts[rank].enter()
    os.environ.update(variables_of_rank(job.hosts, rank, job.port))
    make = make_lightning_system if job.system.startswith("lightning-") else make_system
    tensors = TensorMemory() if job.counts_tensors else None
    if tensors is not None:
        budgets.gauge_of = lambda device: tensors
    with tensors or nullcontext():
        system = make(job.system, job.model, job.accumulate)
        watched = Phases()
        system.run(_turns(conductor, job, rank, system, watched))
    memory = tensors.most if tensors is not None else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {
        "report": system.report(),
        "memory": memory,
        "phases": watched.medians(),
        "apart": _show(system.module, job.parameters),
    }


def _turns(conductor: Connection, job: Job, rank: int, system: System, watched: Phases) -> Iterator[list[torch.Tensor]]:
    """The micro-batches of one optimizer step after the other, each when the conductor gives the turn."""
    round_ = 0
    while True:
        batches = make_batches(round_, rank, job.accumulate, job.batch)
        conductor.send(system.steps)
        if conductor.recv() is Turn.END:
            return
        with watched.watching():
            yield batches
        round_ += 1


def _show(module: torch.nn.Module, path: Path) -> float:
    """Write rank 0's view of the parameters; return how far this rank's is from it."""
    parameters, apart = {}, 0.0
    for name, param in module.named_parameters():
        mine = full(param)
        first = mine.clone()
        dist.broadcast(first, 0)
        apart = max(apart, (mine - first).nan_to_num(torch.inf).abs().max().item())
        parameters[name] = first
    if dist.get_rank() == 0:
        torch.save(parameters, path)
    return apart
