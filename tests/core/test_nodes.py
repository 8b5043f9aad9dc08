"""Exchanges in two levels, within nodes and between them: each byte crosses between two nodes once."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.core.test_random_programs import failures
from tests.harness.data import noise
from tests.harness.engines import make_engine, rank, start
from tests.harness.oracle import Oracle, distance, full_parameters
from tests.harness.ranks import run_ranks
from tests.harness.strict import strict
from zerosync_strategy import attach
from zerosync_strategy.core.comm.nodes import Nodes, Topology
from zerosync_strategy.core.failures.errors import RankError
from zerosync_strategy.core.gradients import reducer

SHAPES = [(2, 2), (3, 2), (2, 3)]  # nodes, ranks on each


def node(size: int) -> dict[str, str]:
    """What a launcher sets."""
    return {"LOCAL_WORLD_SIZE": str(size)}


@pytest.mark.parametrize(
    ("ranks", "local", "found"), [(4, 2, (2, 2)), (6, 3, (3, 2)), (4, 4, None), (4, 1, None), (4, 3, None)]
)
def test_nodes_are_what_the_launcher_says(ranks: int, local: int, found: Any) -> None:
    def run() -> Any:
        start()
        nodes = Topology("auto").of(dist.group.WORLD)
        return nodes and (nodes.size, nodes.count)

    assert run_ranks(run, world_size=ranks, env=node(local)) == [found] * ranks


def test_nodes_that_are_given() -> None:
    """By consecutive ranks; a process group may have some of these, as many on each node, or has one level."""

    def run() -> Any:
        start()
        ranks = {"pairs": [0, 1, 3, 4], "uneven": [0, 1, 3], "columns": [0, 3], "one": [0, 1, 2]}
        groups = {name: dist.new_group(members) for name, members in ranks.items()}
        topology = Topology(3)
        mine = {name: group for name, group in groups.items() if group is not dist.GroupMember.NON_GROUP_MEMBER}
        with pytest.raises(ValueError, match="'node_size' got 4, which does not divide the 6 ranks"):
            Topology(4)
        return {name: (found := topology.of(group)) and (found.size, found.count) for name, group in mine.items()}

    by_rank = run_ranks(run, world_size=6)
    assert by_rank[0] == {"pairs": (2, 2), "uneven": None, "columns": None, "one": None}
    assert by_rank[5] == {}


def test_without_a_launcher_nodes_are_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zerosync_strategy.core.comm.nodes.loopback", lambda: [rank() // 2] * 4)

    def run() -> Any:
        start()
        nodes = Topology("auto").of(dist.group.WORLD)
        return nodes and (nodes.size, nodes.count)

    assert run_ranks(run, world_size=4, env=node(0)) == [(2, 2)] * 4


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(("nodes", "size"), SHAPES)
def test_random_programs(stage: int, nodes: int, size: int) -> None:
    ranks = nodes * size

    def run() -> Any:
        used = set()

        def note(name: str) -> None:
            stock = getattr(Nodes, name)
            setattr(Nodes, name, lambda *args, **kwargs: (used.add(name), stock(*args, **kwargs))[1])

        for name in ("reduce_within", "reduce_between", "all_gather"):
            note(name)
        return failures(range(4000, 4004 if ranks == 4 else 4002), stage, ranks), len(used)

    assert run_ranks(run, world_size=ranks, timeout=240, env=node(size)) == [([], 3)] * ranks


@pytest.mark.parametrize("stage", [1, 3])
def test_random_programs_by_native_collectives(stage: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By NCCL's rules, over three communicators; none may wait for another in a circle."""
    monkeypatch.setattr(reducer, "SMALL_BYTES", 100)

    def run() -> list[str]:
        start()
        with strict():
            return failures(range(4001, 4003), stage, 4)

    assert run_ranks(run, world_size=4, timeout=240, env=node(2)) == [[]] * 4


WIDTH, LAYERS, BACKWARDS = 16, 6, 3
LAYER = 4 * WIDTH * WIDTH
SIZE = LAYERS * LAYER


def layers() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])


