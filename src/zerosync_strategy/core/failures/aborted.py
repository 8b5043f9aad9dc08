"""What ranks have begun to send when a backward was aborted must not meet what they send next (W3).

Off NCCL, tags tell them apart. NCCL matches collectives by their order alone: ranks that have aborted after different
numbers of them would add up gradients of different windows, or take these for parameters. So they compare the numbers
through the store, once, before they send anything else, by six requests of each rank at most, however long some rank
takes. Where nothing was aborted, nothing is sent or waited for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from datetime import timedelta
from itertools import count
from typing import Any

import torch.distributed as dist

from zerosync_strategy.core.comm.collectives import timeout_of
from zerosync_strategy.core.failures.errors import RankError

_numbers = count()


class BegunCollectives:
    """The reductions and gathers that this rank has begun in a window, to compare with the others' if it aborts it.

    All ranks make as many of these objects, in one order.
    """

    def __init__(self, process_groups: Iterable[Any]) -> None:
        self._name = next(_numbers)
        self._groups = list(dict.fromkeys(process_groups))
        self._expected = False  # from here on, another rank may have begun some
        self._begun: Counter[Any] = Counter()  # by process group
        self._aborted: Counter[Any] | None = None  # those of an aborted window, until they are compared
        self._compared = 0

    def expect(self) -> None:
        """Ranks may begin some from here on, or have, and not all the same."""
        self._expected = True

    def add(self, process_group: Any) -> None:
        """This rank begins one, which may be the first after an aborted window (:meth:`compare_aborted`)."""
        if self._aborted is not None:
            self.compare_aborted()
        self._begun[process_group] += 1

    def close(self) -> None:
        """The window ends with all of them complete."""
        self._expected = False
        self._begun.clear()

    def abort(self) -> None:
        """The window ends anywhere."""
        if self._expected and self._aborted is None:
            self._aborted = self._begun.copy()
        self.close()

    def compare_aborted(self) -> None:
        """Before the first collective after an aborted window: nothing of that one may meet it. A collective call.

        A ``RankError``: the numbers differ, or not all ranks have aborted within the timeout of a group.
        """
        if self._aborted is None:
            return
        begun, self._aborted = self._aborted, None
        self._compared += 1
        for group in self._groups:
            _require_same(f"zerosync/aborted/{self._name}/{self._compared}", begun[group], group)


def _require_same(window: str, begun: int, process_group: Any) -> None:
    group: Any = process_group or dist.group.WORLD
    size, timeout = dist.get_world_size(group), timeout_of(group).total_seconds()
    store: Any = dist.distributed_c10d._get_default_store()
    key = f"{window}/{group.group_name}"
    store.add(f"{key}/{begun}", 1)
    arrived = store.add(key, 1)
    if arrived == size:
        store.set(f"{key}/all", "")
    else:
        with suppress(dist.DistStoreError):  # the time is over
            store.clone().wait([f"{key}/all"], timedelta(seconds=timeout))  # a connection that nobody else waits for
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
