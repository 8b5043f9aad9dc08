"""Collectives begun before a backward was aborted must not match collectives of the next window (W3).

Off NCCL, tags distinguish messages. NCCL matches collectives by their order alone: ranks that abort after different
numbers of collectives would sum gradients of different windows, or take gradients for parameters. So the ranks compare
these numbers through the store, once, before they send anything else. Each rank makes at most six requests, however
long another rank takes. If nothing was aborted, nothing is sent or waited for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from zerosync_strategy.core.comm.collectives import new_name, timeout_of
from zerosync_strategy.core.failures.errors import RankError


class BegunCollectives:
    """Counts the reductions and gathers that this rank begins in a window, for a comparison if the window is aborted.

    Collective over each of the groups.
    """

    def __init__(self, process_groups: Iterable[Any]) -> None:
        self._names = {group: new_name(group) for group in dict.fromkeys(process_groups)}
        self._expected = False  # a rank may have begun some in this window
        self._begun: Counter[Any] = Counter()  # by process group
        self._aborted: Counter[Any] | None = None  # counts of an aborted window, until they are compared
        self._compared = 0

    def expect(self) -> None:
        """Expect collectives in this window: ranks may have begun different numbers when it is aborted."""
        self._expected = True

    def add(self, process_group: Any) -> None:
        """Count a collective that this rank begins; after an aborted window, :meth:`compare_aborted` first."""
        if self._aborted is not None:
            self.compare_aborted()
        self._begun[process_group] += 1

    def close(self) -> None:
        """End the window, with all collectives complete."""
        self._expected = False
        self._begun.clear()

    def abort(self) -> None:
        """End the window at any point."""
        if self._expected and self._aborted is None:
            self._aborted = self._begun.copy()
        self.close()

    def compare_aborted(self) -> None:
        """Compare the counts of an aborted window, before the first collective of the next one. Collective.

        Raises a ``RankError`` if the counts differ, or if not all ranks have aborted within the timeout of a group.
        """
        if self._aborted is None:
            return
        begun, self._aborted = self._aborted, None
        self._compared += 1
        for group, name in self._names.items():
            _require_same(f"zerosync/aborted/{name}/{self._compared}", begun[group], group)


def _require_same(key: str, begun: int, process_group: Any) -> None:
    group: Any = process_group or dist.group.WORLD
    size, timeout = dist.get_world_size(group), timeout_of(group).total_seconds()
    store: Any = dist.distributed_c10d._get_default_store()
    store.add(f"{key}/{begun}", 1)
    arrived = store.add(key, 1)
    if arrived == size:
        store.set(f"{key}/all", "")
    else:
        with suppress(dist.DistStoreError):  # timed out
            store.clone().wait([f"{key}/all"], timedelta(seconds=timeout))  # a connection of its own, as it blocks
        arrived = store.add(key, 0)
    others = size - store.add(f"{key}/{begun}", 0)
    if others == 0:
        return
    found = f"{others} of {size} ranks after another number of them"
    if arrived < size:
        found = f"only {arrived} of {size} ranks have done so within {timeout:g} s"
    raise RankError(
        f"A backward was aborted after this rank had begun {begun} collective(s), and {found}. What is begun"
        " cannot be taken back, and would meet those of the next window. Go back to the last checkpoint in new"
        " processes. With coalesce=True and overlap_last=False, nothing is reduced before the step, and under ZeRO-3"
        " with param_memory_budget='all', nothing is gathered in a backward: an exception in it leaves nothing behind."
    )
