"""Budgets that set themselves: within the limit, alike on all ranks, settled, and exact while they change."""

import random
from typing import Any

import pytest
import torch

from tests.harness.data import noise
from tests.harness.engines import make_engine, rank, start
from tests.harness.networks import stack
from tests.harness.oracle import Oracle, distance, full_parameters
from tests.harness.ranks import run_ranks
from zerosync_strategy import ZeroSyncConfig, attach
from zerosync_strategy.core.budgets import automatic
from zerosync_strategy.core.budgets.automatic import LEVELS, MEASURED, RESERVED, AutomaticBudgets, State, Usage
from zerosync_strategy.core.comm.streams import Streams

WIDTH, LAYERS = 24, 8
LAYER = 4 * WIDTH * WIDTH
MODEL = LAYERS * LAYER
BASE = 2 * MODEL  # of what a rank uses in any case


class Simulated:
    """A rank's memory, as numbers."""

    def __init__(self) -> None:
        self.others = self.held = self.may_hold = self.most = 0

    def used(self) -> int:
        self.most = max(self.most, self.others + self.held)
        return self.others + self.held

    def peak(self) -> int:
        return self.most

    def hold(self, room: int) -> int:
        self.may_hold = room // 1000 * 1000  # in pieces
        return self.may_hold

    def usage(self) -> Usage:
        return Usage(self.held)


