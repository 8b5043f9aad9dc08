"""Python imports this at its start in what ``zerosync run`` has started, by ``PYTHONPATH``."""

import sys

_folder = __file__.rpartition("/")[0]
sys.path[:] = [
    place for place in sys.path if place.rstrip("/") != _folder
]  # PYTHONPATH adds it again in child processes
sys.path.insert(0, _folder)
try:
    import zerosync_hook
finally:
    sys.path.remove(_folder)
zerosync_hook.install()

del sys.modules["sitecustomize"]
import sitecustomize  # noqa: E402, F401  the environment's own, hidden by this file; Python ignores that it is missing
