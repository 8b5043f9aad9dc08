"""Native collectives over gloo: ranks send as on NCCL, where nothing but the order decides what meets what."""

from typing import Any, NamedTuple

import pytest
import torch.distributed as dist

COALESCED = ("all_gather_single_coalesced", "allgather_into_tensor_coalesced")  # of process groups: torch 2.13's, older
_ALL_GATHER = dist.ProcessGroup._allgather_base  # the stock one, so that nothing counts a gather and its parts


class Works(NamedTuple):
    """Several works as one."""

    works: list[Any]

    def wait(self, *args: Any) -> bool:
        for work in self.works:
            work.wait(*args)
        return True


def all_gather_coalesced(group: Any, outputs: Any, inputs: Any) -> Works:
    """Gather each of ``inputs`` into its output of ``outputs``.

    Gloo's own call runs torch's operators in a thread of its, beside those of this thread. In about one of fifty runs
    on a loaded machine, the heap was corrupted (torch 2.13).
    """
    return Works([_ALL_GATHER(group, output, own) for output, own in zip(outputs, inputs, strict=True)])


def send_natively(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let gradients and parameters go by the backend's own collectives."""
    from zerosync_strategy.core.comm import collectives  # not above: the race checker needs torch alone
    from zerosync_strategy.core.gradients import layout
    from zerosync_strategy.core.params import shard_groups

    for module in (collectives, layout, shard_groups):
        monkeypatch.setattr(module, "is_native", lambda process_group, device: True)
    for name in COALESCED:
        if hasattr(dist.ProcessGroup, name):
            monkeypatch.setattr(dist.ProcessGroup, name, all_gather_coalesced)
