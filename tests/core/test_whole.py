"""Optimizers that need whole parameters: each parameter has an owner, and training is that of plain torch."""

import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_grad,
    safe_set_full_fp32_param,
    safe_set_full_grad,
)
from deepspeed.utils.tensor_fragment import safe_update_full_grad_vectorized
from torch import nn

from tests.harness.data import noise
from tests.harness.engines import configuration, make_engine, rank, start
from tests.harness.optimizers import Mixed, adafactor, mixed, muon, noted
from tests.harness.oracle import NORM, Oracle, distance, full_parameters
from tests.harness.ranks import run_ranks
from tests.harness.strict import strict
from zerosync_strategy import attach
from zerosync_strategy.core.comm.owners import assign_owners

WIDTHS = (7, 9, 11, 5, 6, 6)
OPTIMIZERS = {"muon": muon, "adafactor": adafactor, "mixed": mixed, "noted": noted}
data = noise(4, WIDTHS[0])


def network(bias: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(a, b, bias=bias) for a, b in itertools.pairwise(WIDTHS)])


def train(
    name: str, stage: int, world_size: int, options: dict[str, Any], zero: dict[str, Any] | None = None, clip: float = 0
) -> tuple[float, Any, Any]:
    """Three steps of two backwards: the distance from plain torch, the handle and the oracle."""
    make = OPTIMIZERS[name]
    net, plain = network(name != "muon"), network(name != "muon")
    engine = make_engine(net, make(net), stage, zero, gradient_clipping=clip)
    zerosync = attach(engine, **options)
    oracle = Oracle(plain, make(plain), world_size)
    schedulers = [
        torch.optim.lr_scheduler.ExponentialLR(each, 0.9) for each in (engine.optimizer.optimizer, oracle.optimizer)
    ]
    for k in range(6):
        engine.backward(engine(data(k, rank())).square().mean())
        oracle.backward(lambda r, k=k: plain(data(k, r)).square().mean())
        if k % 2:
            engine.step()
            norm = oracle.step(clip)
            if clip:
                assert float(engine.get_global_grad_norm()) == pytest.approx(norm, rel=NORM)
            for scheduler in schedulers:
                scheduler.step()
    return distance(full_parameters(net), full_parameters(plain)), zerosync, oracle


@pytest.mark.parametrize("stage", [2, 3])
def test_nccl_gets_all_matrices_of_a_bucket_in_one_launch(stage: int) -> None:
    """What is reduced to several owners, and what they give; of 10 matrices in buckets of 4, of one rank or another."""

    def run() -> Any:
        start()
        with strict() as communicator:
            net = nn.Sequential(*[nn.Linear(8, 8, bias=False) for _ in range(10)])
            engine = make_engine(net, muon(net), stage, {"reduce_bucket_size": 4 * 64})
            zerosync = attach(engine, overlap_last=False)
            counts = []
            for _ in range(2):
                engine.backward(engine(torch.ones(1, 8)).square().mean())
                engine.step()
                counts.append(Counter(communicator.count))
            found = counts[1] - counts[0]
            of_matrices = found["reduce"] + found["broadcast"]
            others = found.total() - found["launches"] - of_matrices
            return len(zerosync._attached.parts.reducer.buckets), of_matrices, found["launches"] - others

    for buckets, of_matrices, launches in run_ranks(run):
        ways = 2 if stage == 2 else 1  # to owners and from them; on stage 3 a gather has what these give
        assert of_matrices > launches == ways * buckets > 1


CASES: list[tuple[str, int, dict[str, Any], dict[str, Any], float]] = [
    ("muon", 1, {}, {}, 0.0),
    ("muon", 2, {"coalesce": False}, {"reduce_bucket_size": 60}, 0.3),
    ("adafactor", 2, {"grad_memory_budget": 300}, {"reduce_bucket_size": 60, "round_robin_gradients": True}, 0.0),
    ("mixed", 1, {"reduction": "ordered"}, {"reduce_bucket_size": 100}, 0.3),
    ("mixed", 2, {"grad_memory_budget": 0}, {"reduce_bucket_size": 10}, 0.0),
    ("muon", 3, {}, {}, 0.0),
    ("adafactor", 3, {"param_memory_budget": "all"}, {"sub_group_size": 40, "reduce_bucket_size": 60}, 0.3),
    ("noted", 2, {}, {}, 0.3),
    ("noted", 3, {}, {"sub_group_size": 40}, 0.0),
    ("mixed", 3, {"coalesce": False}, {"stage3_param_persistence_threshold": 0, "reduce_bucket_size": 10}, 0.3),
]


