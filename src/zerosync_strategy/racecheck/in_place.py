"""``racecheck=K``: the first optimizer steps of a training, checked where they run.

On CUDA the device's own streams are followed. A CPU has none, so it is given simulated ones, and the engines are told
that their device has changed, now and again at the end. What was built before is taken as it is: complete, and device
memory of the default stream, the memory of an optimizer on the host included.
"""

from __future__ import annotations

import atexit
import sys
import threading
import warnings
from typing import Protocol

import torch.distributed as dist

from zerosync_strategy.racecheck.checker import Finding
from zerosync_strategy.racecheck.cuda import Follower
from zerosync_strategy.racecheck.recorder import Recorder, running
from zerosync_strategy.racecheck.simulation import Simulation


class RaceWarning(UserWarning):
    """Two accesses to the same memory that nothing orders."""


class Member(Protocol):
    """An engine whose steps are checked, or that only runs beside them."""

    def device_changed(self) -> None:
        """The device has gained streams or lost them: make anew what was made of them."""


class InPlaceCheck:
    """A check of all engines of this process, until each has taken its steps. Ends by itself, and reports.

    Attributes:
        running: the first engine has joined, and the check has not ended.

    Raises:
        ValueError: DeepSpeed runs on neither CUDA nor CPU.
        RuntimeError: another race checker runs in this process.
    """

    def __init__(self) -> None:
        from deepspeed.accelerator import get_accelerator

        device = get_accelerator().device_name()
        if device not in ("cuda", "cpu"):
            raise ValueError(f"ZeroSync option 'racecheck' takes CUDA or CPU, found {device!r}. Leave it out.")
        if running() is not None:
            raise RuntimeError(
                "ZeroSync option 'racecheck' found the race checker at work in this process already. Attach outside of"
                " racecheck.simulate(), or leave racecheck out."
            )
        self._recorder: Recorder = Follower() if device == "cuda" else Simulation()
        self._thread = threading.get_ident()
        self._members: list[Member] = []
        self._due: dict[Member, int] = {}  # steps that are still to be checked
        self._steps = 0
        self.running = False

    @property
    def findings(self) -> list[Finding]:
        """What was found until now, each pair of accesses once."""
        return self._recorder.findings

    def join(self, member: Member, steps: int) -> None:
        """Check that many steps of ``member``; with 0, it only runs beside the others."""
        if not self.running:
            self._recorder.start()
            atexit.register(self._at_exit)
            self.running = True
        self._members.append(member)
        if steps:
            self._due[member] = steps
        self._tell(member)

    def stepped(self, member: Member) -> None:
        """``member`` has taken an optimizer step.

        Raises:
            RuntimeError: in another thread than the one that is followed.
        """
        if not self.running or member not in self._due:
            return
        if threading.get_ident() != self._thread:
            raise RuntimeError(
                "ZeroSync option 'racecheck' follows the thread that attached the engine, but this step was taken in"
                " another one. Attach in the thread that trains, or leave racecheck out."
            )
        self._steps += 1
        self._due[member] -= 1
        if not self._due[member]:
            del self._due[member]
        if not self._due:
            self._end("")

    def leave(self, member: Member, why: str) -> None:
        """``member`` will take no more steps because of ``why``."""
        due = self._due.pop(member, 0)
        if self.running and not self._due:
            self._end(f" It ended {due} step(s) early: {why}." if due else "")

    def _tell(self, member: Member) -> None:
        if isinstance(self._recorder, Simulation):
            member.device_changed()

    def _end(self, early: str) -> None:
        self.running = False
        self._recorder.stop()
        atexit.unregister(self._at_exit)
        for member in self._members:
            self._tell(member)
        self._members.clear()
        rank = dist.get_rank() if dist.is_initialized() else 0
        over = f"{len(self._recorder.operations)} operations in {self._steps} optimizer step(s).{early}"
        for finding, times in self._recorder.checker.findings.values():
            warnings.warn(f"Race check, rank {rank}: {finding}; {times} times, of {over}", RaceWarning, stacklevel=4)
        if not self.findings:
            print(f"ZeroSync race check, rank {rank}: nothing found in {over}", file=sys.stderr, flush=True)
        self._recorder.operations.clear()  # there may be many, and the findings stay

    def _at_exit(self) -> None:
        self._end(f" It ended {max(self._due.values())} step(s) early: the process did.")
