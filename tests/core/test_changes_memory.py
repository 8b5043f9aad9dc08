"""R7: gathers of changes need one bucket of memory more than gathers in full, at most."""

from typing import Any

import pytest

from benchmarks.tensor_memory import TensorMemory
from tests.core.test_changes import BF16, make, share, step
from tests.harness.ranks import run_ranks
from zerosync_strategy.core.comm import differences, messages
from zerosync_strategy.core.params import held_changes

BUCKET = 20_000
PIECE = 256  # numbers that are coded at a time, for which there are a few tensors of 8 bytes each
HELD = {"param_memory_budget": "all"}


@pytest.mark.timeout(300)
@pytest.mark.off_device("counts the host's tensors")
@pytest.mark.parametrize(("stage", "options"), [(2, {}), (3, HELD)])
def test_a_bucket_more_at_most(monkeypatch: pytest.MonkeyPatch, stage: int, options: Any) -> None:
    monkeypatch.setattr(messages, "WITHIN_HOST", messages.Messages(BUCKET, 2))
    monkeypatch.setattr(held_changes, "SMALLEST", 1000)
    monkeypatch.setattr(differences, "_HOST_PIECE", PIECE)
    zero = {"stage3_param_persistence_threshold": 0} if stage == 3 else {}

    def run() -> tuple[int, int]:
        peaks = []
        for changes in (False, True):
            zerosync = make(stage, {"gather_changes": changes, **options}, BF16, zero)
            with TensorMemory() as memory:
                for k in range(5):
                    step(zerosync, k)
            assert not changes or share(zerosync) < 0.5
            peaks.append(memory.most)
            if stage == 3:
                peak = zerosync.report.peak_unsharded_bytes
                assert peak == sum(each.ds_numel for each in zerosync.engine.module.parameters()) * 2
        return peaks[0], peaks[1]

    for full, changes in run_ranks(run):
        assert changes - full <= BUCKET + 64 * PIECE, (full, changes)
