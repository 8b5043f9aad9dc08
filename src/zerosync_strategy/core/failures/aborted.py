"""What ranks have begun to send when a backward was aborted must not meet what they send next (W3).

Off NCCL, tags tell them apart. NCCL matches collectives by their order alone. So ranks that have aborted after
different numbers of them would add up gradients of different windows. They compare the numbers through the store, once,
before they send anything else; nothing is sent or waited for where nothing was aborted.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from zerosync_strategy.core.comm.collectives import timeout_of
from zerosync_strategy.core.failures.rank_status import RankError

_POLL = 0.02  # seconds


def require_same_begun(window: str, begun: int, process_group: Any) -> None:
    """Compare how many reductions each rank of ``process_group`` has begun in a window that it has aborted.

    Args:
        window: a name that is the same on all ranks.
        begun: the reductions of this rank.

    Raises:
        RankError: the numbers differ, or not all ranks have aborted within the timeout of the group.
    """
    group: Any = dist.group.WORLD if process_group is None else process_group
    size, timeout = dist.get_world_size(process_group), timeout_of(process_group)
    store = dist.distributed_c10d._get_default_store()
    key = f"zerosync/aborted/{window}/{group.group_name}"
    alike = store.add(f"{key}/{begun}", 1)
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