@pytest.mark.extended(but=("2",))
@pytest.mark.parametrize("world_size", [2, 4])
def test_training_is_that_of_plain_torch(world_size: int) -> None:
    def run() -> list[Any]:
        found: list[Any] = []
        for name, stage, options, zero, clip in CASES:
            off, zerosync, oracle = train(name, stage, world_size, options, zero, clip)
            report = zerosync.report
            sent = sum(traffic.bytes for traffic in report.collectives.values())
            stepping = zerosync.engine.optimizer.optimizer
            shapes = [tuple(param.shape) for group in stepping.param_groups for param in group["params"]]
            found.append((off, sent, report.floor_bytes, shapes))
            assert getattr(stepping, "steps", 3) == 3
            states = {param for param in stepping.state if stepping.state[param]}
            assert states == {param for group in stepping.param_groups for param in group["params"]}
            assert len(stepping.param_groups) == len(oracle.optimizer.param_groups)
        return found

    by_rank = run_ranks(run, world_size=world_size)
    for (name, stage, options, _, _), *of_ranks in zip(CASES, *by_rank, strict=True):
        assert [off for off, *_ in of_ranks] == [0.0] * world_size, (name, options)
        if not options and stage < 3:  # else there are more reductions, the norm, or exchanges
            mean = sum(sent for _, sent, *_ in of_ranks) / world_size
            norm = 48 * 2 * (world_size - 1) / world_size
            assert mean - norm == pytest.approx(of_ranks[0][2], rel=0.01)
        owned = Counter(shape for *_, shapes in of_ranks for shape in shapes)
        assert owned == Counter(tuple(param.shape) for param in network(name != "muon").parameters())


