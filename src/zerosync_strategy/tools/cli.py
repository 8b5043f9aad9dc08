"""The command ``zerosync``. ``run`` and ``--version`` need no extra, the others ``cli``."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from zerosync_strategy.version import __version__


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command with ``arguments``, by default the process's own, and exit with its status.

    Raises:
        SystemExit: always, except after ``--version``.
    """
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if arguments == ["--version"]:
        print(f"zerosync {__version__}")
        return
    if arguments[:1] == ["run"]:
        from zerosync_strategy.tools import run

        run.main(arguments[1:])
    try:
        from zerosync_strategy.tools.commands import app
    except ImportError as missing:
        raise SystemExit(
            f"zerosync {' '.join(arguments[:1])} needs the package {missing.name!r}, which is not installed:"
            " pip install 'zerosync-strategy[cli]'"
        ) from None
    app(list(arguments), prog_name="zerosync")
