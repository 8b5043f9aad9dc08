"""Waits for a program to import Accelerate, DeepSpeed or Lightning. Runs at the start of every Python process.

It imports ``sys`` alone, and nothing of ``zerosync_strategy`` before the program has imported one of them.
"""

import sys


class _Finder:
    """The first finder of ``sys.meta_path``. It finds nothing itself."""

    def __init__(self):
        lightning = ("lightning.fabric", "lightning.pytorch", "lightning_fabric", "pytorch_lightning")
        self._awaited = {"accelerate", "deepspeed", *(f"{package}.strategies" for package in lightning)}
        self._finding = False

    def find_spec(self, name, path=None, target=None):
        if name not in self._awaited or self._finding:
            return None
        self._finding = True
        try:
            specs = (finder.find_spec(name, path, target) for finder in list(sys.meta_path) if finder is not self)
            spec = next(filter(None, specs), None)
        finally:
            self._finding = False
        execute = getattr(getattr(spec, "loader", None), "exec_module", None)
        if execute is not None:

            def exec_module(module):
                execute(module)
                if name in self._awaited:
                    self._awaited.discard(name)
                    self._loaded(name)

            spec.loader.exec_module = exec_module  # an instance attribute; the loader loads this module only
        return spec

    def _loaded(self, name):
        try:
            from zerosync_strategy.hook import loaded
        except ImportError:
            return  # this Python has another environment
        loaded.loaded(name)


def install():
    """Install the finder."""
    sys.meta_path.insert(0, _Finder())
