"""Gathers over several process groups leave nothing unordered, and each wait of theirs is needed."""

import os
from typing import Any

import pytest

from tests.harness.engines import attached_of
from tests.harness.groups import LAYOUTS, WORLD, Model, Reads, adamw, data, make_engine
from tests.harness.racecheck import Simulation, simulate
from tests.harness.ranks import run_ranks
from zerosync_strategy import attach
from zerosync_strategy.core.comm.streams import Streams
from zerosync_strategy.core.params import shard_groups
from zerosync_strategy.core.params.issuing import ParameterGather


def train(simulation: Simulation, sharing: str | None, steps: int = 3, kind: type[Model] = Model, **zero: Any) -> Any:
    """Optimizer steps of two micro-batches, with parameters over rows, columns and all; `None`: stock."""
    engine = make_engine(LAYOUTS["grid"], adamw, zero={"overlap_comm": True, **zero}, kind=kind)
    if sharing is not None:
        attach(engine, unshard_streams=sharing)
    for k in range(2 * steps):
        engine.backward(engine(data(k, int(os.environ["RANK"])), skip=k == 3))
        if k % 2:
            engine.step()
    return engine


def findings(sharing: str, backend: str | None = "nccl", **options: Any) -> list[str]:
    """Of all ranks, each once. `None`: gathers go point to point, as they do on gloo."""

    def run() -> list[str]:
        with simulate(backend) as simulation:
            train(simulation, sharing, **options)
            return [str(finding) for finding in simulation.findings]

    return sorted({text for of_rank in run_ranks(run, world_size=WORLD) for text in of_rank})


@pytest.mark.extended(but=("per_group-nccl",))
@pytest.mark.parametrize(
    ("sharing", "backend"),
    [("per_group", "nccl"), ("own_communicator", "nccl"), ("per_group", None)],
)
def test_nothing_is_left_unordered(sharing: str, backend: str | None) -> None:
    zero: dict[str, Any] = {"offload_optimizer": {"device": "cpu"}} if sharing == "own_communicator" else {}
    assert findings(sharing, backend, **zero) == []


def wait_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the stream that has issued a gather wait for it, and not the one that uses it."""

    arrive = ParameterGather._arrive

    def arrive_there(self: ParameterGather) -> None:
        wait = self._wait

        def wait_there() -> None:
            with self._gather_streams.on_gather_stream(self._stream):
                wait()

        self._wait = wait_there
        arrive(self)

    monkeypatch.setattr(ParameterGather, "_arrive", arrive_there)
    monkeypatch.setattr(Streams, "caller_waits_for", lambda self, *args: None)


@pytest.mark.extended
def test_reads_of_what_is_prefetched_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    zero: dict[str, Any] = {"stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 10**6}
    assert findings("per_group", kind=Reads, **zero) == []
    wait_elsewhere(monkeypatch)
    found = findings("per_group", kind=Reads, **zero)
    # A module of the model itself reads, and not a layer.
    assert any(text.startswith("race") and "values.py" in text for text in found), found


@pytest.mark.extended
@pytest.mark.parametrize("backend", ["nccl", None])
def test_who_uses_a_gather_waits_for_it(backend: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    wait_elsewhere(monkeypatch)
    found = findings("per_group", backend)
    assert any(text.startswith("race") and "split_with_sizes_copy" in text for text in found), found


@pytest.mark.extended
def test_gathers_wait_for_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Streams, "gathers_wait_for_writes", lambda self, *args: None)
    monkeypatch.setattr(Streams, "gathers_wait_for_caller", lambda self, *args: None)  # which writes here, too
    found = findings("per_group")
    assert any(text.startswith("race") and "read by" in text for text in found), found


STOCK = pytest.param(None, 3, marks=pytest.mark.off_device("ranks may wait in a circle for stock's gathers"))


@pytest.mark.extended
@pytest.mark.parametrize(("sharing", "waits"), [("per_group", 0), STOCK])
def test_a_layer_waits_for_its_own_gather_alone(sharing: str | None, waits: int) -> None:
    """U2: over three groups, what follows is gathered ahead. The first layer waits for none of it; stock for all."""

    def run() -> int:
        with simulate() as simulation:
            engine = train(simulation, sharing, steps=5, stage3_prefetch_bucket_size=10**6)
            begun = len(simulation.operations)
            engine(data(0, int(os.environ["RANK"])))
            gathers: dict[int, int] = {}  # by process group: the last one before the first layer computes
            for operation, clock in simulation.operations[begun:]:
                if "all_gather" in operation.name and "process group" in operation.timeline.name:
                    gathers[operation.timeline.id] = operation.time
                if operation.name == "addmm":
                    return sum(clock.get(group, 0) >= time for group, time in gathers.items())
            raise AssertionError("no layer ran")

    assert run_ranks(run, world_size=WORLD) == [waits] * WORLD


@pytest.mark.extended
def test_streams_are_made_once_and_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """U4: three groups, of which two share a stream when there may be two."""

    def run(sharing: str) -> int:
        with simulate() as simulation:
            engine = train(simulation, sharing, steps=1)
            groups = attached_of(engine._zerosync).stage.scheduler.groups
            before = [groups[param.ds_process_group].stream for param in engine.module.parameters()]
            engine.backward(engine(data(0, int(os.environ["RANK"]))))
            engine.step()
            assert before == [groups[param.ds_process_group].stream for param in engine.module.parameters()]
            return len({stream.id for stream in before})

    monkeypatch.setattr(shard_groups, "MAX_STREAMS", 2)
    assert run_ranks(run, "per_group", world_size=WORLD) == [2] * WORLD
