"""What the simulation takes for granted: known races of every kind are found, and known-good programs are silent."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.harness.ranks import run_ranks
from zerosync_strategy.racecheck import Kind, Simulation, Stream, simulate, write_trace


def write_then_read(simulation: Simulation, ordered: str) -> None:
    buffer, side = torch.zeros(8), Stream(name="side")
    side.wait_stream(simulation.default)
    with simulation.stream(side):
        buffer[:4].add_(1)
        event = side.record_event()
    if ordered == "event":
        event.wait()
    elif ordered == "stream":
        simulation.default.wait_stream(side)
    elif ordered == "host":
        side.synchronize()
    elif ordered == "item":
        with simulation.stream(side):
            buffer[0].item()
    if ordered == "other bytes":
        buffer[4:].mul_(2)
    else:
        buffer.mul_(2)


@pytest.mark.parametrize("ordered", ["event", "stream", "host", "item", "other bytes", ""])
def test_accesses_of_two_streams_must_be_ordered_where_they_overlap(ordered: str) -> None:
    with simulate() as simulation:
        write_then_read(simulation, ordered)
        assert len(simulation.findings) == (0 if ordered else 1), simulation.findings
    for finding in simulation.findings:
        assert finding.kind is Kind.RACE
        assert "add_ on side at test_simulation.py" in str(finding) and "mul_ on default stream" in str(finding)


@pytest.mark.parametrize("how", ["recorded", "ordered", "neither"])
def test_memory_may_be_reused_before_another_stream_is_done_with_it(how: str) -> None:
    with simulate() as simulation:
        side, buffer = Stream(name="side"), torch.zeros(8)
        side.wait_stream(simulation.default)
        with simulation.stream(side):
            total = buffer.sum()
        if how == "recorded":
            buffer.record_stream(side)
        del buffer
        if how == "ordered":
            simulation.default.wait_stream(side)
        torch.ones(8)
        del total
    assert [finding.kind for finding in simulation.findings] == ([Kind.REUSE] if how == "neither" else [])


@pytest.mark.parametrize("wait", [True, False])
def test_a_collective_runs_on_its_groups_stream_until_it_is_waited_for(wait: bool) -> None:
    def job() -> Any:
        dist.init_process_group("gloo")
        with simulate() as simulation:
            buffer = torch.ones(4)
            work = dist.all_reduce(buffer, async_op=True)
            if wait:
                work.wait()
            buffer.add_(1)
            dist.all_reduce(buffer)  # a synchronous one is waited for
            buffer.add_(1)
            work.wait()
        return [(finding.kind, str(finding)) for finding in simulation.findings]

    for found in run_ranks(job):
        if wait:
            assert found == []
        else:
            assert {kind for kind, _ in found} == {Kind.RACE}
            assert all("allreduce_ on process group" in text and "add_" in text for _, text in found), found


@pytest.mark.parametrize("joined", [True, False])
def test_backward_runs_on_the_streams_of_its_forward(joined: bool) -> None:
    with simulate() as simulation:
        side = Stream(name="side")
        weight = torch.ones(4, requires_grad=True)
        seen: list[Any] = []

        def ready(param: torch.Tensor) -> None:
            seen.append((simulation.current.name, param.grad.mul(1) if joined else None))  # on the producer: ordered
            if not joined:
                with simulation.stream(simulation.default):
                    param.grad.mul(1)

        weight.register_post_accumulate_grad_hook(ready)
        side.wait_stream(simulation.default)
        with simulation.stream(side):
            loss = weight.mul(2).sum()
        simulation.default.wait_stream(side)
        loss.record_stream(simulation.default)
        loss.backward()
        weight.grad.mul(1)  # backward has joined the producer's stream
    assert [name for name, _ in seen] == ["side"]
    assert {finding.kind for finding in simulation.findings} == (set() if joined else {Kind.RACE})


def test_the_trace_has_a_track_per_stream_and_an_arrow_per_wait(tmp_path: Path) -> None:
    with simulate() as simulation:
        write_then_read(simulation, "event")
    write_trace(simulation, tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    tracks = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    assert set(tracks.values()) == {"default stream", "side"}
    arrows = [(tracks[a["tid"]], tracks[b["tid"]]) for a in events for b in events
              if a["ph"] == "s" and b["ph"] == "f" and a["id"] == b["id"]]  # fmt: skip
    assert arrows == [("default stream", "side"), ("side", "default stream")]