def test_owners_are_balanced() -> None:
    for matrices, world_size in itertools.product((1, 16, 200), (2, 8, 64, 1024)):
        numels = [1024] * matrices + [32] * matrices + [9000]
        owners = assign_owners([1.0] * matrices + [0.0] * (matrices + 1), numels, world_size)
        assert max(Counter(owners[:matrices]).values()) == -(-matrices // world_size)
        held = Counter()
        for owner, numel in zip(owners, numels, strict=True):
            held[owner] += numel
        assert max(held.values()) <= sum(numels) / world_size + max(numels)


@pytest.mark.parametrize("stage", [2, 3])
def test_frozen_edited_and_shown(stage: int) -> None:
    """A parameter that is frozen for a while; gradients and parameters that the program looks at and changes."""

    def run() -> float:
        net, plain = network(), network()
        engine = make_engine(net, mixed(net), stage, {"reduce_bucket_size": 60})
        zerosync = attach(engine)
        oracle = Oracle(plain, mixed(plain))
        for k in range(5):
            for each in (net, plain):
                each[1].requires_grad_(k not in (1, 2))
            engine.backward(engine(data(k, rank())).square().mean())
            oracle.backward(lambda r, k=k: plain(data(k, r)).square().mean())
            if k == 3:
                with zerosync.full_gradients():
                    means = dict(zip(oracle.parameters, oracle.gradients(), strict=True))
                    for param, same in zip(net.parameters(), plain.parameters(), strict=True):
                        assert distance({"": param.grad}, {"": means[same]}) == 0.0
                        param.grad.mul_(0.5)
                oracle.ranks = [[grad * 0.5 for grad in grads] for grads in oracle.ranks]
            if k == 4:
                zerosync.reduce()
                first, *others = net.parameters()
                safe_update_full_grad_vectorized([first], lambda grad, _: grad.clamp(-0.01, 0.02))
                for param in others:
                    safe_set_full_grad(param, safe_get_full_grad(param).clamp(-0.01, 0.02))
                oracle.ranks = [[mean.clamp(-0.01, 0.02) for mean in oracle.gradients()]] * 2
                if stage == 3:
                    with pytest.raises(ValueError, match=r"not sharded. Use safe_get_full_grad\(\)"):
                        safe_get_local_grad(first)
            engine.step()
            oracle.step()
            if k == 2:
                with zerosync.full_parameters(), torch.no_grad():
                    for each in (net, plain):
                        each[2].weight.clamp_(-0.1, 0.1)
                safe_set_full_fp32_param(net[3].weight, torch.ones(WIDTHS[4], WIDTHS[3]))
                plain[3].weight.data.fill_(1.0)
        momentum = safe_get_full_optimizer_state(net[0].weight, "momentum")
        assert distance({"": momentum}, {"": oracle.state_of(plain[0].weight, "momentum")}) == 0.0
        assert torch.equal(safe_get_full_fp32_param(net[3].weight), full_parameters(net)["3.weight"])
        with pytest.raises(RuntimeError, match=r"Mixed, which needs whole parameters"):
            zerosync.detach()
        return distance(full_parameters(net), full_parameters(plain))

    assert run_ranks(run) == [0.0, 0.0]


@pytest.mark.extended(but=("adafactor-3",))
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_checkpoints(name: str, stage: int, tmp_path: Path) -> None:
    """Saved and loaded, training goes on to the bit; DeepSpeed's own script reads the weights."""

    def run() -> float:
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

        def built() -> tuple[Any, Any]:
            net = network(name != "muon")
            engine = make_engine(net, OPTIMIZERS[name](net), stage, {"reduce_bucket_size": 60}, bf16={"enabled": True})
            attach(engine)
            return net, engine

        def steps(engine: Any, first: int, last: int) -> None:
            for k in range(first, last):
                engine.backward(engine(data(k, rank()).bfloat16()).float().square().mean())
                engine.step()

        net, engine = built()
        steps(engine, 0, 3)
        engine.save_checkpoint(str(tmp_path))
        masters = get_fp32_state_dict_from_zero_checkpoint(str(tmp_path))
        full = full_parameters(net)
        assert all(torch.equal(masters[key].bfloat16().float(), full[key]) for key in full)
        steps(engine, 3, 5)
        other, resumed = built()
        steps(resumed, 7, 8)
        resumed.load_checkpoint(str(tmp_path))
        steps(resumed, 3, 5)
        return distance(full_parameters(net), full_parameters(other))

    assert run_ranks(run) == [0.0, 0.0]


def test_what_it_cannot_do_is_refused() -> None:
    def run() -> None:
        for stage in (2, 3):
            engine = make_engine(net := network(), mixed(net), stage, {"offload_optimizer": {"device": "cpu"}})
            with pytest.raises(ValueError, match="Mixed, which needs whole parameters, and 'zero_opt"):
                attach(engine)

    run_ranks(run)


@pytest.mark.parametrize("stage", [2, 3])
def test_an_engine_that_is_refused_trains_on(stage: int) -> None:
    """What `attach()` raises, it raises with DeepSpeed's engine as it was."""

    def run() -> None:
        net, plain = network(), network()
        engine, oracle = make_engine(net, Mixed(net.parameters(), whole=False), stage), None
        oracle = Oracle(plain, Mixed(plain.parameters(), whole=False), 2)
        for k in range(3):
            engine.backward(engine(data(k, rank())).square().mean())
            engine.step()
            oracle.backward(lambda r, k=k: plain(data(k, r)).square().mean())
            oracle.step()
            if k == 0:
                with pytest.raises(ValueError, match="has stepped flat shards"):
                    attach(engine, elementwise_optimizer="whole")
        assert distance(full_parameters(net), full_parameters(plain)) == 0.0
        zerosync = attach(engine, elementwise_optimizer=True)
        engine.backward(engine(data(3, rank())).square().mean())
        engine.step()
        zerosync.detach()
        engine.backward(engine(data(4, rank())).square().mean())
        engine.step()

    run_ranks(run)


def test_deepspeeds_own_muon_says_what_to_use() -> None:
    def run() -> None:
        start()
        config = configuration(2, optimizer={"type": "Muon", "params": {"lr": 0.05}})
        engine, *_ = deepspeed.initialize(model=network(bias=False), config=config, dist_init_required=False)
        with pytest.raises(ValueError, match=r"DeepSpeed's own Muon.*torch\.optim\.Muon"):
            attach(engine)

    run_ranks(run)
