"""R2: how much memory a backward takes that reduces as it goes, on a device whose host runs far ahead of it."""

from typing import Any

import pytest
import torch
from deepspeed.accelerator import get_accelerator

from tests.harness.engines import attached_of, make_engine, start
from tests.harness.networks import matrices
from tests.harness.racecheck import simulate
from tests.harness.racecheck.device import Stream
from tests.harness.ranks import run_ranks
from zerosync_strategy import attach

WIDTH, LAYERS = 64, 16
LAYER = 4 * WIDTH * WIDTH  # bytes


def peaks(stage: int, options: dict[str, Any], backwards: int = 2) -> tuple[list[float], list[str]]:
    """By backward of the last of two steps, the most that is taken above what the step before has left; and findings.

    In layers.
    """
    with simulate() as simulation:
        start()
        net = matrices(WIDTH, LAYERS)
        zero = {
            "overlap_comm": True, "reduce_bucket_size": WIDTH * WIDTH, "stage3_param_persistence_threshold": 0,
            "stage3_prefetch_bucket_size": 0, "stage3_max_reuse_distance": 0,
        }  # fmt: skip
        engine = make_engine(net, torch.optim.SGD(net.parameters(), lr=0.01), stage, zero)
        attach(engine, **options)
        for _ in range(2):
            found, left = [], simulation.allocator.taken
            for _ in range(backwards):
                loss = engine(torch.ones(1, WIDTH)).square().mean()
                simulation.allocator.peak = 0
                engine.backward(loss)
                found.append((simulation.allocator.peak - left) / LAYER)
                del loss
            engine.step()
        return found, list(map(str, simulation.findings))


@pytest.mark.extended(
    but=(
        "0-2",
        "6-3",
    )
)
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("budget", [0, 6])
def test_gradients_take_the_budget_and_four_buckets(stage: int, budget: int) -> None:
    """Besides there are two results of reductions, each half a layer, and the shards (2), or a gathered layer (3)."""
    options: dict[str, Any] = {"grad_memory_budget": budget * LAYER} if budget else {"coalesce": False}
    besides = 1 + (LAYERS / 2 if stage == 2 else 1)
    for found, races in run_ranks(lambda: peaks(stage, options)):
        assert max(found) <= budget + 4 + besides + 0.5 and not races, (found, races)


@pytest.mark.extended(but=("258-3",))
@pytest.mark.parametrize(("width", "most"), [(256, 2), (258, 3)])  # rows of 131,072 bytes, and of 133,128
def test_two_units_are_gathered_at_a_time(width: int, most: float) -> None:
    """What is used, and what comes next; nothing beside them where rows are aligned. Else what has been received."""

    def run() -> tuple[float, float, list[str]]:
        with simulate() as simulation:
            start()
            net = matrices(width, LAYERS // 2)
            zero = {
                "stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": width * width,
                "stage3_max_reuse_distance": 0,
            }  # fmt: skip
            engine = make_engine(net, torch.optim.SGD(net.parameters(), lr=0.01), 3, zero)
            attach(engine, overlap_last=False)
            for _ in range(2):  # each gradient has its memory from a backward before the one that is measured
                engine.backward(engine(torch.ones(1, width)).square().mean())
                taken, simulation.allocator.peak = simulation.allocator.taken, 0
                loss = engine(torch.ones(1, width)).square().mean()
                of_forward, simulation.allocator.peak = simulation.allocator.peak, 0
                engine.backward(loss)
                of_backward = simulation.allocator.peak
                engine.step()
            layer = 4 * width * width
            return (of_forward - taken) / layer, (of_backward - taken) / layer, list(map(str, simulation.findings))

    for forward, backward, races in run_ranks(run):
        assert forward <= most + 0.3 and not races, (forward, races)
        assert backward <= most + 1.3, backward  # and the gradient that is added to another; activations are 0.3


@pytest.mark.parametrize("stage", [2, 3])
def test_gradients_of_earlier_backwards(stage: int) -> None:
    """Their memory is that of a stream which has no part in the last backward, and waits for nothing of it."""

    def run() -> list[str]:
        with simulate() as simulation:
            start()
            net = matrices(WIDTH, 3)
            zero = {"overlap_comm": True, "reduce_bucket_size": WIDTH * WIDTH, "stage3_param_persistence_threshold": 0}
            engine = make_engine(net, torch.optim.SGD(net.parameters(), lr=0.01), stage, zero)
            attached, x = attached_of(attach(engine)), torch.ones(1, WIDTH)
            side, caller = Stream(name="side"), get_accelerator().current_stream()
            for _ in range(3):
                side.wait_stream(caller)
                with get_accelerator().stream(side):
                    engine.backward(engine(x).square().mean())
                caller.wait_stream(side)
                attached.parts.window.expect_last()
                engine.backward(engine(x).square().mean())
                with get_accelerator().stream(side):
                    torch.ones(WIDTH, WIDTH)
                engine.step()
            return list(map(str, simulation.findings))

    for races in run_ranks(run):
        assert not races, races
