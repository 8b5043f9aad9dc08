"""The end of a program, in a rank, which is a fork and ends otherwise."""

import atexit
import contextlib
import logging
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def ending() -> Iterator[None]:
    """At its end, what an interpreter does first at its own: wait for threads, and call what is registered for it."""
    atexit._clear()  # what the process that this is a fork of has for its own end, and for its log
    logging.root.handlers.clear()
    yield
    threading._shutdown()
    atexit._run_exitfuncs()
