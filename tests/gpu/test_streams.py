"""The rules of docs/streams.md on real streams, each beside a run in which it is off. Run with ZEROSYNC_TEST_CUDA=1.

Whether a rule holds shows in the parameters, which must be those of a run without streams, bit for bit. Nothing here
asserts a time; the order of events, where it counts, follows from streams that are kept busy.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import deepspeed
import pytest
import torch

from tests.gpu.producers import CYCLES, backward, make, slow_reductions, train
from tests.harness.oracle import full_parameters
from tests.harness.ranks import run_ranks
from zerosync_strategy.core.comm.streams import HostCopy, Streams

pytestmark = pytest.mark.gpu
DURING: dict[str, Any] = {"coalesce": False}  # reductions beside the backward


def same(ours: dict[str, torch.Tensor], plain: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(ours[name], plain[name]) for name in plain)


def on_every_gpu(job: Any, *args: Any) -> list[Any]:
    return run_ranks(job, *args, world_size=torch.cuda.device_count(), timeout=280.0)


@contextmanager
def off(method: str | None) -> Iterator[None]:
    """A rule of the stream order, switched off."""
    with pytest.MonkeyPatch.context() as patch:
        if method is not None:
            patch.setattr(Streams, method, lambda self, *args: None)
        yield


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize(
    ("rule", "slow_producers", "ours"),
    [("record_grad_ready", True, DURING), ("wait_for_reductions", False, {}), ("producers_wait", False, DURING)],
    ids=["B1", "B3", "L1"],
)
def test_results_need_the_rule(rule: str, slow_producers: bool, ours: dict[str, Any], stage: int) -> None:
    """B1: two slow producers into one reduction. B3: the step after it. L1: gradients that are freed and used again.

    All under pressure: memory that is read too early holds no number.
    """

    def job() -> tuple[bool, bool]:
        plain = train(3, 0, stage=stage, ours=ours)

        def holds(without: str | None) -> bool:
            with off(without), slow_reductions():
                cycles = 2 * CYCLES if slow_producers else 0
                run = {"stage": stage, "cycles": cycles, "reduce_bucket_size": 300_000}  # each of few gradients
                return same(train(3, 2, ours=ours, pressure=True, **run), plain)

        return holds(None), holds(rule)

    results = on_every_gpu(job)
    assert all(holds for holds, _ in results)
    assert not all(held for _, held in results), f"nothing went wrong without {rule}"


@pytest.mark.parametrize("waits", [False, True], ids=["B2", "with a wait"])
def test_backward_is_not_held_up_by_a_reduction(waits: bool, record_property: Any) -> None:
    """When the backward's own streams are done, the reduction is not; with a wait as stock DeepSpeed's, it is."""

    def job() -> Any:
        plain = train(1, 0, ours=DURING)
        stock = Streams.on_reduction_stream

        @contextmanager
        def reducing(self: Streams, events: Any = None) -> Iterator[None]:
            with stock(self, events):
                yield
            if waits:
                torch.cuda.current_stream().wait_stream(self._reduction)

        with pytest.MonkeyPatch.context() as patch, slow_reductions(read_late=False) as ends:
            patch.setattr(Streams, "on_reduction_stream", reducing)
            engine = make(2, ours=DURING)
            for k in range(2):
                ends.clear()
                torch.cuda.synchronize()
                began = torch.cuda.Event(enable_timing=True)
                done = torch.cuda.Event(enable_timing=True)
                began.record()
                backward(engine, k)
                done.record()
                done.synchronize()
                reduced = ends[-1].query()
                milliseconds = began.elapsed_time(done)
            engine.step()
        return reduced, same(full_parameters(engine.module), plain), milliseconds

    for reduced, right, milliseconds in on_every_gpu(job):
        assert right and reduced == waits
        record_property("backward_ms", milliseconds)


def test_gradients_overlap_their_reductions_and_stocks_do_not(record_property: Any) -> None:
    """B2, recorded: a backward's time with fast collectives over that with slow ones, which take half of it."""

    def job() -> dict[str, float]:
        shares = {}
        for name, ours in (("zerosync", DURING), ("stock", None)):
            engine = make(2, cycles=CYCLES, ours=ours, reduce_bucket_size=300_000)
            spent = []
            for slow in (False, True):
                with pytest.MonkeyPatch.context() as patch:
                    if slow:
                        for call in ("reduce_scatter_tensor", "all_reduce", "reduce"):
                            _slow_down(patch, deepspeed.comm, call)
                    for k in range(3):  # the first ones warm up
                        torch.cuda.synchronize()
                        began, done = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                        began.record()
                        backward(engine, k)
                        done.record()
                        torch.cuda.synchronize()
                        if ours is None or k == 2:
                            engine.step()
                    spent.append(began.elapsed_time(done))
            shares[name] = spent[0] / spent[1]
        return shares

    for index, shares in enumerate(on_every_gpu(job)):
        assert all(math.isfinite(share) and share > 0 for share in shares.values())
        record_property(f"rank {index}", shares)


def _slow_down(patch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
    stock = getattr(owner, name)

    def slow(*args: Any, **kwargs: Any) -> Any:
        torch.cuda._sleep(CYCLES // 8)
        return stock(*args, **kwargs)

    patch.setattr(owner, name, slow)


@pytest.mark.parametrize("waits", [True, False], ids=["W4", "without a wait"])
def test_the_host_reads_an_answer_after_its_copy(waits: bool) -> None:
    """And does not wait for what was issued behind it. Without the wait, it reads what the memory held before."""

    def job() -> tuple[bool, bool]:
        copy, answer = HostCopy(Streams(), 2), torch.zeros(2, dtype=torch.int64, device="cuda")
        copy.begin(answer)
        assert copy.arrived().tolist() == [0, 0]
        torch.cuda.synchronize()
        torch.cuda._sleep(CYCLES)
        answer.fill_(7)
        copy.begin(answer)
        torch.cuda._sleep(20 * CYCLES)
        (behind := torch.cuda.Event()).record()
        with pytest.MonkeyPatch.context() as patch:
            if not waits:
                patch.setattr(torch.cuda.Event, "synchronize", lambda self: None)
            found = copy.arrived().tolist()
        return found == [7, 7], behind.query()

    ((arrived, waited_for_more),) = run_ranks(job, world_size=1)
    assert arrived == waits and not waited_for_more


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("stage", [1, 2])
def test_streams_and_no_streams_are_the_same_every_time(stage: int, compiled: bool) -> None:
    """100 times, as in PyTorch's issue 33909; compiled regions with their hooks on three streams, ten times."""

    def job() -> int:
        plain = train(2, 0, stage=stage, compiled=compiled, ours=DURING)
        times = 10 if compiled else 100
        return sum(same(train(2, 3, stage=stage, compiled=compiled, ours=DURING), plain) for _ in range(times)) - times

    assert not any(on_every_gpu(job))
