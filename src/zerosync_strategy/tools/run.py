"""``zerosync run``. It needs no other package."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence

from zerosync_strategy.core.announcement import ATTACHED, NOTES, REPORT
from zerosync_strategy.hook import SITE

_LEFT = {  # signals not passed on: those that stop and continue processes, and faults of this process itself
    signal.SIGKILL, signal.SIGSTOP, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU, signal.SIGCONT, signal.SIGSEGV,
    signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT, signal.SIGTRAP, signal.SIGSYS, signal.SIGWINCH,
    signal.SIGPIPE, signal.SIGURG,
}  # fmt: skip
_PR_SET_PDEATHSIG = 1


def main(arguments: Sequence[str]) -> None:
    """Run the command in ``arguments``, and exit with its status.

    Raises:
        SystemExit: always, unless a signal has ended the command; then the same signal ends this process.
    """
    parser = argparse.ArgumentParser(
        "zerosync run", usage="zerosync run [--report N[:FILE]] COMMAND [ARGUMENT ...]",
        description="Run a command. Whatever trains with DeepSpeed's ZeRO in it, or in what it starts, trains with"
        " ZeroSync: under Accelerate and the trainers that are built on it, and with plain DeepSpeed. Exit status and"
        " signals are the command's.",
    )  # fmt: skip
    parser.add_argument("--report", metavar="N[:FILE]", help="log what every Nth optimizer step sent, or to a file")
    parser.add_argument("words", nargs=argparse.REMAINDER, metavar="COMMAND")
    asked = parser.parse_args(arguments)
    if not asked.words:
        parser.error("a command is missing, as in: zerosync run torchrun --nproc_per_node 2 train.py")
    reports = {REPORT: asked.report} if asked.report else {}
    raise SystemExit(run(asked.words, {**os.environ, **reports}))


def run(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run ``command`` until it ends, and report if ZeroSync has attached to nothing.

    Returns:
        Its exit status; as in a shell, 127 if the command does not exist, and 126 if it is not executable.
    """
    places = [str(SITE), *filter(None, [environment.get("PYTHONPATH")])]
    with tempfile.NamedTemporaryFile("r", prefix="zerosync-run-") as notes:
        try:
            status = _wait(command, {**environment, "PYTHONPATH": os.pathsep.join(places), NOTES: notes.name})
        except FileNotFoundError as error:
            return _say(f"there is no command {error.filename!r}", 127)
        except PermissionError as error:
            return _say(f"{error.filename!r} is not executable", 126)
        found = dict.fromkeys(notes.read().splitlines())
    if not any(line.startswith(ATTACHED) for line in found):
        why = "; ".join(found) or "no process that it started made a DeepSpeed engine, in an environment with ZeroSync"
        _say(f"there was nothing to attach to: {why}")
    if status < 0:
        _end_by(-status)
    return status


def _say(text: str, status: int = 0) -> int:
    print(f"zerosync run: {text}", file=sys.stderr, flush=True)
    return status


def _wait(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Return the exit status of ``command``, negative for a signal. Signals to this process are passed on to it."""
    waited = signal.valid_signals() - _LEFT
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, waited)
    libc = ctypes.CDLL(None)

    def in_child() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # the only way to pass SIGKILL on
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

    try:
        with subprocess.Popen(command, env=environment, preexec_fn=in_child) as child:
            while child.poll() is None:
                came = signal.sigwaitinfo(waited)
                # Signals of the terminal reach the command directly.
                if came.si_signo != signal.SIGCHLD and came.si_code <= 0:
                    child.send_signal(came.si_signo)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return child.returncode


def _end_by(number: int) -> None:
    """End this process by the signal that has ended the command."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError):  # SIGKILL has no handler
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
