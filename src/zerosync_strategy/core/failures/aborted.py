"""What ranks have begun to send when a backward was aborted must not meet what they send next (W3).

Off NCCL, tags tell them apart. NCCL matches collectives by their order alone. So ranks that have aborted after
different numbers of them would add up gradients of different windows. They compare the numbers through the store, once,
before they send anything else; nothing is sent or waited for where nothing was aborted.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from zerosync_strategy.core.comm.collectives import timeout_of
from zerosync_strategy.core.failures.errors import RankError

_POLL = 0.02  # seconds


class BegunReductions:
    """The reductions that this rank has begun in a window, and has to compare with the others' if it aborts it.

    Args:
        name: of what reduces, the same on all ranks.
        process_groups: in which it does.
    """

    def __init__(self, name: str, process_groups: Iterable[Any]) -> None:
        self._name = name
        self._groups = list(dict.fromkeys(process_groups))
        self._expected = False  # from here on, another rank may have begun some
        self._begun: Counter[Any] = Counter()  # by process group
        self._aborted: Counter[Any] | None = None  # those of an aborted window, until they are compared
        self._compared = 0

    def expect(self) -> None:
        """Ranks may begin reductions from here on."""
        self._expected = True

    def add(self, process_group: Any) -> None:
        """This rank has begun one."""
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
        """Before the first reduction after an aborted window: nothing of that one may meet it. A collective call.

        Raises:
            RankError: the numbers differ, or not all ranks have aborted within the timeout of a group.
        """
        if self._aborted is None:
            return
        begun, self._aborted = self._aborted, None
        self._compared += 1
        for group in self._groups:
            _require_same(f"{self._name}/{self._compared}", begun[group], group)


def _require_same(window: str, begun: int, process_group: Any) -> None:
    group: Any = dist.group.WORLD if process_group is None else process_group
    size, timeout = dist.get_world_size(process_group), timeout_of(process_group)
    store = dist.distributed_c10d._get_default_store()
    key = f"zerosync/aborted/{window}/{group.group_name}"
    store.add(f"{key}/{begun}", 1)
    arrived = store.add(key, 1)
    until = time.monotonic() + timeout.total_seconds()
    while arrived < size:
        if time.monotonic() > until:
            raise RankError(_text(begun, f"only {arrived} of {size} ranks have done so within {_seconds(timeout)}"))
        time.sleep(_POLL)
        arrived = store.add(key, 0)
    alike = store.add(f"{key}/{begun}", 0)
    if alike < size:
        raise RankError(_text(begun, f"{size - alike} of {size} ranks after another number of them"))


def _text(begun: int, others: str) -> str:
    return (
        f"A backward was aborted after this rank had begun {begun} reduction(s), and {others}. What is begun cannot be"
        " taken back, and would be added to the gradients of the next window. Go back to the last checkpoint in new"
        " processes. With coalesce=True and overlap_last=False, nothing is reduced before the step, and an exception"
        " in a backward leaves nothing behind."
    )


def _seconds(timeout: timedelta) -> str:
    return f"{timeout.total_seconds():g} s"
