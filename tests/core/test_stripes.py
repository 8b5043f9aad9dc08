"""Stages 1 and 2 by stripes (R3): shards are exchanged with DeepSpeed's layout, and checkpoints are in that."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from torch import nn

from tests.harness import engines
from tests.harness.data import noise
from tests.harness.engines import attached_of, rank
from tests.harness.oracle import Oracle, distance, full_parameters
from tests.harness.ranks import run_ranks
from tests.harness.releases import except_from
from zerosync_strategy import attach
from zerosync_strategy.core.comm import nodes
from zerosync_strategy.core.comm.journal import SentCounter
from zerosync_strategy.core.gradients.stage12 import Stripes

WIDTHS = (7, 5, 11, 3, 6)


@pytest.mark.parametrize("starts", [[0], [0, 1, 2, 100], [0, 30, 31, 200, 359], [0, 24, 48, 72]])
def test_an_exchange_and_back(starts: list[int]) -> None:
    def run() -> None:
        engines.start()
        flat = torch.randn(360, generator=torch.Generator().manual_seed(1))
        stripes = Stripes(starts, 360, rank(), 3)
        stock, striped = torch.zeros(120), torch.zeros(120)
        for own in stripes.slices(stock=True):
            stock[own.offset : own.offset + own.stop - own.start] = flat[own.start : own.stop]
        for own in stripes.slices():
            striped[own.offset : own.offset + own.stop - own.start] = flat[own.start : own.stop]
        cpu, counter = torch.device("cpu"), SentCounter()
        assert torch.equal(stripes.exchange(stock, True, dist.group.WORLD, counter, cpu), striped)
        assert torch.equal(stripes.exchange(striped, False, dist.group.WORLD, counter, cpu), stock)
        for begin, end in ((0, 360), (17, 18), (50, 333)):
            for of_stock, shard in ((False, striped), (True, stock)):
                for own in stripes.slices_of(begin, end, of_stock):
                    part = shard[own.offset : own.offset + own.stop - own.start]
                    assert torch.equal(part, flat[begin:end][own.start : own.stop])

    run_ranks(run, world_size=3)


def model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(*[nn.Linear(a, b) for a, b in itertools.pairwise(WIDTHS)])


def make_engine(stage: int, config: dict[str, Any], zero: dict[str, Any]) -> Any:
    module = model()
    return engines.make_engine(module, optimizer_of(module), stage, zero, **config)


def optimizer_of(module: nn.Module) -> torch.optim.Optimizer:
    params = list(module.parameters())
    groups = [{"params": params[:3]}, {"params": params[3:], "weight_decay": 0.3}]
    return torch.optim.AdamW(groups, lr=0.05)


inputs = noise(4, WIDTHS[0])


def train(engine: Any, steps: range) -> None:
    for k in steps:
        x = inputs(k, rank())
        engine.backward(engine(x.to(next(engine.module.parameters()).dtype)).float().square().mean())
        engine.step()


def plain_torch(steps: int, ranks: int) -> dict[str, torch.Tensor]:
    module = model()
    return Oracle(module, optimizer_of(module), ranks).train(
        lambda module, k, of_rank: module(inputs(k, of_rank)).square().mean(), steps
    )


@pytest.mark.extended
@except_from("0.18.7", "0.19.0", "stock cannot step on stages 1 and 2 with every torch")
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("kind", ["fp32", "bf16", "offload"])
def test_checkpoints_are_deepspeeds(kind: str, stage: int, ranks: int, tmp_path: Path) -> None:
    """Written by either, read by either, and by DeepSpeed's converter; training goes on as without them."""
    config = {"bf16": {"enabled": True}} if kind == "bf16" else {}
    zero = {"offload_optimizer": {"device": "cpu"}} if kind == "offload" else {}

    def run() -> None:
        nodes.WITHIN_HOST = nodes.NATIVE = nodes.MessageSizes(100, 2)
        engine = make_engine(stage, config, zero)
        zerosync = attach(engine)
        stripes = [layout.stripes for layout in attached_of(zerosync).parts.reducer.layouts]
        assert not any(each.is_stock for each in stripes)
        train(engine, range(3))
        engine.save_checkpoint(str(tmp_path / "ours"))
        if rank() == 0:
            converted = get_fp32_state_dict_from_zero_checkpoint(str(tmp_path / "ours"))
        for name, param in engine.module.named_parameters():
            master = safe_get_full_fp32_param(param)
            assert distance({"": master}, {"": param.float()}) < 5e-2
            if rank() == 0:
                assert torch.equal(converted[name], master), name
        train(engine, range(3, 5))
        moments = [safe_get_full_optimizer_state(param, "exp_avg") for param in engine.module.parameters()]
        result = full_parameters(engine.module)

        def error(of: Any, steps: int, ours: dict[str, torch.Tensor]) -> float:
            """From plain torch. In bf16, from ours: DeepSpeed's own sums are not in fp32."""
            found = full_parameters(of.module)
            if kind == "bf16":
                return max(0.0, distance(found, ours) - 5e-3)
            return distance(found, plain_torch(steps, ranks))

        for attached in (False, True):
            other = make_engine(stage, config, zero)
            if attached:
                attach(other)
                train(other, range(7, 8))  # what is loaded replaces it
            other.load_checkpoint(str(tmp_path / "ours"))
            train(other, range(3, 5))
            assert error(other, 5, result) == 0.0, attached
            if not attached:
                other.load_checkpoint(str(tmp_path / "ours"))
                other.save_checkpoint(str(tmp_path / "theirs"))
                continue
            # To the bit: who has trained on without a checkpoint has made the same operations, on the same layout.
            assert distance(full_parameters(other.module), result) == 0.0
            for param, moment in zip(other.module.parameters(), moments, strict=True):
                assert torch.equal(safe_get_full_optimizer_state(param, "exp_avg"), moment)
            other.load_checkpoint(str(tmp_path / "theirs"))
            train(other, range(3, 5))
            assert distance(full_parameters(other.module), result) == 0.0
        zerosync.detach()
        train(engine, range(5, 6))  # DeepSpeed's own again, with the same weights and states
        train(other, range(5, 6))
        assert error(engine, 6, result := full_parameters(engine.module)) == error(other, 6, result) == 0.0

    run_ranks(run, world_size=ranks)


