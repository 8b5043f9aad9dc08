"""Run a function as the ranks of a distributed job, forked from this process.

Importing torch, DeepSpeed and Lightning takes seconds; a fork of a process that has imported them takes none.
Needs Linux. Nothing of a rank outlives `run_ranks`: no process, no file.
"""

import contextlib
import ctypes
import faulthandler
import logging
import os
import re
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

import torch

from zerosync_strategy.core.failures import rank_status

FAILURE_GRACE = 5.0  # for the others to fail by themselves once one rank has
LINGER = 3.0  # for which a rank that is done waits for the others
LINGER_FAILED = 0.3  # for which rank 0, where it has failed, still hosts the store: others may be connecting
DUMP_GRACE = 1.0  # to write the stacks
POLL = 0.01
KILLED = "RankKilled"  # the error of a rank that this module ended
KEPT_ON_DEVICES = (
    3  # buckets whose memory producers do not have back yet, after their reduction, on the simulated device
)
SIMULATED = "ZEROSYNC_TEST_SIMULATED"  # in the environment, and not empty: ranks run on the simulated device
SIMULATED_SLOWER = 4  # times the timeout of ranks: each operation is a call into Python there, each message a file
ON_CPU = {SIMULATED: ""}  # the environment of programs to compare with, which DDP's own C++ reduces
DIED = "RankDied"  # the error of a rank that ended without saying why

_PR_SET_PDEATHSIG = 1
_PF_EXITING = 4
_TAIL_LINES = 120
# Below the entry of a rank, a stack holds only the pytest frames it was forked from.
_BELOW_ENTRY = re.compile(r'(  File "[^"]*ranks\.py", line \d+ in _main\n)(?:  File .*\n|  \.\.\.\n)+')


@dataclass(frozen=True)
class RankOutcome:
    """How one rank ended. `error` is None, the name of an exception's type, `DIED` or `KILLED`.

    `since`: of a ContractError, the first release of DeepSpeed that has what it misses; else empty.
    """

    rank: int
    value: Any
    error: str | None
    message: str
    traceback: str
    exitcode: int | None
    signal: int | None
    output: str
    ended_at: float
    since: str = ""

    def __str__(self) -> str:
        lines = [f"--- rank {self.rank}: " + (f"{self.error}: {self.message}" if self.error else "returned")]
        if self.traceback:
            lines.append(self.traceback.rstrip())
        if self.output.strip():
            lines += ["output:", *self.output.rstrip().splitlines()[-_TAIL_LINES:]]
        return "\n".join(lines)


class RanksError(RuntimeError):
    """The ranks did not all return; `outcomes` says how each of them ended."""

    def __init__(self, summary: str, outcomes: Sequence[RankOutcome]) -> None:
        super().__init__("\n".join([summary, *map(str, outcomes)]))
        self.outcomes = list(outcomes)


class RanksFailed(RanksError):
    """A rank raised or died."""


class RanksTimedOut(RanksError):
    """A rank was still running at the end of the time allowed."""


