"""Small models have the parts that large ones have."""

import pytest


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a step have several pieces."""
    # By its name, for torch is not imported here: tests/harness/warm.py comes first.
    monkeypatch.setattr("zerosync_strategy.core.optimizer.masters.STEP_NUMEL", 50)
