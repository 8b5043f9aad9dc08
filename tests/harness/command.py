"""The command ``zerosync`` in this process, which has imported what an interpreter would import for seconds."""

import contextlib
import io
import signal
from typing import NamedTuple

from zerosync_strategy.tools.cli import main


class Done(NamedTuple):
    status: int
    stdout: str
    stderr: str


def command(*arguments: str) -> Done:
    stdout, stderr, status = io.StringIO(), io.StringIO(), 0
    handler = signal.getsignal(signal.SIGTERM)  # the command has its own
    try:
        with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
            main(arguments)
    except SystemExit as end:
        assert end.code is None or isinstance(end.code, int), end.code
        status = end.code or 0
    finally:
        signal.signal(signal.SIGTERM, handler)
    return Done(status, stdout.getvalue(), stderr.getvalue())