def run_ranks(
    fn: Callable[..., Any],
    *args: Any,
    world_size: int = 2,
    timeout: float = 120.0,
    expect: Literal["success", "any"] = "success",
    env: dict[str, str] | None = None,
    **kwargs: Any,
) -> list[Any]:
    """Call `fn(*args, **kwargs)` on every rank and return the values by rank, or with `expect="any"` the outcomes.

    `fn` may be a closure. What it returns is pickled, its tensors arrive on the CPU. `env` adds to the environment.
    """
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        raise RuntimeError("run_ranks: this process has a torch.distributed process group, which no fork survives")
    if torch.cuda.is_initialized():
        raise RuntimeError("run_ranks: this process has initialised CUDA, which no fork survives")

    simulated = (env or {}).get(SIMULATED, os.environ.get(SIMULATED))
    deadline = time.monotonic() + (timeout * SIMULATED_SLOWER if simulated else timeout)
    environment = {
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "NODE_RANK": "0",
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        **(env or {}),
    }
    root = Path(tempfile.mkdtemp(prefix="ranks-"))
    ranks = [_Rank(index, root) for index in range(world_size)]
    try:
        for rank in ranks:
            rank.start(lambda: fn(*args, **kwargs), environment, [other.report for other in ranks])
        _wait(ranks, deadline, stop_on_failure=expect == "success")
        if running := [rank for rank in ranks if rank.running()]:
            for rank in running:
                rank.dump_stacks()
            time.sleep(DUMP_GRACE)
        for rank in ranks:
            rank.end()
        outcomes = [rank.outcome() for rank in ranks]
    finally:
        with _signals_held():
            for rank in ranks:
                rank.end()
            shutil.rmtree(root, ignore_errors=True)

    stuck = [outcome.rank for outcome in outcomes if outcome.error == KILLED]
    failed = [outcome for outcome in outcomes if outcome.error not in (None, KILLED)]
    if stuck and (expect == "any" or not failed):
        raise RanksTimedOut(f"still running after {timeout:g} s: ranks {stuck} of {world_size}", outcomes)
    if expect == "any":
        return outcomes
    if failed:
        first = min(failed, key=lambda outcome: outcome.ended_at)
        raise RanksFailed(f"rank {first.rank} of {world_size} failed first: {first.error}: {first.message}", outcomes)
    return [outcome.value for outcome in outcomes]


def _on_simulated_device(call: Callable[[], Any]) -> Any:
    from tests.harness.simulated import on_simulated_device  # which needs what older revisions do not have

    return on_simulated_device(call)


class _Rank:
    """One forked rank, seen from the parent; `_main` and what it calls run in the rank itself."""

    def __init__(self, index: int, root: Path) -> None:
        self.index = index
        self.home, self.tmp = root / f"rank{index}", root / f"tmp{index}"
        self.log, self.report = root / f"log{index}", root / f"report{index}"
        self.pid: int | None = None
        self.status: int | None = None  # as of os.waitstatus_to_exitcode, once reaped
        self.killed = False
        self.alive_at = time.monotonic()

    def start(self, call: Callable[[], Any], env: dict[str, str], reports: Sequence[Path]) -> None:
        self.home.mkdir()
        self.tmp.mkdir()
        self.log.touch()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        with _signals_held():
            pid = os.fork()
            if pid == 0:
                self._main(call, env, reports)
            self.pid = pid

    def running(self) -> bool:
        if self.pid is None or self.status is not None:
            return False
        looked_at = time.monotonic()
        # Not reaped yet, a rank keeps its pid from being reused while `end` kills its process group.
        if os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            # One that ends has closed its connections, which other ranks notice, before it can be reaped.
            if not _is_ending(self.pid):
                self.alive_at = looked_at
            return True
        self.end()
        return False

    def failed(self) -> bool:
        return self.status is not None and (self.status != 0 or not self.report.exists())

    def dump_stacks(self) -> None:
        assert self.pid is not None
        self.killed = True  # SIGUSR1 itself ends a rank that has not come to its handler yet
        os.kill(self.pid, signal.SIGUSR1)

    def end(self) -> None:
        """Kill the rank and the processes it started, where there are any left, and reap it."""
        if self.pid is None or self.status is not None:
            return
        with _signals_held():
            self.killed |= os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
            # The group is not there yet where the rank has not come to its setsid: hence also by pid.
            for kill in (os.killpg, os.kill):
                with contextlib.suppress(ProcessLookupError):
                    kill(self.pid, signal.SIGKILL)
            self.status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def outcome(self) -> RankOutcome:
        assert self.status is not None
        exitcode, signum = (self.status, None) if self.status >= 0 else (None, -self.status)
        # A death without a report is dated to when the rank was last seen alive: what it made fail came later.
        fields: dict[str, Any] = {"value": None, "traceback": "", "ended_at": self.alive_at}
        if self.report.exists():
            fields |= torch.load(self.report, map_location="cpu", weights_only=False)
        elif self.killed:
            fields |= {"error": KILLED, "message": "was still running"}
        else:
            how = f"exit code {exitcode}" if signum is None else signal.Signals(signum).name
            fields |= {"error": DIED, "message": f"ended by {how}, without a result"}
        output = _BELOW_ENTRY.sub(r"\1", self.log.read_text(encoding="utf-8", errors="replace"))
        return RankOutcome(rank=self.index, exitcode=exitcode, signal=signum, output=output, **fields)

    def _main(self, call: Callable[[], Any], env: dict[str, str], reports: Sequence[Path]) -> NoReturn:
        exitcode = 1
        try:
            try:
                self._become_rank(env)
                value = _on_simulated_device(call) if os.environ.get(SIMULATED) else call()
                self._write_report(value=value, error=None, message="")
                exitcode, linger = 0, LINGER
            except BaseException as error:
                if rank_status._current is not None:
                    rank_status._current[1].uncaught(error)  # as at the end of a program
                text = "".join(traceback.format_exception(error))
                since = getattr(error, "since", "")
                self._write_report(error=type(error).__name__, message=str(error), traceback=text, since=since)
                linger = LINGER_FAILED if self.index == 0 else 0.0
            # Rank 0 hosts the store, and ranks that are a step behind may still need it.
            until = time.monotonic() + linger
            while time.monotonic() < until and not all(report.exists() for report in reports):
                time.sleep(POLL)
        finally:
            # Whatever happens, the pytest that this is a copy of must not go on here.
            with contextlib.suppress(BaseException):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(exitcode)

    def _become_rank(self, env: dict[str, str]) -> None:
        os.setsid()
        # A thread that wakes then takes no processor from one that holds a lock for which gloo's threads spin.
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # should pytest itself be killed

        log = os.open(self.log, os.O_WRONLY | os.O_APPEND)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        sys.stdout, sys.stderr = (
            os.fdopen(fd, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False) for fd in (1, 2)
        )
        redirect_log_handlers()
        # pytest's hooks would collect what goes wrong in threads and finalisers, for a report that is never made.
        threading.excepthook = threading.__excepthook__
        sys.unraisablehook = sys.__unraisablehook__
        faulthandler.enable(file=log)
        faulthandler.register(signal.SIGUSR1, file=log, all_threads=True)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1, *_HELD})

        os.chdir(self.home)
        tempfile.tempdir = str(self.tmp)
        os.environ |= {"RANK": str(self.index), "LOCAL_RANK": str(self.index), "TMPDIR": str(self.tmp)} | env
        torch.set_num_threads(1)

    def _write_report(self, **fields: Any) -> None:
        partial = self.report.with_suffix(".partial")
        torch.save({**fields, "ended_at": time.monotonic()}, partial)
        partial.rename(self.report)