def test_states_by_blocks_are_refused() -> None:
    class Blockwise(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            super().step()
            for group in self.param_groups:
                for param in group["params"]:
                    self.state[param]["absmax"] = torch.ones(4)

    def run() -> None:
        nodes.WITHIN_HOST = nodes.NATIVE = nodes.MessageSizes(100, 2)
        module = model()
        engine = engines.make_engine(module, Blockwise(module.parameters(), lr=0.1), 2)
        attach(engine)
        with pytest.raises(RuntimeError, match=r"Blockwise keeps a state 'absmax' of shape \(4,\)"):
            train(engine, range(1))

    run_ranks(run)


def test_shards_stay_in_one_piece_for_states_by_blocks() -> None:
    """Blocks of consecutive elements, as bitsandbytes has them, here of numbers that need none."""

    class AdamW8bit(torch.optim.AdamW):
        __module__ = "bitsandbytes.optim.adamw"

    def run() -> float:
        nodes.WITHIN_HOST = nodes.NATIVE = nodes.MessageSizes(100, 2)
        module, plain = model(), model()
        engine = engines.make_engine(module, AdamW8bit(module.parameters(), lr=0.05), 2)
        with pytest.raises(ValueError, match="AdamW8bit keeps its states by blocks of elements"):
            attach(engine, coalesce=False)
        zerosync = attach(engine)
        assert all(layout.stripes.is_stock for layout in attached_of(zerosync).parts.reducer.layouts)
        oracle = Oracle(plain, torch.optim.AdamW(plain.parameters(), lr=0.05))
        for k in range(3):
            zerosync.window.expect_last()
            engine.backward(engine(inputs(k, rank())).square().mean())
            engine.step()
            oracle.backward(lambda of_rank, k=k: plain(inputs(k, of_rank)).square().mean())
            oracle.step()
        return distance(full_parameters(module), full_parameters(plain))

    assert run_ranks(run) == [0.0, 0.0]
