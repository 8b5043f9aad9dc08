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
    app(_with_all(arguments), prog_name="zerosync")


def _with_all(arguments: Sequence[str]) -> list[str]:
    """Give ``--gpus`` the value ``all`` where no number follows; typer has no options whose value may be left out."""
    following = [*arguments[1:], ""]
    given = [
        [word, "all"] if word == "--gpus" and not after.isdecimal() and after != "all" else [word]
        for word, after in zip(arguments, following, strict=True)
    ]
    return [word for words in given for word in words]