def _wait(ranks: Sequence[_Rank], deadline: float, stop_on_failure: bool) -> None:
    """Return when every rank has ended, at the deadline, or when the grace after a first failure is over."""
    in_grace = False
    # A list, for `all` and `any` would leave the later ranks unseen.
    while any([rank.running() for rank in ranks]) and time.monotonic() < deadline:
        if stop_on_failure and not in_grace and any(rank.failed() for rank in ranks):
            in_grace = True
            deadline = min(deadline, time.monotonic() + FAILURE_GRACE)
        time.sleep(POLL)


_HELD = {signal.SIGINT, signal.SIGALRM}  # ^C, and pytest-timeout


@contextlib.contextmanager
def _signals_held() -> Iterator[None]:
    """Put off what could raise between a change to a rank and the note that is made of it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _HELD)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _is_ending(pid: int) -> bool:
    flags = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[6]
    return bool(int(flags) & _PF_EXITING)


def _free_port() -> int:
    """Return a port below the ephemeral ones, so that no outgoing connection takes it before rank 0 does.

    Each of pytest's workers has its own, so that none takes what another has just found free.
    """
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % 16
    while True:
        port = 10_000 + 16 * secrets.randbelow(22_000 // 16) + worker
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def redirect_log_handlers() -> None:
    """Send to stderr what handlers would write to a stream of the parent."""
    for logger in [logging.root, *logging.root.manager.loggerDict.values()]:
        for handler in getattr(logger, "handlers", ()):
            if type(handler) is logging.StreamHandler:
                handler.setStream(sys.stderr)
