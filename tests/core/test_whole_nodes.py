"""Whole parameters on several nodes: what goes to owners, and what they give, crosses between two nodes once."""

import os
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.core.test_nodes import BACKWARDS, LAYER, LAYERS, NODE, SHAPES, SIZE, WIDTH, inputs, layers, node
from tests.core.test_whole import train
from tests.harness.engines import make_engine, rank, start
from tests.harness.optimizers import muon
from tests.harness.oracle import Oracle, distance, full_parameters
from tests.harness.ranks import KEPT_ON_DEVICES, SIMULATED, run_ranks
from tests.harness.strict import strict
from zerosync_strategy import attach, prepare_cpu
from zerosync_strategy.core.engine import zero

CASES: list[tuple[str, int, dict[str, Any], dict[str, Any], float]] = [
    ("muon", 1, {}, {}, 0.0),
    ("mixed", 2, {"coalesce": False}, {"reduce_bucket_size": 60}, 0.3),
    ("adafactor", 2, {"grad_memory_budget": NODE}, {"reduce_bucket_size": 100, "round_robin_gradients": True}, 0.0),
    ("mixed", 1, {"grad_memory_budget": {"device": 0, "node": 400}}, {"reduce_bucket_size": 10}, 0.3),
    ("muon", 2, {"grad_memory_budget": 900, "reduction": "ordered"}, {"reduce_bucket_size": 60}, 0.0),
    ("mixed", 2, {"grad_memory_budget": {"auto": "64GiB"}}, {"reduce_bucket_size": 60}, 0.0),
    ("mixed", 3, {"grad_memory_budget": NODE, "param_memory_budget": NODE}, {"reduce_bucket_size": 60}, 0.3),
]


@pytest.mark.extended
@pytest.mark.parametrize(("nodes", "size"), SHAPES)
@pytest.mark.parametrize("native", [False, True])
def test_training_is_that_of_plain_torch(nodes: int, size: int, native: bool) -> None:
    """By NCCL's rules over three communicators, too, of which none may wait for another in a circle."""
    ranks = nodes * size

    def run() -> list[float]:
        start()
        with strict() if native else nullcontext():
            return [train(name, stage, ranks, *options)[0] for name, stage, *options in CASES]

    assert run_ranks(run, world_size=ranks, timeout=240, env=node(size)) == [[0.0] * len(CASES)] * ranks


