"""The ranks of the doctor's tests: a process each on this machine, whose store outlives every one of them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from signal import Signals
from typing import IO, Any

PROGRAM = "zerosync_strategy.tools.doctor.on_rank"
_LOOK = 0.1  # seconds between two looks at the ranks
_GRACE = 5.0  # seconds in which the others may end after one has failed, and say why
_ERROR = re.compile(r"\w+Error: .*")


class Ranks:
    """``python -m program DEVICE PART ...`` on ``count`` ranks: a context, at whose end no rank is left.

    Args:
        device: ``"cpu"``, or ``"cuda"``, where each rank has a GPU of its own.
        parts: which of :mod:`on_rank`'s parts to run.
    """

    def __init__(self, device: str, parts: Sequence[str], count: int, program: str = PROGRAM) -> None:
        self._command = [sys.executable, "-u", "-m", program, device, *parts]
        self._device, self.count = device, count
        self._processes: list[subprocess.Popen[bytes]] = []
        self._logs: list[IO[Any]] = []
        self._left = ExitStack()

    def __enter__(self) -> Ranks:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        # As torchrun does: were it one of the ranks, its end would be that of all.
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        common = {
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self._store.port), "WORLD_SIZE": str(self.count),
            "LOCAL_WORLD_SIZE": str(self.count), "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0", "OMP_NUM_THREADS": "1",
            **({"CUDA_VISIBLE_DEVICES": ""} if self._device == "cpu" else {}),
        }  # fmt: skip
        with ExitStack() as left:
            left.callback(self._end)
            for rank in range(self.count):
                log = left.enter_context(tempfile.TemporaryFile("w+", errors="replace"))
                own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                process = subprocess.Popen(
                    self._command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=os.environ | common | own
                )
                self._logs.append(log)
                self._processes.append(process)
            self._left = left.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._left.close()

    def _end(self) -> None:
        for process in self._processes:
            process.kill()
            with suppress(BrokenPipeError):
                process.communicate()

    def said(self, rank: int) -> str:
        """Return all that a rank has printed so far."""
        log = self._logs[rank]
        return os.pread(log.fileno(), os.fstat(log.fileno()).st_size, 0).decode(errors="replace")

    def wake(self, rank: int) -> None:
        """Let a rank go on that reads a line."""
        pipe = self._processes[rank].stdin
        assert pipe is not None
        pipe.write(b"\n")
        pipe.flush()

    def wait(self, seconds: float) -> str:
        """Wait until all ranks have ended. Return what is wrong, with a rank's error; empty if all ended well."""
        deadline = time.monotonic() + seconds
        failed = False
        while any(process.poll() is None for process in self._processes):
            if not failed and any(process.returncode for process in self._processes):
                failed, deadline = True, min(deadline, time.monotonic() + _GRACE)
            if time.monotonic() > deadline:
                break
            time.sleep(_LOOK)
        ended = [process.poll() for process in self._processes]
        bad = [rank for rank, status in enumerate(ended) if status]
        if not bad and None not in ended:
            return ""
        return self._with_error(self._end_of(bad[0]) if bad else f"not ended after {seconds:g} s")

    def wait_until(self, holds: Callable[[int], bool], ranks: Sequence[int], seconds: float) -> tuple[float, str]:
        """Wait until something ``holds`` for each of ``ranks``, before it ends.

        Returns:
            The seconds that took, and what went wrong; empty if it holds.
        """
        began = time.monotonic()
        while True:
            ended = [rank for rank in ranks if self._processes[rank].poll() is not None]  # first: then all is said
            missing = [rank for rank in ranks if not holds(rank)]
            waited = time.monotonic() - began
            if not missing:
                return waited, ""
            if dead := [rank for rank in missing if rank in ended]:
                return waited, self._with_error(self._end_of(dead[0]))
            if waited > seconds:
                return waited, self._with_error(f"rank {missing[0]} said nothing for {seconds:g} s")
            time.sleep(_LOOK)

    def _end_of(self, rank: int) -> str:
        status = self._processes[rank].returncode
        return f"rank {rank} ended " + (f"with status {status}" if status >= 0 else f"by {Signals(-status).name}")

    def _with_error(self, problem: str) -> str:
        """Append the first error that a rank has printed; first of those that have ended badly."""
        ranks = sorted(range(self.count), key=lambda rank: not self._processes[rank].returncode)
        errors = (_ERROR.search(self.said(rank)) for rank in ranks)
        error = next(filter(None, errors), None)
        return problem + (f", {error[0][:300]}" if error else "")
