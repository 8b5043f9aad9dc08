"""What programs do in mid-window, with gradients and parameters in shards of the node: as in plain torch."""

import contextlib
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.harness.data import noise
from tests.harness.engines import attached_of, expect_timeout, make_engine, rank
from tests.harness.masters import Masters
from tests.harness.networks import matrices
from tests.harness.oracle import Oracle, distance, full_parameters
from tests.harness.racecheck import simulate
from tests.harness.ranks import run_ranks
from tests.harness.releases import fp16_supported
from zerosync_strategy import attach
from zerosync_strategy.core.gradients.buckets import Level

WIDTH = 16
NODES = {"LOCAL_WORLD_SIZE": "2"}
NODE = {"device": 0, "node": "all"}
MIXED = {"device": 4 * WIDTH * WIDTH, "node": 8 * WIDTH * WIDTH}
BUDGETS = [(2, NODE), (2, MIXED), (3, NODE), (3, MIXED)]
inputs = noise(4, WIDTH)


def layers(seed: int = 1) -> nn.Module:
    return matrices(WIDTH, 5, seed)


def adamw(weights: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(weights, lr=5e-3)


def attached(stage: int, budget: Any, seed: int = 1, **config: Any) -> Any:
    module = layers(seed)
    engine = make_engine(module, adamw(module.parameters()), stage, {"stage3_param_persistence_threshold": 0}, **config)
    return engine, attach(engine, grad_memory_budget=budget, **({"param_memory_budget": budget} if stage == 3 else {}))


def loss_of(module: Any, k: int, of_rank: int) -> torch.Tensor:
    return module(inputs(k, of_rank)).square().mean()


@pytest.mark.extended
@pytest.mark.parametrize(("stage", "budget"), BUDGETS)
def test_reads_edits_and_an_abort_in_mid_window(stage: int, budget: Any) -> None:
    """What was aborted leaves nothing behind."""

    def run() -> float:
        engine, zerosync = attached(stage, budget)
        plain = layers()
        oracle = Oracle(plain, adamw(plain.parameters()), 4)
        for step in range(3):
            engine.backward(loss_of(engine, 100 + step, rank()))
            with pytest.warns(UserWarning, match="abort"):
                zerosync.abort("abort, by the test")
            for k in range(2):
                engine.backward(loss_of(engine, 10 * step + k, rank()))
                if k == 0:
                    with torch.no_grad():
                        engine(inputs(0, rank()))
                    with zerosync.full_parameters():
                        read = {name: param.detach().clone() for name, param in engine.module.named_parameters()}
                    assert distance(read, full_parameters(plain)) == 0.0
            with zerosync.full_gradients():
                for param in engine.module.parameters():
                    param.grad *= 0.5
            engine.step()
            for k in range(2):
                oracle.backward(lambda r, k=10 * step + k: 0.5 * loss_of(plain, k, r))
            oracle.step()
            assert stage < 3 or zerosync.report.peak_node_bytes > 0
        return distance(full_parameters(engine.module), full_parameters(plain))

    assert run_ranks(run, world_size=4, env=NODES) == [0.0] * 4


@pytest.mark.extended
@pytest.mark.parametrize("budget", [NODE, MIXED])
def test_what_is_written_in_mid_window_is_what_later_backwards_use(budget: Any) -> None:
    def run() -> float:
        engine, _ = attached(3, budget)
        plain = layers()
        oracle = Oracle(plain, adamw(plain.parameters()), 4)
        for step in range(3):
            for k in range(2):
                engine.backward(loss_of(engine, 2 * step + k, rank()))
                oracle.backward(lambda r, k=2 * step + k: loss_of(plain, k, r))
                if step == k == 0:
                    with deepspeed.zero.GatheredParameters([engine.module[1].weight], modifier_rank=0):
                        if rank() == 0:
                            engine.module[1].weight.data.fill_(0.25)
                    plain[1].weight.data.fill_(0.25)
            engine.step()
            oracle.step()
        return distance(full_parameters(engine.module), full_parameters(plain))

    assert run_ranks(run, world_size=4, env=NODES) == [0.0] * 4


@pytest.mark.extended
@pytest.mark.parametrize(("stage", "budget"), BUDGETS)
def test_a_run_that_is_resumed_has_the_same_bits(stage: int, budget: Any, tmp_path: Path) -> None:
    """The same operations on the same values, so on any processor."""

    def train(engine: Any, steps: range) -> None:
        for step in steps:
            for k in range(2):
                engine.backward(loss_of(engine, 2 * step + k, rank()))
            engine.step()

    def run(resume: bool) -> dict[str, torch.Tensor]:
        engine, _ = attached(stage, budget, seed=2 if resume else 1)
        if resume:
            train(engine, range(7, 8))  # of other values, which node shards are of until the load
            engine.load_checkpoint(tmp_path)
        else:
            train(engine, range(2))
            engine.save_checkpoint(tmp_path)
        train(engine, range(2, 4))
        return full_parameters(engine.module)

    first = run_ranks(run, False, world_size=4, env=NODES)
    again = run_ranks(run, True, world_size=4, env=NODES)
    assert all(torch.equal(one[name], two[name]) for one, two in zip(first, again, strict=True) for name in one)


@pytest.mark.extended(but=("3",))
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.off_device("gloo's timeout ends a wait that no rank ends; NCCL's ends the process")
def test_ranks_with_other_numbers_of_backwards_are_told_what_to_do(stage: int) -> None:
    """Not that parameters must be held: these reduce in each backward."""

    def run() -> None:
        engine, _ = attached(stage, NODE)
        engine.backward(loss_of(engine, 0, rank()))
        if stage == 3:  # whose forwards gather, on all ranks
            loss = loss_of(engine, 1, rank())
        expect_timeout()
        if rank() == 3:
            engine.backward(loss if stage == 3 else loss_of(engine, 1, rank()))
        engine.step()

    outcomes = run_ranks(run, world_size=4, env=NODES, expect="any", timeout=100)
    assert all(each.error == "RankError" for each in outcomes), outcomes
    assert any("all ranks make as many in each optimizer step" in each.message for each in outcomes)
    assert not any("param_memory_budget" in each.message for each in outcomes), outcomes


@pytest.mark.extended
@pytest.mark.parametrize("stage", [2, 3])
def test_fp16_skips_a_step_that_overflows_on_a_rank(stage: int) -> None:
    def scaled(module: Any, k: int, of_rank: int) -> torch.Tensor:
        loss = 10 * module(inputs(k, of_rank).half()).float().square().mean()
        return loss * (1e6 if k == 2 and of_rank == 3 else 1)

    def run() -> tuple[float, int, float]:
        with contextlib.nullcontext() if fp16_supported() else simulate(backend=None):
            oracle = Masters(layers(), torch.float16, adamw, world=4, scale=256.0)
            fp16 = {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}
            engine, _ = attached(stage, NODE, fp16=fp16)
            skipped = 0
            for step in range(4):
                ks = range(2 * step, 2 * step + 2)
                for k in ks:
                    engine.backward(scaled(engine, k, rank()))
                engine.step()
                skipped += oracle.step(scaled, ks) is None
            assert engine.optimizer.loss_scale == 128
            return distance(full_parameters(engine.module), oracle.parameters()), engine.skipped_steps, skipped

    for error, *skipped in run_ranks(run, world_size=4, env=NODES):
        assert error < 5e-4 and skipped == [1, 1]  # a tenth of what a step moves a weight


@pytest.mark.off_device("what is chosen is the same there")
@pytest.mark.parametrize("options", [{"coalesce": False}, {"grad_memory_budget": 0}], ids=str)
def test_without_a_budget_nothing_is_in_node_shards(options: dict[str, Any]) -> None:
    """Also of a parameter of fewer bytes than a node has ranks. As the first of 16 on torch's fake process group."""

    def run() -> list[Level]:
        torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=16)
        scale = nn.Module()
        scale.register_parameter("factor", nn.Parameter(torch.ones(1)))
        engine = make_engine(scale, torch.optim.SGD(scale.parameters(), lr=0.1), zero={"stage": 2})
        buckets = attached_of(attach(engine, node_size=8, **options)).parts.reducer.buckets
        engine.backward(engine.module.factor.sum())
        engine.step()
        return [bucket.level for bucket in buckets]

    assert run_ranks(run, world_size=1) == [[Level.SHARD]]
