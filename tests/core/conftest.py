"""Small models have the parts that large ones have."""

import pytest

from zerosync_strategy.core.optimizer import masters


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a step have several pieces."""
    monkeypatch.setattr(masters, "STEP_NUMEL", 50)
