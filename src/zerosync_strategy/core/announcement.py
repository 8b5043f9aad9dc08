"""What a run says by itself: lines of the logger ``zerosync_strategy``, and notes for ``zerosync run``."""

from __future__ import annotations

import logging
import os
from contextlib import suppress

NOTES = "ZEROSYNC_RUN_NOTES"
"""Environment variable: the file in which ``zerosync run`` looks for what was attached to."""
ATTACHED = "attached to"

_logger = logging.getLogger("zerosync_strategy")


def say(text: str) -> None:
    """Log ``text`` with level INFO, which is printed unless the program has set the logger's level or handlers."""
    if _logger.level == logging.NOTSET:
        _logger.setLevel(logging.INFO)
    if not _logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("ZeroSync: %(message)s"))
        _logger.addHandler(handler)
    _logger.info(text)


def note(text: str) -> None:
    """Note ``text`` down for ``zerosync run``, if it has started this process. The first rank of a node does so."""
    file = os.environ.get(NOTES)
    if file and os.environ.get("LOCAL_RANK", "0") == "0":
        with suppress(OSError), open(file, "r+") as lines:  # on another node there is none
            lines.seek(0, os.SEEK_END)
            lines.write(f"{text}\n")
