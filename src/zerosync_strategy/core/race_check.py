"""The part of one engine in the race check of this process (option ``racecheck``)."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from zerosync_strategy.core.engine import contract, torch_internals

if TYPE_CHECKING:
    from zerosync_strategy.racecheck.checker import Finding
    from zerosync_strategy.racecheck.in_place import InPlaceCheck

_members: weakref.WeakSet[RaceCheckMember] = weakref.WeakSet()  # of all attached engines
_check: InPlaceCheck | None = None  # of all of them, while one asks for it


class RaceCheckMember:
    """One attached engine, whose first steps are checked or that only runs beside such engines.

    Args:
        steps: first optimizer steps to check; 0: the engine asks for no check.
        device_changed: makes the engine's streams anew; the check calls it when it starts and when it ends.

    Raises:
        ValueError, RuntimeError: the check cannot run in this process.
    """

    def __init__(self, steps: int, device_changed: Callable[[], None]) -> None:
        self._steps = steps
        self.device_changed = device_changed
        self._check = _check_for(steps)

    @property
    def is_checked(self) -> bool:
        return self._check is not None

    @property
    def findings(self) -> list[Finding] | None:
        """What was found until now on this rank; ``None`` where this engine is not checked."""
        return None if self._check is None else self._check.findings

    def join(self) -> None:
        """The engine is attached. The first that asks for a check starts it, for the other engines too."""
        if self._check is not None:
            for other in [] if self._check.running else _members:
                self._check.join(other, 0)
            self._check.join(self, self._steps)
        _members.add(self)

    def stepped(self) -> None:
        """The engine has taken an optimizer step."""
        if self._check is not None:
            self._check.stepped(self)

    def leave(self, reason: str) -> None:
        """Check no further step of this engine, and report if it was the last. Does nothing twice."""
        if self._check is not None:
            self._check.leave(self, reason)

    def detach(self) -> None:
        """The engine is detached."""
        self.leave("the engine was detached")
        _members.discard(self)


def verify(on_cuda: bool) -> None:
    """Check that torch has what the check uses.

    Raises:
        ContractError: it has not.
    """
    contract.require(torch_internals.RACE_CHECK)
    if on_cuda:
        contract.require(torch_internals.RACE_CHECK_ON_CUDA)


def _check_for(steps: int) -> InPlaceCheck | None:
    """Return the check that an engine takes part in: because it asks for one, or because one runs."""
    global _check
    if _check is not None and _check.running:
        return _check
    if not steps:
        return None
    verify(torch.cuda.is_available())
    from zerosync_strategy.racecheck.in_place import InPlaceCheck  # only now: no other training needs it

    _check = InPlaceCheck()
    return _check
