"""``python -m zerosync_strategy`` is the command ``zerosync``."""

from zerosync_strategy.tools.cli import main

main()
