"""``zerosync run``, ``zerosync enable`` and ``zerosync disable``. They need no other package."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import resource
import signal
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from zerosync_strategy.core.announcement import ATTACHED, NOTES
from zerosync_strategy.hook import SITE

_LEFT = {  # to themselves: what stops and continues, and what tells of a fault in this very process
    signal.SIGKILL, signal.SIGSTOP, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU, signal.SIGCONT, signal.SIGSEGV,
    signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT, signal.SIGTRAP, signal.SIGSYS, signal.SIGWINCH,
    signal.SIGPIPE, signal.SIGURG,
}  # fmt: skip
_PR_SET_PDEATHSIG = 1
_PTH = "zerosync-strategy-enabled.pth"  # after those that add the package itself


def main(arguments: Sequence[str]) -> None:
    """Do what ``arguments`` say, and leave with an exit status.

    Raises:
        SystemExit: always, unless a signal has ended the command, which then ends this process.
    """
    parser = argparse.ArgumentParser("zerosync")
    commands = parser.add_subparsers(required=True, dest="command")
    run_parser = commands.add_parser(
        "run", usage="zerosync run COMMAND [ARGUMENT ...]",
        description="Run a command. Whatever trains with DeepSpeed's ZeRO in it, or in what it starts, trains with"
        " ZeroSync: under Accelerate and the trainers that are built on it, and with plain DeepSpeed. Exit status and"
        " signals are the command's.",
    )  # fmt: skip
    run_parser.add_argument("words", nargs=argparse.REMAINDER, metavar="COMMAND")
    commands.add_parser(
        "enable",
        description="From now on, every program of this Python environment trains each DeepSpeed configuration that has"
        ' a "zerosync" block with ZeroSync. Others are as they were.',
    )
    commands.add_parser("disable", description="Undo zerosync enable.")
    asked = parser.parse_args(arguments)
    if asked.command != "run":
        raise SystemExit(_enable() if asked.command == "enable" else _disable())
    if not asked.words:
        run_parser.error("a command is missing, as in: zerosync run torchrun --nproc_per_node 2 train.py")
    raise SystemExit(run(asked.words, os.environ))


# ---- run -----------------------------------------------------------------------------------------------------------


def run(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run ``command`` until it ends, and say if there was nothing to attach to.

    Returns:
        Its exit status, or 127 or 126 where there is no such command, as a shell has it.
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
    """Return the exit status of ``command``, negative for a signal; those that come to this process are passed on."""
    waited = signal.valid_signals() - _LEFT
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, waited)
    libc = ctypes.CDLL(None)

    def in_child() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # SIGKILL can be passed on in no other way
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

    try:
        with subprocess.Popen(command, env=environment, preexec_fn=in_child) as child:
            while child.poll() is None:
                came = signal.sigwaitinfo(waited)
                # What the terminal sends, it sends to the command too.
                if came.si_signo != signal.SIGCHLD and came.si_code <= 0:
                    child.send_signal(came.si_signo)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return child.returncode


def _end_by(number: int) -> None:
    """End this process as the command has ended, by a signal."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError):  # SIGKILL has no handler
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


# ---- enable --------------------------------------------------------------------------------------------------------


def _file() -> Path:
    return Path(sysconfig.get_path("purelib")) / _PTH


def _enable() -> int:
    lines = f"""import sys
sys.path.append({str(SITE)!r})
try:
    import zerosync_hook
    zerosync_hook.install(always=False)
except ImportError:
    pass  # the package is gone
finally:
    sys.path.remove({str(SITE)!r})"""
    file = _file()
    try:
        file.write_text(f"import sys; exec({lines!r})\n")
    except OSError as error:
        print(f"zerosync enable: {error}. Is this environment yours to change?", file=sys.stderr)
        return 1
    print(f'A DeepSpeed configuration with a "zerosync" block trains with ZeroSync in {sys.prefix}, by {file}.')
    return 0


def _disable() -> int:
    file = _file()
    was_enabled = file.exists()
    try:
        file.unlink(missing_ok=True)
    except OSError as error:
        print(f"zerosync disable: {error}. Is this environment yours to change?", file=sys.stderr)
        return 1
    print(f"{'Removed' if was_enabled else 'There was no'} {file}.")
    return 0