def test_never_above_the_limit_and_no_oscillation() -> None:
    """Random programs: what is used varies, differs by rank, and grows for good now and then, by less than the reserve.

    Ranks hold the same, what is held falls alone, and stays where nothing has grown.
    """

    def run() -> list[list[tuple[int, int]]]:
        import torch.distributed as dist

        start()
        histories = []
        for seed in range(20):
            draw, shared = random.Random(2 * seed + rank()), random.Random(seed)
            memory = Simulated()
            limit = 1_000_000
            usual, varies = shared.randint(100_000, 500_000), shared.choice([0, 30_000, 100_000])
            group, device = dist.group.WORLD, torch.device("cpu")
            budgets = AutomaticBudgets(memory, limit, memory.usage, 0, None, memory.hold, group, device, Streams())
            history = []
            for step in range(40):
                if step % 13 == 12:
                    usual += shared.randint(0, limit // RESERVED // 2)
                memory.held = 0
                # The first windows show the extremes; what comes between is less.
                spread = [0.0, 1.0][step] if step < 2 else draw.random()
                for _ in range(3):
                    memory.others = usual + int(varies * spread)
                    memory.held = memory.may_hold
                    budgets.sample()
                    assert memory.used() <= limit, (seed, step, str(budgets.choice))
                budgets.step_begins()
                memory.others, memory.held = usual // 2, 0
                budgets.end_window()
                history.append((budgets.choice.gradients, budgets.choice.cuts))
                assert (budgets.choice.state is State.HOLDS) == (step + 1 >= MEASURED)
            histories.append(history)
        return histories

    histories, of_other = run_ranks(run)
    assert histories == of_other
    for history in histories:
        held = [held for held, _ in history[MEASURED - 1 :]]
        assert held == sorted(held, reverse=True)
        assert history[MEASURED - 1][0] > 0 and history[-1][1] <= 2 * RESERVED
        assert history[11][1] == 0  # until something grows
    assert any(history[-1][1] > 0 for history in histories)


def test_what_is_held_is_the_most_that_leaves_the_reserve() -> None:
    """Random moments of a step: gathered parameters that were there anyway leave room to hold them."""

    def run() -> list[tuple[int, int, int]]:
        import torch.distributed as dist

        start()
        found = []
        for seed in range(60):
            draw, limit, everything = random.Random(seed), 1_000_000, random.Random(seed).randint(50_000, 400_000)
            # What is used beside, and how much of the parameters is gathered then if nothing is held.
            moments = [
                (draw.randint(400_000, 900_000 - everything // 2), draw.randint(0, everything)) for _ in range(6)
            ]
            moments.append((draw.randint(500_000, 850_000), draw.choice([0, everything])))
            memory = Simulated()
            gathered = [0]

            def most(held: int, moments: Any = moments, everything: int = everything) -> int:
                return max(beside + min(everything, held + own) for beside, own in moments)

            def hold(room: int, memory: Simulated = memory) -> tuple[int, int]:
                memory.may_hold = room
                return room, 0

            def usage(memory: Simulated = memory, gathered: list[int] = gathered) -> Usage:
                return Usage(memory.held, gathered[0])

            budgets = AutomaticBudgets(
                memory, limit, usage, everything, hold, None, dist.group.WORLD, torch.device("cpu"), Streams()
            )
            for _ in range(8):
                memory.held = memory.may_hold
                for beside, own in moments:
                    gathered[0] = min(everything, memory.held + own) - memory.held
                    memory.others = beside + gathered[0]
                    memory.used()
                    budgets.look()
                budgets.sample()
                budgets.step_begins()
                budgets.end_window()
            allowed = limit - budgets.choice.reserve
            best = max((held for held in range(0, everything + 1, 50) if most(held) <= allowed), default=0)
            if most(everything) <= limit - limit // RESERVED // 2:  # nothing varies here
                best = everything
            assert budgets.choice.parameters is not None and budgets.choice.cuts == 0
            assert memory.most <= max(most(0), limit - limit // RESERVED // 2), (seed, memory.most)
            found.append((everything, best, budgets.choice.parameters))
        return found

    found, of_other = run_ranks(run)
    assert found == of_other
    for everything, best, chosen in found:
        assert best - everything // LEVELS - 50 <= chosen <= best + 50, (everything, best, chosen)
    assert {0 < chosen < everything for everything, _, chosen in found} == {True, False}


class Counted:
    """What one rank uses: the activations that the test gives it, and what ZeroSync counts."""

    def __init__(self) -> None:
        self.activations = self.most = 0
        self.attached: Any = None

    def used(self) -> int:
        ours = 0
        if self.attached is not None:
            ours = self.attached.reducer.local.now
            if self.attached.scheduler is not None:
                ours += self.attached.scheduler.unsharded.now
                if (shards := self.attached.scheduler.node_shards) is not None:
                    ours += shards.now
        self.most = max(self.most, BASE + self.activations + ours)
        return BASE + self.activations + ours

    def peak(self) -> int:
        return self.most


data = noise(4, WIDTH)


def train(
    monkeypatch: pytest.MonkeyPatch,
    stage: int,
    names: list[str],
    room: float,
    grows: int,
    frozen: bool = False,
    ranks: int = 2,
) -> tuple[float, list[tuple[Any, ...]]]:
    """The error after fourteen steps, and by step what was chosen.

    Args:
        room: times the model's bytes that the limit leaves beside activations.
        grows: bytes by which activations grow from the eighth step on, by what is left for it in each.
    """
    memory = Counted()
    monkeypatch.setattr(automatic, "gauge_of", lambda device: memory)
    net, plain = stack(WIDTH, LAYERS), stack(WIDTH, LAYERS)
    for each in (net, plain) if frozen else ():
        for layer in list(each)[1::2]:
            layer.requires_grad_(False)
    zero = {
        "stage3_param_persistence_threshold": WIDTH + 1, "stage3_max_live_parameters": WIDTH * WIDTH,
        "stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": WIDTH * WIDTH,
    }  # fmt: skip
    engine = make_engine(net, torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=0.01), stage, zero)
    limit = BASE + int((0.5 + room) * MODEL)
    zerosync = attach(engine, **{name: {"auto": limit} for name in names})
    memory.attached = zerosync._attached
    for module in net:
        module.register_forward_hook(lambda *_: memory.used() and None)
        module.register_full_backward_hook(lambda *_: memory.used() and None)
    oracle = Oracle(plain, torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], lr=0.01), ranks)
    draw, steps = random.Random(rank()), []
    for step in range(14):
        usual = MODEL // 4 + min(grows, max(0, step - 6) * (limit // RESERVED // 2))
        for micro in range(3):
            k = 3 * step + micro
            shows = (step, micro) == (1, 0) or step > 6  # how much it has grown: else no budget could know
            spread = 1.0 if shows else draw.random() if step > 1 else 0.0
            memory.activations = usual + int(MODEL // 4 * spread)
            loss = engine(data(k, rank())).square().mean()
            engine.backward(loss)
            oracle.backward(lambda r, k=k: plain(data(k, r)).square().mean())
            memory.activations = 0
        engine.step()
        oracle.step()
        report = zerosync.report
        held = report.peak_held_bytes + report.peak_node_bytes if PARAMETERS in names else 0
        assert held <= (report.budgets.parameters or 0)
        steps.append((report.budgets.parameters, report.budgets.gradients, report.budgets.cuts, report.ratio))
        assert memory.most <= limit, (step, memory.most, limit, str(report.budgets))
    return distance(full_parameters(net), full_parameters(plain)), steps


PARAMETERS, GRADIENTS = "param_memory_budget", "grad_memory_budget"


@pytest.mark.parametrize(
    ("stage", "names", "room", "frozen", "ranks"),
    [
        # Beside the gradients of all layers, of half of them, or those that are on their way.
        (3, [PARAMETERS], 2.0, False, 2),
        (3, [PARAMETERS], 3.0, False, 2),
        (3, [PARAMETERS], 1.5, True, 2),
        (3, [PARAMETERS, GRADIENTS], 1.6, False, 2),
        (2, [GRADIENTS], 1.2, False, 2),
        (1, [GRADIENTS], 1.2, False, 2),
        (3, [PARAMETERS], 2.2, False, 4),  # of two nodes
        (3, [PARAMETERS, GRADIENTS], 1.2, False, 4),
        (2, [GRADIENTS], 1.2, False, 4),
    ],
)
@pytest.mark.off_device(
    "on a device the answer of a step is read in the next one, and its limits leave no room for that"
)
def test_exact_while_it_changes(
    stage: int, names: list[str], room: float, frozen: bool, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of random activations, which grow: within the limit at every look, settled after four steps, then cut alone."""
    (error, steps), *others = run_ranks(
        lambda: train(monkeypatch, stage, names, room, int(0.3 * MODEL), frozen, ranks),
        world_size=ranks, env={"LOCAL_WORLD_SIZE": "2"},
    )  # fmt: skip
    assert all([step[:3] for step in steps] == [step[:3] for step in of_other] for _, of_other in others)
    assert error == 0.0
    chosen = [sum(filter(None, step[:2])) for step in steps]
    assert chosen[:MEASURED] == [0] * MEASURED
    assert chosen[MEASURED] >= LAYER and len(set(chosen[MEASURED:8])) == 1, chosen
    assert chosen[8:] == sorted(chosen[8:], reverse=True) and chosen[-1] > 0, chosen
    if room < 3.0:
        assert steps[-1][2] >= 1 and chosen[-1] < chosen[MEASURED], steps
    else:
        assert chosen[-1] == MODEL * len(names) and steps[-1][3] <= 1.02, steps


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