# Stage, the budget of gradients; how often gradients cross between nodes; bytes of them that a rank keeps, of the six
# layers: each place of a node owns three.
LEVELS: list[tuple[int, Any, int, int]] = [
    (1, None, 1, SIZE),
    (2, NODE, 1, SIZE // 2 + LAYER),
    (2, 0, BACKWARDS, LAYER),
    (2, SIZE // 2 + SIZE // 4, 1, SIZE // 2 + SIZE // 4 + LAYER),
    (3, None, 1, SIZE),
]


@pytest.mark.extended(but=("False-1-None-1-6144", "True-2-gradients1-1-4096", "False-3-None-1-6144"))
@pytest.mark.parametrize(("stage", "gradients", "crossings", "kept"), LEVELS)
@pytest.mark.parametrize("native", [False, True])
def test_each_byte_crosses_between_nodes_once(
    stage: int, gradients: Any, crossings: int, kept: int, native: bool
) -> None:
    """Two nodes of two ranks: of each matrix, its gradient crosses to its owner's node, and itself to the other."""
    options = {"grad_memory_budget": gradients, "overlap_last": False}
    options |= {"param_memory_budget": "all"} if stage == 3 else {}

    def run() -> Any:
        start()
        with strict() if native else nullcontext():
            module, plain = layers(), layers()
            sharded = {"reduce_bucket_size": 4 * WIDTH * WIDTH, "stage3_param_persistence_threshold": 0}
            engine = make_engine(module, muon(module), stage, sharded)
            zerosync = attach(engine, **options)
            oracle = Oracle(plain, muon(plain), 4)
            for k in range(3 * BACKWARDS):
                engine.backward(engine(inputs(k, rank())).square().mean())
                oracle.backward(lambda r, k=k: plain(inputs(k, r)).square().mean())
                if (k + 1) % BACKWARDS == 0:
                    engine.step()
                    oracle.step()
            return distance(full_parameters(module), full_parameters(plain)), zerosync.report

    found = run_ranks(run, world_size=4, env=node(2))
    reports = [report for _, report in found]
    assert [error for error, _ in found] == [0.0] * 4
    floor = (crossings + 1) * SIZE // 4  # of a rank
    if stage == 3:  # shards from owners: three of four are on other ranks, two of these on the other node
        floor += SIZE // 4 // 2
    between = sum(report.bytes_sent_between_nodes for report in reports) / 4
    sent = sum(report.bytes_sent for report in reports) / 4
    more = KEPT_ON_DEVICES * 4 * WIDTH * WIDTH if SIMULATED in os.environ else 0
    for report in reports:
        assert report.floor_bytes_between_nodes == pytest.approx(floor, abs=12), report
        assert report.peak_unreduced_bytes <= kept + more, report
    assert between == pytest.approx(floor, abs=80), reports
    assert sent == pytest.approx(reports[0].floor_bytes, abs=300), reports


@pytest.mark.extended
def test_one_level_sends_what_it_sends_without_nodes() -> None:
    """One node, one rank on each, nodes of unlike sizes: the same calls and bytes, though node shards are asked for."""

    def run() -> Any:
        sent = []
        for options in ({}, {"node_size": 1}, {"node_size": 3}):
            module = layers()
            engine = make_engine(module, muon(module), 2)
            zerosync = attach(engine, grad_memory_budget=NODE, **options)
            for k in range(2 * BACKWARDS):
                engine.backward(engine(inputs(k, rank())).square().mean())
                if (k + 1) % BACKWARDS == 0:
                    engine.step()
            report = zerosync.report
            calls = {kind: (each.calls, each.bytes) for kind, each in report.collectives.items()}
            sent.append((calls, report.bytes_sent, report.floor_bytes, report.reductions))
        return sent

    alone, uneven = run_ranks(run, world_size=3, env=node(3)), run_ranks(run, world_size=3, env=node(2))
    for first, second, third in (*alone, *uneven):
        assert first == second == third
    assert alone == uneven


def write_received() -> None:
    """Write to what messages would be received into, of the fake group: what lay there may be no finite number."""
    irecv = dist.irecv

    def receive(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        tensor.zero_()
        return irecv(tensor, *args, **kwargs)

    dist.irecv = receive


def messages(world_size: int, size: int) -> tuple[int, int]:
    """How many matrices rank 0 owns, all in one bucket, and the messages of its second step."""
    prepare_cpu()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    dist.get_backend_config = lambda group=None: "cpu:gloo"  # by which it is chosen how to send
    write_received()
    module = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(world_size)])
    engine = make_engine(module, muon(module), 2)
    zerosync = attach(engine, node_size=size)
    for _ in range(2):
        engine.backward(engine(torch.ones(1, WIDTH)).square().mean())
        engine.step()
    return len(zero.stepping_optimizer(engine).state), zerosync.report.collectives["isend"].calls


@pytest.mark.extended
@pytest.mark.off_device("counts what one rank asks for")
@pytest.mark.parametrize(("nodes", "size"), [(4, 4), (16, 4), (4, 16)])
def test_messages_grow_with_the_nodes_and_with_the_ranks_on_one(nodes: int, size: int) -> None:
    """Of a bucket, one to each: to the others of the node, to owners on other nodes, from them. Then each matrix of
    its place, one per node, to each other of the node."""
    ranks = nodes * size
    ((owned, sent),) = run_ranks(messages, ranks, size, world_size=1, env={"WORLD_SIZE": str(ranks)})
    assert (owned, sent) == (1, (size - 1) + 2 * (nodes - 1) + nodes * (size - 1))


@pytest.mark.extended
def test_fewer_matrices_than_places() -> None:
    """Ranks of a place that owns nothing reduce and give nothing; those of a node that owns nothing still pass on."""

    def run() -> float:
        module, plain = layers()[:1], layers()[:1]
        engine = make_engine(module, muon(module), 2)
        attach(engine, grad_memory_budget=NODE)
        oracle = Oracle(plain, muon(plain), 6)
        for k in range(4):
            engine.backward(engine(inputs(k, rank())).square().mean())
            oracle.backward(lambda r, k=k: plain(inputs(k, r)).square().mean())
            if k % 2:
                engine.step()
                oracle.step()
        return distance(full_parameters(module), full_parameters(plain))

    assert LAYERS > 1
    assert run_ranks(run, world_size=6, env=node(2)) == [0.0] * 6
