"""What the simulation takes for granted: known races of every kind are found, and known-good programs are silent."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from tests.harness.racecheck import Kind, Simulation, Stream, simulate
from tests.harness.ranks import run_ranks


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


@pytest.mark.parametrize("waits", [True, False])
def test_an_optimizer_that_counts_its_steps_waits_for_no_stream(waits: bool) -> None:
    """Adam reads its counter, in host memory, for each parameter: that orders nothing after the step of another."""
    with simulate() as simulation:
        side, params = Stream(name="side"), [torch.zeros(8), torch.zeros(8)]
        for param in params:
            param.grad = torch.ones(8)
        side.wait_stream(simulation.default)
        torch.optim.Adam(params, foreach=False).step()
        if waits:
            side.wait_stream(simulation.default)
        with simulation.stream(side):
            params[0].mul(1)
    assert [finding.kind for finding in simulation.findings] == ([] if waits else [Kind.RACE])


def test_numbers_for_the_device_are_on_it() -> None:
    with simulate() as simulation:
        side = Stream(name="side")
        there, here = torch.tensor([1.0], device=torch.device("cpu")), torch.tensor([1.0])
        with simulation.stream(side):
            there.mul(1)
            here.mul(1)
        here.add_(1)
        there.add_(1)
    assert len(simulation.findings) == 1 and simulation.findings[0].kind is Kind.RACE


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
@pytest.mark.off_device("it simulates a device itself")
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
            assert all("all_reduce on process group" in text and "add_" in text for _, text in found)


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


@pytest.mark.parametrize("reads", ["what the inner made", "what the outer made"])
def test_a_backward_inside_another_joins_its_own_leaves_with_the_node_that_called_it(reads: str) -> None:
    with simulate() as simulation:
        first, second, third = (Stream(name=name) for name in ("first", "second", "third"))
        outer, other, inner = (torch.ones(4, requires_grad=True) for _ in range(3))

        def nested(_: torch.Tensor) -> None:
            assert simulation.current is first
            third.wait_stream(first)
            with simulation.stream(third), torch.enable_grad():
                loss = inner.mul(3).sum()
            first.wait_stream(third)
            loss.record_stream(first)
            loss.backward()
            assert simulation.current is first
            (inner if reads == "what the inner made" else other).grad.mul(1)

        for stream in (first, second):
            stream.wait_stream(simulation.default)
        with simulation.stream(first):
            hooked = outer.mul(2)
            hooked.register_hook(nested)
        with simulation.stream(second):
            made_later = other.mul(2)  # so its node runs first
        for stream, tensor in ((first, hooked), (second, made_later)):
            simulation.default.wait_stream(stream)
            tensor.record_stream(simulation.default)
        (hooked + made_later).sum().backward()
        for leaf in (outer, other):
            leaf.grad.mul(1)  # the outer one has joined its own
    found = {finding.kind for finding in simulation.findings}
    assert found == (set() if reads == "what the inner made" else {Kind.RACE}), simulation.findings


def test_a_backward_that_raises_leaves_the_simulation_as_it_was() -> None:
    def fail(_: torch.Tensor) -> None:
        raise ValueError("as it should")

    with simulate() as simulation:
        side, weight = Stream(name="side"), torch.ones(4, requires_grad=True)
        for attempt in range(3):
            side.wait_stream(simulation.default)
            with simulation.stream(side):
                product = weight.mul(2)
                loss = product.sum()
            simulation.default.wait_stream(side)
            loss.record_stream(simulation.default)
            if attempt == 1:
                product.register_hook(fail)
                with pytest.raises(ValueError, match="as it should"):
                    loss.backward()
            else:
                loss.backward()
            assert simulation.current is simulation.default
            weight.grad.mul(1)
    assert simulation.findings == []


def test_what_was_there_before_is_complete_and_the_default_streams() -> None:
    old, freed = torch.ones(4), torch.ones(4)
    with simulate() as simulation:
        side = Stream(name="side")
        side.wait_stream(simulation.default)
        with simulation.stream(side):
            freed.mul(2)
        del freed  # not recorded: the next allocation of its owner may get it
        old.mul(2)
    assert [finding.kind for finding in simulation.findings] == [Kind.REUSE]
    assert "mul on default stream" in str(simulation.findings[0].second)


def test_a_view_that_torch_does_not_differentiate_may_be_read() -> None:
    with simulate() as simulation:
        base = torch.ones(4, requires_grad=True).clone()
        with torch.no_grad():
            view = base[:2]
        base.mul_(2)
        with torch.no_grad():
            assert view.zero_().sum() == 0
        with pytest.raises(RuntimeError, match="A view was created in no_grad mode"):
            view.mul(2)
    assert simulation.findings == []


def test_tensors_have_the_versions_that_they_have_without() -> None:
    def versions() -> list[int]:
        tensors = [torch.ones(4), torch.ones(4)]
        torch._foreach_mul_(tensors, 2.0)
        torch._foreach_add_(tensors, tensors)
        tensors[0].mul_(2)
        return [tensor._version for tensor in tensors]

    with simulate():
        simulated = versions()
    assert simulated == versions() == [3, 2]


def test_a_graph_may_outlive_a_simulation() -> None:
    """A leaf's node that something keeps is the next simulation's too; the first one's hooks say nothing any more."""
    weight = torch.ones(4, requires_grad=True)
    with simulate():
        kept = weight.view(2, 2)  # noqa: F841  # on the first one's default stream
    with simulate() as simulation:
        side = Stream(name="side")
        side.wait_stream(simulation.default)
        with simulation.stream(side):
            loss = weight.mul(2).sum()
            seen: list[str] = []
            weight.register_post_accumulate_grad_hook(lambda _: seen.append(simulation.current.name))
        simulation.default.wait_stream(side)
        loss.record_stream(simulation.default)
        loss.backward()
        weight.grad.mul(1)
    weight.mul(2).sum().backward()
    assert seen == ["side", "default stream"] and simulation.findings == []


def traces() -> list[Any]:
    """What a simulation replaces, and torch's modes."""
    return [
        *_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack(), get_accelerator(),
        torch.Tensor.record_stream, vars(torch.autograd.Function)["apply"], torch.autograd._engine_run_backward,
        dist.get_backend, dist.all_reduce, dist.distributed_c10d.all_reduce, dist.isend, dist.all_gather_into_tensor,
    ]  # fmt: skip


def test_a_simulation_leaves_no_trace() -> None:
    """Modes that were there before it may go before it ends, and others may stay."""
    before = traces()
    with torch.device("cpu"):
        simulation = simulate()
        simulation.__enter__()
    assert traces() != before
    with pytest.raises(RuntimeError, match="runs already in this process"), simulate():
        pass
    with torch.device("cpu"):
        simulation.__exit__(None, None, None)
        assert traces()[1:] == before
    assert traces() == before
