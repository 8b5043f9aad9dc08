"""Output: lines of the logger ``zerosync_strategy``, and notes for ``zerosync run``."""

from __future__ import annotations

import logging
import os
import sys
from contextlib import suppress
from typing import Any

NOTES = "ZEROSYNC_RUN_NOTES"
"""Environment variable: the file to which processes write, for ``zerosync run``, what ZeroSync has attached to."""
ATTACHED = "attached to"
REPORT = "ZEROSYNC_REPORT"
"""Environment variable: ``N``, or ``N:FILE``; overrides the options ``report_every`` and ``report_file``."""

_logger = logging.getLogger("zerosync_strategy")


class _AboveProgressBars(logging.Handler):
    """Prints to stderr, on lines above the progress bars of tqdm."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            tqdm: Any = sys.modules.get("tqdm")
            text = self.format(record)
            print(text, file=sys.stderr, flush=True) if tqdm is None else tqdm.tqdm.write(text, file=sys.stderr)
        except Exception:
            self.handleError(record)


def say(text: str) -> None:
    """Log ``text`` with level INFO; it is printed unless the program has set the logger's level or handlers."""
    if _logger.level == logging.NOTSET:
        _logger.setLevel(logging.INFO)
    if not _logger.hasHandlers():
        handler = _AboveProgressBars()
        handler.setFormatter(logging.Formatter("ZeroSync: %(message)s"))
        _logger.addHandler(handler)
    _logger.info(text)


def note(text: str) -> None:
    """Write ``text`` for ``zerosync run``, if it has started this process. Only the first rank of a node does."""
    file = os.environ.get(NOTES)
    if file and os.environ.get("LOCAL_RANK", "0") == "0":
        with suppress(OSError), open(file, "r+") as lines:  # on another node the file does not exist
            lines.seek(0, os.SEEK_END)
            lines.write(f"{text}\n")
