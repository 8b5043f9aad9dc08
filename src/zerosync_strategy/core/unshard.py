"""ZeRO-3: parameters gathered once and held over the window, up to a budget of bytes.

DeepSpeed releases a parameter after each use and gathers it again for the next: at every micro-batch, though its values
change only in the optimizer step. A held parameter stays, and DeepSpeed's own step releases it, so that the next window
gathers the new values.

What is held is what saves most bytes per byte held: all of it if the budget allows, else what the first window gathered
most often.

A stale memo is cured on the way. DeepSpeed 0.19.8 remembers what to release after each module, keyed by the module's
place in the recorded order, and keeps that memory when the order is recorded anew: after a validation before the first
backward, it releases every parameter after each forward for good and gathers it again for the backward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from zerosync_strategy.core import contract
from zerosync_strategy.core.interpose import interpose, restore

_HELD = "zerosync"  # a name among the modules that use a parameter; DeepSpeed's are integers


class HeldParameters:
    """Keeps parameters of a ZeRO-3 optimizer gathered from their first use in a window to the optimizer step.

    Args:
        optimizer: the ZeRO-3 optimizer.
        budget: bytes of gathered parameters to hold beyond DeepSpeed's own persistent ones; ``None``: no limit.

    Attributes:
        peak_bytes: the most bytes held at once since the last :meth:`end_window`.
        releases: DeepSpeed's memo of what to release after which module.
    """

    def __init__(self, optimizer: Any, budget: int | None) -> None:
        self._budget = budget
        self._chosen: set[int] | None = None  # ds_id; unknown until the first window was seen, unless all are held
        self._gathers: Counter[Any] = Counter()
        self._held: dict[int, Any] = {}
        self.peak_bytes = 0
        self._coordinator = contract.stage_3_coordinator(optimizer)
        self.releases = contract.stage_3_release_cache(self._coordinator)
        self._coordinator._zerosync_held = self
        interpose(self._coordinator, _CoordinatorMethods)

    @classmethod
    def of(cls, optimizer: Any, budget: int | None) -> HeldParameters:
        """Those of ``optimizer``; engines over one module have one in common, with the budget of the first."""
        coordinator = contract.stage_3_coordinator(optimizer)
        return getattr(coordinator, "_zerosync_held", None) or cls(optimizer, budget)

    def detach(self) -> None:
        """Stop holding; what is gathered now is released by DeepSpeed as it always was."""
        if isinstance(self._coordinator, _CoordinatorMethods):
            restore(self._coordinator)
            del self._coordinator._zerosync_held

    def end_window(self, params: Iterable[Any]) -> None:
        """A step has released ``params``."""
        for param in params:
            self._held.pop(param.ds_id, None)
        self.peak_bytes = 0
        if self._chosen is None and self._budget is not None and self._gathers:
            self._chosen = self._choose(self._budget)

    def _choose(self, budget: int) -> set[int]:
        chosen, free = set(), budget
        # The order must be the same on all ranks; ds_id is.
        by_saving = sorted(
            self._gathers.items(), key=lambda item: (-item[1], -contract.stage_3_bytes(item[0]), item[0].ds_id)
        )
        for param, gathers in by_saving:
            if gathers > 1 and contract.stage_3_bytes(param) <= free:
                chosen.add(param.ds_id)
                free -= contract.stage_3_bytes(param)
        return chosen

    def fetched(self, params: list[Any]) -> None:
        """These are about to be used; count those that are not there."""
        if self._chosen is None:
            self._gathers.update(param for param in params if param.ds_status.name != "AVAILABLE")

    def holds(self, param: Any) -> bool:
        """Whether ``param`` stays gathered from its first use in this window to the step."""
        return self._budget is None or (self._chosen is not None and param.ds_id in self._chosen)

    @contextmanager
    def keeping(self, params: list[Any]) -> Iterator[None]:
        """Around a release by DeepSpeed: those of ``params`` that are to be held, and those held already, stay."""
        for param in params:
            if self.holds(param) and not param.ds_persist and param.ds_status.name == "AVAILABLE":
                self._held[param.ds_id] = param
        held = list(self._held.values())
        self.peak_bytes = max(self.peak_bytes, sum(map(contract.stage_3_bytes, held)))
        for param in held:
            param.ds_active_sub_modules.add(_HELD)
        try:
            yield
        finally:
            # Not left behind: others, GatheredParameters for one, may release a parameter that is in no use.
            for param in held:
                param.ds_active_sub_modules.discard(_HELD)


class _CoordinatorMethods:
    """What DeepSpeed's parameter coordinator does differently."""

    _zerosync_held: HeldParameters

    def _invalidate_trace(self) -> None:
        super()._invalidate_trace()  # type: ignore[misc]
        self._zerosync_held.releases.cache_clear()

    def fetch_sub_module(self, current_submodule: Any, forward: bool) -> None:
        self._zerosync_held.fetched(contract.stage_3_parameters_of(current_submodule))
        super().fetch_sub_module(current_submodule, forward)  # type: ignore[misc]

    def release_sub_module(self, submodule: Any, forward: bool = False) -> None:
        with self._zerosync_held.keeping(contract.stage_3_parameters_of(submodule)):
            super().release_sub_module(submodule, forward)  # type: ignore[misc]

    def release_backward_leftovers(self) -> None:
        # Modules whose inputs need no gradient; their parameters are released at the end of the backward.
        with self._zerosync_held.keeping([]):
            super().release_backward_leftovers()  # type: ignore[misc]
