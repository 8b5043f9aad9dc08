"""Gathers over several process groups leave nothing unordered, and each wait of theirs is needed."""

import os
from typing import Any

import pytest

from tests.harness.groups import LAYOUTS, WORLD, adamw, data, make_engine
from tests.harness.ranks import run_ranks
from zerosync_strategy import attach
from zerosync_strategy.core.ordering import Streams
from zerosync_strategy.racecheck import simulate


def findings(sharing: str, zero: dict[str, Any] | None = None) -> list[str]:
    """Of all ranks, each once: six optimizer steps of two micro-batches, with parameters over rows, columns and all."""

    def run() -> list[str]:
        with simulate() as simulation:
            engine = make_engine(LAYOUTS["grid"], adamw, zero={"overlap_comm": True, **(zero or {})})
            attach(engine, unshard_streams=sharing)
            for k in range(6):
                engine.backward(engine(data(k, int(os.environ["RANK"])), skip=k == 3))
                if k % 2:
                    engine.step()
            return [str(finding) for finding in simulation.findings]

    return sorted({text for of_rank in run_ranks(run, world_size=WORLD) for text in of_rank})


@pytest.mark.parametrize("sharing", ["per_group", "shared"])
def test_nothing_is_left_unordered(sharing: str) -> None:
    assert findings(sharing, {"offload_optimizer": {"device": "cpu"}} if sharing == "shared" else None) == []


@pytest.mark.parametrize(("method", "place"), [("uses", "addmm"), ("gathers_follow", "_all_gather")])
def test_every_rule_is_needed(method: str, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Streams, method, lambda self, *args: None)
    found = findings("per_group")
    assert any(text.startswith("race") and place in text for text in found), found
