"""``python -m MODULE ...`` in a fork of this process, which has imported what takes an interpreter seconds."""

import os
import runpy
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any, NoReturn

import pytest

from tests.harness.ranks import redirect_log_handlers

_ENDED_BADLY = 1


def fork_instead(monkeypatch: pytest.MonkeyPatch, *modules: ModuleType) -> None:
    """Let what these modules start by ``subprocess.Popen`` be forks of this process."""
    for module in modules:
        monkeypatch.setattr(module, "subprocess", SimpleNamespace(**{**vars(subprocess), "Popen": forked}))


def forked(command: Sequence[str], *, env: Mapping[str, str], **options: Any) -> "subprocess.Popen[Any]":
    """As ``subprocess.Popen``, for a command ``[python, ..., "-m", module, *arguments]``."""
    module = command.index("-m") + 1

    def run() -> NoReturn:
        status: Any = _ENDED_BADLY
        try:
            os.closerange(3, os.sysconf("SC_OPEN_MAX"))  # among them the pipe that says Popen when the command begins
            os.environ.clear()
            os.environ.update(env)
            sys.stdin, sys.stdout, sys.stderr = (
                os.fdopen(fd, mode, buffering=1, errors="replace", closefd=False) for fd, mode in enumerate("rww")
            )
            redirect_log_handlers()
            tempfile.tempdir = None  # which TMPDIR says anew
            sys.argv = list(command[module:])
            runpy.run_module(command[module], run_name="__main__", alter_sys=True)
            status = 0
        except SystemExit as end:
            status = end.code or 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status if isinstance(status, int) else _ENDED_BADLY)

    return subprocess.Popen(command, preexec_fn=run, restore_signals=False, **options)
