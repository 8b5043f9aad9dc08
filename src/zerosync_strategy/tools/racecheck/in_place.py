"""``racecheck=K``: checks the first optimizer steps of a training in place.

On CUDA the check follows the device's own streams. On CPU it simulates streams, and notifies the engines at its start
and at its end that the device has changed. Operations from before the check count as complete. Memory from before it
counts as device memory of the default stream, even that of an offloaded optimizer.
"""

from __future__ import annotations

import atexit
import sys
import threading
import warnings

import torch.distributed as dist

from zerosync_strategy.core.race_check import CheckedEngine, StepCheck
from zerosync_strategy.tools.racecheck.checker import Finding
from zerosync_strategy.tools.racecheck.cuda import Follower
from zerosync_strategy.tools.racecheck.recorder import Recorder, running
from zerosync_strategy.tools.racecheck.simulation import Simulation


class RaceWarning(UserWarning):
    """Two unordered accesses to the same memory."""


class InPlaceCheck(StepCheck):
    """Checks all engines of this process until each has taken its steps, then reports.

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
        self._engines: list[CheckedEngine] = []
        self._steps_left: dict[CheckedEngine, int] = {}
        self._steps = 0
        self.running = False

    @property
    def findings(self) -> list[Finding]:
        return self._recorder.findings

    def join(self, engine: CheckedEngine, steps: int) -> None:
        if not self.running:
            self._recorder.start()
            atexit.register(self._at_exit)
            self.running = True
        self._engines.append(engine)
        if steps:
            self._steps_left[engine] = steps
        self._notify(engine)

    def stepped(self, engine: CheckedEngine) -> None:
        if not self.running or engine not in self._steps_left:
            return
        if threading.get_ident() != self._thread:
            raise RuntimeError(
                "ZeroSync option 'racecheck' follows the thread that attached the engine, but this step was taken in"
                " another one. Attach in the thread that trains, or leave racecheck out."
            )
        self._steps += 1
        self._steps_left[engine] -= 1
        if not self._steps_left[engine]:
            del self._steps_left[engine]
        if not self._steps_left:
            self._end("")

    def leave(self, engine: CheckedEngine, reason: str) -> None:
        left = self._steps_left.pop(engine, 0)
        if self.running and not self._steps_left:
            self._end(f" It ended {left} step(s) early: {reason}." if left else "")

    def _notify(self, engine: CheckedEngine) -> None:
        if isinstance(self._recorder, Simulation):
            engine.device_changed()

    def _end(self, early: str) -> None:
        self.running = False
        self._recorder.stop()
        atexit.unregister(self._at_exit)
        for engine in self._engines:
            self._notify(engine)
        self._engines.clear()
        rank = dist.get_rank() if dist.is_initialized() else 0
        scope = f"{len(self._recorder.operations)} operations in {self._steps} optimizer step(s).{early}"
        for finding, times in self._recorder.checker.findings.values():
            warnings.warn(f"Race check, rank {rank}: {finding}; {times} times, of {scope}", RaceWarning, stacklevel=4)
        if not self.findings:
            print(f"ZeroSync race check, rank {rank}: nothing found in {scope}", file=sys.stderr, flush=True)
        self._recorder.operations.clear()  # large, and the findings do not need it

    def _at_exit(self) -> None:
        self._end(f" It ended {max(self._steps_left.values())} step(s) early: the process did.")
