"""R7: gathers of changes need one bucket of memory more than gathers in full, at most."""

import weakref
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.core.test_changes import BF16, make, share, step
from tests.harness.ranks import run_ranks
from zerosync_strategy.core.comm import differences, messages
from zerosync_strategy.core.params import held_changes

BUCKET = 20_000
PIECE = 256  # numbers that are coded at a time, for which there are a few tensors of 8 bytes each
HELD = {"param_memory_budget": "all"}


class LiveBytes(TorchDispatchMode):
    """Counts the memory of all tensors that operators return, until nothing refers to it.

    Attributes:
        peak: the most bytes at once.
    """

    def __init__(self) -> None:
        super().__init__()
        self._now = self.peak = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._seen:
                    self._seen.add(storage._cdata)
                    self._now += storage.nbytes()
                    self.peak = max(self.peak, self._now)
                    weakref.finalize(storage, self._free, storage._cdata, storage.nbytes())
        return out

    def _free(self, key: int, nbytes: int) -> None:
        self._seen.discard(key)
        self._now -= nbytes


@pytest.mark.timeout(300)
@pytest.mark.off_device("counts the host's tensors")
@pytest.mark.parametrize(("stage", "options"), [(2, {}), (3, HELD)])
def test_a_bucket_more_at_most(monkeypatch: pytest.MonkeyPatch, stage: int, options: Any) -> None:
    monkeypatch.setattr(messages, "WITHIN_HOST", messages.Messages(BUCKET, 2))
    monkeypatch.setattr(held_changes, "_SMALLEST", 1000)
    monkeypatch.setattr(differences, "_HOST_PIECE", PIECE)
    zero = {"stage3_param_persistence_threshold": 0} if stage == 3 else {}

    def run() -> tuple[int, int]:
        peaks = []
        for changes in (False, True):
            zerosync = make(stage, {"gather_changes": changes, **options}, BF16, zero)
            with LiveBytes() as live:
                for k in range(5):
                    step(zerosync, k)
            assert not changes or share(zerosync) < 0.5
            peaks.append(live.peak)
            if stage == 3:
                peak = zerosync.report.peak_unsharded_bytes
                assert peak == sum(each.ds_numel for each in zerosync.engine.module.parameters()) * 2
        return peaks[0], peaks[1]

    for full, changes in run_ranks(run):
        assert changes - full <= BUCKET + 64 * PIECE, (full, changes)
