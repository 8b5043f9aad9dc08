"""The methods of DeepSpeed's objects that ZeroSync overrides, and what they call instead.

Each class here is interposed before DeepSpeed's own (``interpose.py``) and holds no state: it passes the call on to an
object that implements the protocol above it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, Protocol


class GatherHooks(Protocol):
    """What schedules the gathers of a ZeRO-3 engine."""

    def issue(self, params: Iterable[Any], gather: Callable[[list[Any]], None]) -> None:
        """Call ``gather`` for parts of ``params``, each of one process group."""

    def module_begins(self, module: Any, forward: bool) -> None:
        """The forward of ``module`` begins, or a backward comes to it."""

    def module_fetched(self, module: Any) -> None:
        """The parameters of ``module`` are there, for the current stream to use."""

    def module_ends(self, module: Any) -> None:
        """The forward of ``module`` has ended, or a backward has passed it."""


class GatherOverrides:
    """Overrides of DeepSpeed's parameter coordinator: the order of gathers."""

    _zerosync_gathers: GatherHooks

    def fetch_sub_module(self, current_submodule: Any, forward: bool) -> None:
        self._zerosync_gathers.module_begins(current_submodule, forward)
        super().fetch_sub_module(current_submodule, forward)  # type: ignore[misc]
        self._zerosync_gathers.module_fetched(current_submodule)

    def release_sub_module(self, submodule: Any, *args: Any, **kwargs: Any) -> None:
        super().release_sub_module(submodule, *args, **kwargs)  # type: ignore[misc]
        self._zerosync_gathers.module_ends(submodule)

    # One leading underscore: a method that is private to DeepSpeed's class, under the name that Python gives it.
    def _PartitionedParameterCoordinator__all_gather_params(self, params: Iterable[Any], forward: bool) -> None:
        stock = super()._PartitionedParameterCoordinator__all_gather_params  # type: ignore[misc]
        self._zerosync_gathers.issue(params, lambda of_group: stock(of_group, forward))


class ReleaseHooks(Protocol):
    """What keeps parameters of a ZeRO-3 engine gathered."""

    @property
    def has_no_order(self) -> bool:
        """Whether DeepSpeed gathers for no module, and so need not compare over the ranks in which order they run."""

    def order_forgotten(self) -> None:
        """DeepSpeed records anew in which order modules run."""

    def fetching(self, module: Any) -> None:
        """The parameters of ``module`` are about to be gathered."""

    def release(self, param: Any) -> bool:
        """Release ``param`` if nothing uses it, or keep it. Return whether DeepSpeed has nothing left to do."""

    def releasing_all(self) -> AbstractContextManager[None]:
        """Around the release of all parameters, of which none is kept."""


class ReleaseOverrides:
    """Overrides of DeepSpeed's parameter coordinator: what is released."""

    _zerosync_releases: ReleaseHooks

    def _invalidate_trace(self) -> None:
        super()._invalidate_trace()  # type: ignore[misc]
        self._zerosync_releases.order_forgotten()

    def reset_step(self) -> None:
        if not self._zerosync_releases.has_no_order:
            super().reset_step()  # type: ignore[misc]

    def fetch_sub_module(self, current_submodule: Any, forward: bool) -> None:
        self._zerosync_releases.fetching(current_submodule)
        super().fetch_sub_module(current_submodule, forward)  # type: ignore[misc]

    def release_and_reset_all(self, module: Any) -> None:
        with self._zerosync_releases.releasing_all():
            super().release_and_reset_all(module)  # type: ignore[misc]

    # One leading underscore: a method that is private to DeepSpeed's class, under the name that Python gives it.
    def _PartitionedParameterCoordinator__release_param(self, param: Any, free_data: bool = True) -> None:
        if not free_data or not self._zerosync_releases.release(param):
            super()._PartitionedParameterCoordinator__release_param(param, free_data)  # type: ignore[misc]


class InferenceOverrides:
    """Overrides of what gathers ZeRO-3 parameters where there is no optimizer."""

    def _restore_from_bit16_weights(self) -> None:
        """Does nothing: DeepSpeed 0.19.8 asks for it, and only an optimizer has it."""
