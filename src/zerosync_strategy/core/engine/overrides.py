"""The methods of DeepSpeed's parameter coordinator that ZeroSync overrides (``interpose.py``)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


class CoordinatorOverrides:
    """Overrides of the coordinator: the order of gathers, and what is released.

    ``_zerosync_parameters`` has the scheduler and the cache of its module (``params/of_module.py``).
    """

    _zerosync_parameters: Any

    def fetch_sub_module(self, current_submodule: Any, forward: bool) -> None:
        parameters = self._zerosync_parameters
        parameters.cache.fetching(current_submodule)
        parameters.scheduler.module_begins(current_submodule, forward)
        super().fetch_sub_module(current_submodule, forward)  # type: ignore[misc]
        parameters.scheduler.module_fetched(current_submodule)

    def release_sub_module(self, submodule: Any, *args: Any, **kwargs: Any) -> None:
        super().release_sub_module(submodule, *args, **kwargs)  # type: ignore[misc]
        self._zerosync_parameters.scheduler.module_ends(submodule)

    def _invalidate_trace(self) -> None:
        super()._invalidate_trace()  # type: ignore[misc]
        self._zerosync_parameters.cache.release_memo.cache_clear()

    def reset_step(self) -> None:
        self._zerosync_parameters.scheduler.compare_aborted()
        if not self._zerosync_parameters.cache.has_no_order:
            super().reset_step()  # type: ignore[misc]

    def release_and_reset_all(self, module: Any) -> None:
        with self._zerosync_parameters.cache.releasing_all():
            super().release_and_reset_all(module)  # type: ignore[misc]

    # One leading underscore: methods that are private to DeepSpeed's class, under the names that Python gives them.

    def _PartitionedParameterCoordinator__all_gather_params(self, params: Iterable[Any], forward: bool) -> None:
        stock = super()._PartitionedParameterCoordinator__all_gather_params  # type: ignore[misc]
        parameters = self._zerosync_parameters
        parameters.scheduler.issue(parameters.units.completed(params), lambda of_group: stock(of_group, forward))

    def _PartitionedParameterCoordinator__release_param(self, param: Any, free_data: bool = True) -> None:
        if not free_data or not self._zerosync_parameters.cache.release(param):
            super()._PartitionedParameterCoordinator__release_param(param, free_data)  # type: ignore[misc]


class InferenceOverrides:
    """Overrides of what gathers ZeRO-3 parameters where there is no optimizer."""

    def _restore_from_bit16_weights(self) -> None:
        """Does nothing: DeepSpeed 0.19.8 asks for it, and only an optimizer has it."""
