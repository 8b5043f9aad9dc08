"""``python -m zerosync_strategy`` is the command ``zerosync``."""

from zerosync_strategy.cli import main

main()
