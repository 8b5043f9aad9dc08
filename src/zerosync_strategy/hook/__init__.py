"""ZeroSync in programs that do not import it: what ``zerosync run`` makes Python do at its start.

``site/`` is a folder of ``sys.path``, and imports nothing of this package; ``loaded.py`` is imported once a program has
imported Accelerate or DeepSpeed.
"""

from __future__ import annotations

from pathlib import Path

SITE = Path(__file__).parent / "site"
"""The folder with the modules that Python imports at its start."""
