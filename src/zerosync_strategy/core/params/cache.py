"""ZeRO-3: parameters gathered once and held over the window, up to a budget of bytes.

DeepSpeed releases a parameter after each use and gathers it again for the next: at every micro-batch, though its values
change only in the optimizer step. A held parameter stays, and DeepSpeed's own step releases it, so that the next window
gathers the new values. Which are held: all if the budget allows, else those that save most bytes per byte held, which
are those that the first window gathered most often.

The cache also cures a stale memo. DeepSpeed 0.19.8 remembers what to release after each module, by the module's place
in the recorded order, and keeps that when the order is recorded anew: after a validation before the first backward, it
releases every parameter after each forward for good and gathers it again for the backward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from zerosync_strategy.core.engine import shared, zero3
from zerosync_strategy.core.engine.interpose import interpose, restore
from zerosync_strategy.core.engine.overrides import ReleaseOverrides

_USER = "zerosync"  # a name among the modules that use a parameter; DeepSpeed's are integers


class ParameterCache:
    """Keeps parameters of a ZeRO-3 optimizer gathered from their first use in a window to the optimizer step.

    Args:
        optimizer: the ZeRO-3 optimizer.
        budget: bytes of gathered parameters to hold beyond DeepSpeed's own persistent ones; ``None``: no limit.

    Attributes:
        peak_bytes: the most bytes held at once since the last :meth:`end_window`.
        release_memo: DeepSpeed's memo of what to release after which module.
    """

    def __init__(self, optimizer: Any, budget: int | None) -> None:
        self._budget = budget
        self._chosen: set[int] | None = None  # unknown until the first window has ended, unless all are held
        self._gathers: Counter[Any] = Counter()
        self._held: dict[int, Any] = {}
        self.peak_bytes = self._held_bytes = 0
        self._coordinator = zero3.coordinator(optimizer)
        self.release_memo = zero3.release_cache(self._coordinator)
        self._coordinator._zerosync_releases = self
        interpose(self._coordinator, ReleaseOverrides)

    @classmethod
    def of(cls, optimizer: Any, budget: int | None) -> ParameterCache:
        """Return the cache of this optimizer; engines over one module share one, with the budget of the first."""
        return shared.acquire(zero3.coordinator(optimizer), "cache", lambda: cls(optimizer, budget))

    def detach(self) -> None:
        """The engine needs the cache no longer. With the last, DeepSpeed releases parameters as it always did."""
        if shared.release(self._coordinator, "cache"):
            restore(self._coordinator, ReleaseOverrides)
            del self._coordinator._zerosync_releases

    def end_window(self, params: Iterable[Any]) -> None:
        """A step has released ``params``."""
        for param in params:
            if self._held.pop(zero3.param_id(param), None) is not None:
                self._held_bytes -= zero3.full_bytes(param)
        self.peak_bytes = 0
        if self._chosen is None and self._budget is not None and self._gathers:
            self._chosen = self._choose(self._budget)

    def _choose(self, budget: int) -> set[int]:
        chosen, free = set(), budget
        # The order must be the same on all ranks; ids are.
        by_saving = sorted(
            self._gathers.items(), key=lambda item: (-item[1], -zero3.full_bytes(item[0]), zero3.param_id(item[0]))
        )
        for param, gathers in by_saving:
            if gathers > 1 and zero3.full_bytes(param) <= free:
                chosen.add(zero3.param_id(param))
                free -= zero3.full_bytes(param)
        return chosen

    def holds(self, param: Any) -> bool:
        """Return whether ``param`` stays gathered from its first use in this window to the step."""
        return self._budget is None or (self._chosen is not None and zero3.param_id(param) in self._chosen)

    # ---- what DeepSpeed's coordinator calls ----------------------------------------------------------------------

    def order_forgotten(self) -> None:
        self.release_memo.cache_clear()

    def fetching(self, module: Any) -> None:
        if self._chosen is None:
            self._gathers.update(param for param in zero3.parameters_of(module) if not zero3.is_gathered(param))

    @contextmanager
    def releasing(self, module: Any | None) -> Iterator[None]:
        if self._chosen is not None and not self._chosen:
            yield  # nothing is held
            return
        if module is None:
            kept = list(self._held.values())
        else:
            kept = [param for param in zero3.released_with(module) if self._holds_now(param)]
        with zero3.kept_from_release(kept, _USER):
            yield

    def _holds_now(self, param: Any) -> bool:
        number = zero3.param_id(param)
        if number not in self._held:
            if not self.holds(param) or zero3.is_persistent(param) or not zero3.is_gathered(param):
                return False
            self._held[number] = param
            self._held_bytes += zero3.full_bytes(param)
            self.peak_bytes = max(self.peak_bytes, self._held_bytes)
        return True
