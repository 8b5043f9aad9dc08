"""The option ``racecheck``: the engines of this process, and the checker that follows their first steps.

The checker is a tool beside training. Core knows its contract, :class:`StepCheck`, and the name of the class that keeps
it, which is loaded for the first engine that asks for a check and not before.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from importlib import import_module
from typing import Any, Protocol

import torch

from zerosync_strategy.core.engine import contract, torch_internals

CHECKER = "zerosync_strategy.tools.racecheck.in_place", "InPlaceCheck"


class StepCheck(Protocol):
    """One check of all engines of this process: from the first that joins until each has taken its steps, or left.

    Made without arguments; ``ValueError`` or ``RuntimeError`` where it cannot run. Where a check replaces the device,
    it calls ``device_changed()`` of every engine when the engine joins and when the check ends.

    Attributes:
        running: whether it has started, and not ended.
        findings: what was found until now, in the checker's own type.
    """

    running: bool

    @property
    def findings(self) -> list[Any]: ...

    def join(self, engine: CheckedEngine, steps: int) -> None:
        """Check that many ``steps`` of ``engine``; with 0 it only runs beside. The first starts the check."""

    def stepped(self, engine: CheckedEngine) -> None:
        """Count an optimizer step of ``engine``. Report and end with the last that was to be checked."""

    def leave(self, engine: CheckedEngine, reason: str) -> None:
        """Check no further step of ``engine``. Report and end if it was the last. Does nothing twice."""


class CheckedEngine:
    """The part of one attached engine, whose first steps are checked or that only runs beside such engines.

    Args:
        steps: first optimizer steps to check; 0: the engine asks for no check.
        device_changed: makes the engine's streams anew.

    Raises:
        ValueError, RuntimeError: the check cannot run in this process.
        ContractError: torch lacks what the check uses.
    """

    def __init__(self, steps: int, device_changed: Callable[[], None]) -> None:
        self._steps = steps
        self.device_changed = device_changed
        self._check = _check_for(steps)

    @property
    def is_checked(self) -> bool:
        return self._check is not None

    @property
    def findings(self) -> list[Any] | None:
        """What was found until now on this rank; ``None`` where this engine is not checked."""
        return None if self._check is None else self._check.findings

    def join(self) -> None:
        """The engine is attached. The first that asks for a check starts it, for the other engines too."""
        if self._check is not None:
            for other in [] if self._check.running else _engines:
                self._check.join(other, 0)
            self._check.join(self, self._steps)
        _engines.add(self)

    def stepped(self) -> None:
        if self._check is not None:
            self._check.stepped(self)

    def leave(self, reason: str) -> None:
        if self._check is not None:
            self._check.leave(self, reason)

    def detach(self) -> None:
        self.leave("the engine was detached")
        _engines.discard(self)


_engines: weakref.WeakSet[CheckedEngine] = weakref.WeakSet()  # all that are attached
_check: StepCheck | None = None  # of all of them, while one asks for it


def verify(on_cuda: bool) -> None:
    """Check that torch has what the check uses; raise a ``ContractError`` if not."""
    contract.require(torch_internals.RACE_CHECK)
    if on_cuda:
        contract.require(torch_internals.RACE_CHECK_ON_CUDA)


def _check_for(steps: int) -> StepCheck | None:
    """Return the check that an engine takes part in: because it asks for one, or because one runs."""
    global _check
    if _check is not None and _check.running:
        return _check
    if not steps:
        return None
    verify(torch.cuda.is_available())
    module, name = CHECKER
    _check = getattr(import_module(module), name)()
    return _check
