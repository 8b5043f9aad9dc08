"""Budgets that set themselves: within the limit, alike on all ranks, chosen once, and exact."""

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.harness.data import noise
from tests.harness.engines import attached_of, make_engine, rank, start
from tests.harness.networks import stack
from tests.harness.oracle import Oracle, distance, full_parameters
from tests.harness.ranks import run_ranks
from zerosync_strategy import ZeroSyncConfig, attach
from zerosync_strategy.core.attached import budgets
from zerosync_strategy.core.attached.budgets import (
    LEVELS,
    MEASURED,
    RESERVED,
    AutomaticBudgets,
    PeakMemory,
    gradient_budget,
    parameter_budget,
)

WIDTH, LAYERS = 24, 8
LAYER = 4 * WIDTH * WIDTH
MODEL = LAYERS * LAYER
BASE = 2 * MODEL  # of what a rank uses in any case


def test_what_is_held_is_the_most_that_leaves_the_reserve() -> None:
    """Random moments of a step: gathered parameters that were there anyway leave room to hold them."""
    limit, chosen_of = 1_000_000, set()
    for seed in range(60):
        draw, everything = random.Random(seed), random.Random(seed).randint(50_000, 400_000)
        # What is used beside, and at which level parameters are gathered then if nothing is held.
        moments = [(draw.randint(400_000, 900_000 - everything // 2), draw.randint(0, LEVELS)) for _ in range(6)]
        moments.append((draw.randint(500_000, 850_000), draw.choice([0, LEVELS])))
        beside = [max([each for each, at in moments if at == level], default=-(2**40)) for level in range(LEVELS + 1)]
        memory = PeakMemory(beside, everything, limit, draw.choice([0, 50_000]))

        def used(held: int, moments: Any = moments, everything: int = everything) -> int:
            return max(each + min(everything, held + level * everything // LEVELS) for each, level in moments)

        chosen = parameter_budget(memory, 0)
        best = max((held for held in range(0, everything, 50) if used(held) <= limit - memory.reserve), default=0)
        if used(everything) <= limit - max(limit // RESERVED // 2, memory.varied):
            best = everything
        assert best <= chosen < best + 50, (seed, best, chosen)
        chosen_of.add(0 < chosen < everything)

        shards = everything // 4  # of all; none is worth its memory where all fit in full
        with_shards = parameter_budget(memory, shards)
        if chosen < everything and used(0) + shards <= limit - memory.reserve:
            in_full = with_shards - shards
            assert in_full >= 0 and used(in_full) + shards <= limit - memory.reserve
            assert gradient_budget(memory, in_full, shards) == limit - memory.reserve - used(in_full) - shards
        else:
            assert with_shards == everything == chosen or with_shards <= max(0, limit - memory.reserve - used(0))
    assert chosen_of == {True, False}


class Counted:
    """What one rank uses: the activations that the test gives it, and what ZeroSync counts."""

    def __init__(self) -> None:
        self.activations = self.most = 0
        self.attached: Any = None

    def used(self) -> int:
        ours = 0
        if self.attached is not None:
            ours = self.attached.parts.reducer.local.now
            if self.attached.stage.scheduler is not None:
                ours += self.attached.stage.scheduler.issuing.unsharded.now
                if (shards := self.attached.stage.cache.plan.node_shards) is not None:
                    ours += shards.now
        self.most = max(self.most, BASE + self.activations + ours)
        return BASE + self.activations + ours

    def peak(self) -> int:
        return self.most


data = noise(4, WIDTH)


def train(
    monkeypatch: pytest.MonkeyPatch, stage: int, names: list[str], room: float, ranks: int
) -> tuple[float, list[tuple[Any, ...]]]:
    """The error after eight steps of random activations, and by step what was chosen.

    Args:
        room: times the model's bytes that the limit leaves beside activations.
    """
    memory = Counted()
    monkeypatch.setattr(budgets, "gauge_of", lambda device: memory)
    net, plain = stack(WIDTH, LAYERS), stack(WIDTH, LAYERS)
    zero = {
        "stage3_param_persistence_threshold": WIDTH + 1, "stage3_max_live_parameters": WIDTH * WIDTH,
        "stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": WIDTH * WIDTH,
        "reduce_bucket_size": WIDTH * WIDTH,  # a device keeps some buckets more
    }  # fmt: skip
    engine = make_engine(net, torch.optim.AdamW(net.parameters(), lr=0.01), stage, zero)
    limit = BASE + int((0.5 + room) * MODEL)
    zerosync = attach(engine, **{name: {"auto": limit} for name in names})
    memory.attached = attached_of(zerosync)
    for module in net:
        module.register_forward_hook(lambda *_: memory.used() and None)
        module.register_full_backward_hook(lambda *_: memory.used() and None)
    oracle = Oracle(plain, torch.optim.AdamW(plain.parameters(), lr=0.01), ranks)
    draw, steps = random.Random(rank()), []
    for step in range(8):
        for micro in range(3):
            k = 3 * step + micro
            # The measured windows show the extremes; what comes later is less.
            spread = 1.0 if (step, micro) == (1, 0) else draw.random() if step > 1 else 0.0
            memory.activations = MODEL // 4 + int(MODEL // 4 * spread)
            loss = engine(data(k, rank())).square().mean()
            engine.backward(loss)
            oracle.backward(lambda r, k=k: plain(data(k, r)).square().mean())
            memory.activations = 0
        engine.step()
        oracle.step()
        report = zerosync.report
        assert (report.budgets is None) == (step < MEASURED)
        chosen = (0, 0) if report.budgets is None else (report.budgets.parameters or 0, report.budgets.gradients or 0)
        assert (report.peak_held_bytes + report.peak_node_bytes if PARAMETERS in names else 0) <= chosen[0]
        steps.append((chosen, report.ratio))
        assert memory.most <= limit, (step, memory.most, limit, str(report.budgets))
    return distance(full_parameters(net), full_parameters(plain)), steps


PARAMETERS, GRADIENTS = "param_memory_budget", "grad_memory_budget"


@pytest.mark.extended(but=("3-names1-1.6-2", "1-names2-1.2-2"))
@pytest.mark.parametrize(
    ("stage", "names", "room", "ranks"),
    [
        # Beside the gradients of all layers, of half of them, or those that are on their way.
        (3, [PARAMETERS], 3.0, 2),
        (3, [PARAMETERS, GRADIENTS], 1.6, 2),
        (1, [GRADIENTS], 1.2, 2),
        (3, [PARAMETERS], 2.2, 4),  # of two nodes
        (3, [PARAMETERS, GRADIENTS], 1.2, 4),
        (2, [GRADIENTS], 1.2, 4),
    ],
)
def test_exact_and_within_the_limit(
    stage: int, names: list[str], room: float, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every look, and alike on all ranks; chosen once, and what fits is held."""
    (error, steps), *others = run_ranks(
        lambda: train(monkeypatch, stage, names, room, ranks), world_size=ranks, env={"LOCAL_WORLD_SIZE": "2"}
    )
    assert all([step[0] for step in steps] == [step[0] for step in of_other] for _, of_other in others)
    assert error == 0.0
    chosen = [sum(of_step) for of_step, _ in steps]
    assert chosen[:MEASURED] == [0] * MEASURED
    assert chosen[MEASURED] >= LAYER and len(set(chosen[MEASURED:])) == 1, chosen
    if room == 3.0:
        assert chosen[-1] == MODEL and steps[-1][1] <= 1.02, steps


def test_the_limit_is_what_is_left_once_communicators_are_there() -> None:
    """They are made when they are used first, after the engine is attached."""

    def run() -> list[int]:
        start()
        found, free = [], [1000, 600]
        gauge = SimpleNamespace(used=lambda: 100, peak=lambda: 200)

        def hold(memory: PeakMemory) -> Any:
            found.append(memory.limit)

        budgets = AutomaticBudgets(gauge, lambda: free[-1], lambda: 0, 400, hold, dist.group.WORLD)
        for _ in range(MEASURED):
            budgets.forward_ended()
            budgets.step_begins()
            budgets.step_ended()
            free.append(500)
        return found

    assert run_ranks(run, world_size=1) == [[500]]


def test_options() -> None:
    assert ZeroSyncConfig(grad_memory_budget={"auto": "1KiB"}, param_memory_budget="auto").auto_limit == 1024
    assert ZeroSyncConfig(param_memory_budget={"auto": 7, "host": 5}).parameters.host == 5
    with pytest.raises(ValueError, match="got different limits"):
        ZeroSyncConfig(grad_memory_budget={"auto": 1}, param_memory_budget={"auto": 2})
    with pytest.raises(ValueError, match=r"for 'device' \(or 'auto'\), 'node' and 'host'"):
        ZeroSyncConfig(param_memory_budget={"auto": 1, "device": 2})

    def run() -> None:
        net = stack(WIDTH, LAYERS)
        engine = make_engine(net, torch.optim.AdamW(net.parameters()), 3)
        with pytest.raises(ValueError, match=r"'grad_memory_budget' got .auto. on a device of type 'cpu'"):
            attach(engine, grad_memory_budget="auto")

    run_ranks(run)