inputs = noise(4, WIDTH)
LEVELS: list[tuple[Any, int, int]] = [  # the budget; how often gradients cross between nodes; bytes of gradients kept
    (None, 1, SIZE),
    ({"device": 0, "node": "all"}, 1, SIZE // 2 + LAYER),
    ({"device": 0, "node": 0}, BACKWARDS, LAYER),
]


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize(("budget", "crossings", "kept"), LEVELS)
def test_each_byte_crosses_between_nodes_once(stage: int, budget: Any, crossings: int, kept: int) -> None:
    """Two nodes of two ranks: half of what is reduced or gathered has to cross, from the two ranks of a node."""
    options = {"grad_memory_budget": budget, "overlap_last": False}
    options |= {"param_memory_budget": "all"} if stage == 3 else {}

    def run() -> Any:
        module = layers()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        engine = make_engine(module, optimizer, stage, {"stage3_param_persistence_threshold": 0})
        zerosync = attach(engine, **options)
        for step in range(2):
            for k in range(BACKWARDS):
                engine.backward(engine(inputs(BACKWARDS * step + k, rank())).square().mean())
            engine.step()
        plain = layers()
        oracle = Oracle(plain, torch.optim.SGD(plain.parameters(), lr=0.1), 4)
        for step in range(2):
            for k in range(BACKWARDS):
                oracle.backward(lambda r, k=BACKWARDS * step + k: plain(inputs(k, r)).square().mean())
            oracle.step()
        return distance(full_parameters(module), full_parameters(plain)), zerosync.report

    for error, report in run_ranks(run, world_size=4, env=node(2)):
        assert error == 0.0
        per_rank = SIZE // 2 // 2
        sent = report.collectives["isend"].between
        if stage == 3:  # DeepSpeed's own gathers go the same way
            sent = report.bytes_sent_between_nodes
        assert abs(sent - (crossings + 1) * per_rank) <= 64, report
        assert report.floor_bytes_between_nodes == (crossings + 1) * per_rank
        assert report.peak_unreduced_bytes <= kept, report
        assert "between nodes: " in str(report)


def test_ranks_run_other_modules_and_wait_for_one_another_between() -> None:
    """A rank that waits elsewhere still passes on to its node what other ranks of that wait for."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(2)
            self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor, of_rank: int, wait: bool) -> torch.Tensor:
            first, second = (self.a, self.b) if of_rank % 2 else (self.b, self.a)
            x = first(x).tanh()
            if wait:
                dist.all_reduce(torch.ones(1))
            return second(x).square().mean()

    def run() -> float:
        net, plain = Model(), Model()
        engine = make_engine(
            net, torch.optim.SGD(net.parameters(), lr=0.1), 3, {"stage3_param_persistence_threshold": 0}
        )
        attach(engine, param_memory_budget="all")
        oracle = Oracle(plain, torch.optim.SGD(plain.parameters(), lr=0.1), 4)
        for k in range(3):
            engine.backward(engine(inputs(k, rank()), rank(), True))
            engine.step()
            oracle.backward(lambda r, k=k: plain(inputs(k, r), r, False))
            oracle.step()
        return distance(full_parameters(net), full_parameters(plain))

    assert run_ranks(run, world_size=4, env=node(2)) == [0.0] * 4


@pytest.mark.parametrize("stage", [2, 3])
def test_a_rank_that_fails_ends_the_others(stage: int) -> None:
    def run() -> str:
        module = layers()
        engine = make_engine(module, torch.optim.SGD(module.parameters(), lr=0.1), stage)
        attach(engine, **({"param_memory_budget": "all"} if stage == 3 else {}))
        engine.backward(engine(inputs(0, rank())).square().mean())
        if rank() == 3:
            raise ValueError("this rank has failed")
        try:
            engine.step()
        except RankError as error:
            return str(error)
        return "stepped"

    *others, failed = run_ranks(run, world_size=4, env=node(2), expect="any", timeout=60)
    assert failed.error == "ValueError"
    assert all(each.error is None and "lost the other ranks in the reduction" in each.value for each in others), others
