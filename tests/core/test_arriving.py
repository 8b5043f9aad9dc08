"""U5: with `overlap_gather`, whoever reads a parameter after a step waits for it, and for nothing else."""

import copy
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from tests.harness import engines
from tests.harness.engines import attached_of, rank
from tests.harness.networks import stack
from tests.harness.oracle import Oracle, distance, full_parameters, of_trained
from tests.harness.ranks import SIMULATED, run_ranks
from tests.harness.rounding import excess
from zerosync_strategy import attach
from zerosync_strategy.core.comm import messages
from zerosync_strategy.core.comm.collectives import InFlight
from zerosync_strategy.core.comm.streams import Streams
from zerosync_strategy.core.gradients import placement

WIDTH, LAYERS = 16, 5


def loss_of(module: Any, k: int, of_rank: int) -> torch.Tensor:
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * k + of_rank))
    return (module(x) - 0.2).square().mean()


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=0.03)


@pytest.fixture(autouse=True)
def nothing_arrives_before_it_is_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read too early is not a number. Gathers are made when they are waited for."""
    gather = placement.all_gather

    def late(rows: torch.Tensor, *told: Any) -> InFlight:
        issued_on = Streams().caller

        def made() -> Any:  # after what was issued before it, as if it had been made at once
            if issued_on is not None:
                Streams().caller_waits_for([issued_on])
            return gather(rows, *told).wait()

        for of_rank, row in enumerate(rows):
            if of_rank != rank():
                row.fill_(torch.nan)
        return InFlight((), made)

    monkeypatch.setattr(placement, "all_gather", late)
    monkeypatch.setattr(messages, "WITHIN_HOST", messages.Messages(1100, 2))


class Biases(list[torch.Tensor]):
    """A list that torch's pytree does not know."""


READS: dict[str, Callable[[nn.Module], Any]] = {
    "nothing": lambda net: 0,
    "state_dict": lambda net: list(net.state_dict().values()),
    "norms": lambda net: [param.norm() for param in net.parameters()],
    "one": lambda net: [net[3][0].weight[0, :3]],
    "data": lambda net: [param.data.clone() for param in net.parameters()],
    "foreach": lambda net: torch._foreach_mul(list(net.parameters()), 2.0),
    "a stack": lambda net: [torch.stack([layer[0].bias for layer in net])],
    "a list of its own": lambda net: [torch.stack(Biases(layer[0].bias for layer in net))],
    "a keyword": lambda net: [torch.add(input=net[0][0].bias, other=net[1][0].bias)],
    "deepcopy": lambda net: list(copy.deepcopy(net).parameters()),
    "numpy": lambda net: [torch.from_numpy(param.detach().numpy().copy()) for param in net.parameters()],
    "numbers": lambda net: [torch.tensor(net[2][0].bias.tolist())],
    "a vector": lambda net: [nn.utils.parameters_to_vector(net.parameters())],
    "an evaluation": lambda net: [net(torch.ones(1, WIDTH))],
    "text": lambda net: [torch.tensor(float(len(repr(net[0][0].bias)) > 0))],
    "a clamp": lambda net: [param.clamp_(-0.2, 0.2) for param in net.parameters()],
    "a copy": lambda net: [net[1][0].weight.copy_(net[4][0].weight), net[1][0].weight],
}


@pytest.mark.extended(but=("2-2",))
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("ranks", [2, 3])
def test_whatever_is_read_is_there(stage: int, ranks: int) -> None:
    def run() -> None:
        for seed in range(12):
            draw = random.Random(seed)
            net, plain = stack(WIDTH, LAYERS, seed=2), stack(WIDTH, LAYERS, seed=2)
            engine = engines.make_engine(net, adamw(net), stage)
            attach(engine, overlap_gather=True)
            oracle = Oracle(plain, adamw(plain), ranks)
            kept = [net[0][0].weight, net[2][0].bias]  # from before the steps
            for k in range(4):
                engine.backward(loss_of(engine, k, rank()))
                engine.step()
                oracle.backward(lambda of_rank, k=k, plain=plain: loss_of(plain, k, of_rank))
                oracle.step()
                for name in draw.sample(sorted(READS), 2):
                    with torch.no_grad():
                        here = READS[name](net)
                        there = of_trained(plain, lambda read=READS[name], plain=plain: read(plain))
                    if here:
                        for one, other in zip(here, there, strict=True):
                            assert excess(one, other) == 0.0, (seed, k, name)
                if draw.random() < 0.5:
                    assert not any(param.isnan().any() for param in kept)
            assert distance(full_parameters(net), full_parameters(plain)) == 0.0, seed
            assert type(net[0][0].weight) is nn.Parameter
            engine.destroy()

    run_ranks(run, world_size=ranks)


@pytest.mark.off_device("it counts what its own gathers wait for, made when they are waited for")
def test_a_layer_waits_for_its_own_parameters_alone() -> None:
    def run() -> None:
        net = stack(WIDTH, LAYERS, seed=2)
        engine = engines.make_engine(net, adamw(net), 2)
        zerosync = attach(engine, overlap_gather=True)
        engine.backward(loss_of(engine, 0, rank()))
        engine.step()
        arriving = attached_of(zerosync).weights.arriving
        everything = len(arriving._of)
        assert everything == 2 * LAYERS
        for param in net.parameters():  # none of this needs values
            assert (param.shape, param.dtype, param.requires_grad, param.grad)[1] is torch.float32
            param.grad = None
            param.requires_grad_(True)
        engine.zero_grad()
        assert len(arriving._of) == everything
        left = []
        for layer in net:
            layer.register_forward_hook(lambda *_: left.append(len(arriving._of)))
        engine.backward(loss_of(engine, 1, rank()))
        assert left == [everything - 2 * (index + 1) for index in range(LAYERS)]

    run_ranks(run)


@pytest.mark.parametrize("leave", ["checkpoint", "detach", "destroy", "load", "unused"])
def test_what_follows_a_step_waits(leave: str, tmp_path: Path) -> None:
    def run() -> float:
        net, plain = stack(WIDTH, LAYERS, seed=2), stack(WIDTH, LAYERS, seed=2)
        engine = engines.make_engine(net, adamw(net), 2)
        zerosync = attach(engine, overlap_gather=True)
        oracle = Oracle(plain, adamw(plain))
        for k in range(2):
            engine.backward(loss_of(engine if leave != "unused" else lambda x: net[0](x), k, rank()))
            engine.step()
            oracle.backward(lambda of_rank, k=k: loss_of(plain if leave != "unused" else plain[0], k, of_rank))
            oracle.step()
            if k == 0 and leave == "load":
                engine.save_checkpoint(str(tmp_path))
        if leave == "checkpoint":
            engine.save_checkpoint(str(tmp_path))
            engine.load_checkpoint(str(tmp_path))
        elif leave == "load":
            engine.load_checkpoint(str(tmp_path))
            engine.backward(loss_of(engine, 1, rank()))
            engine.step()
        elif leave == "detach":
            zerosync.detach()
        elif leave == "destroy":
            engine.destroy()
        if leave == "unused":  # the layers that no forward has read since the first step
            names = [name for name, _ in plain.named_parameters() if name.startswith("0.")]
            ours, theirs = full_parameters(net), full_parameters(plain)
            return distance({name: ours[name] for name in names}, {name: theirs[name] for name in names})
        return distance(full_parameters(net), full_parameters(plain))

    assert run_ranks(run) == [0.0, 0.0]


def test_stage_3_has_no_such_gather() -> None:
    def run() -> None:
        net = stack(WIDTH, LAYERS, seed=2)
        with pytest.raises(ValueError, match="'overlap_gather' is for the gather after a step of ZeRO stages 1 and 2"):
            attach(engines.make_engine(net, adamw(net), 3), overlap_gather=True)

    run_ranks(run)


class PartlyCompiled(nn.Module):
    """`whole`: by the caller; else a function of it that is given a parameter."""

    def __init__(self, whole: bool) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.__dict__["mix"] = _mix if whole else torch.compile(_mix, backend="aot_eager")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.mix(self.first(x), self.second.weight))


def _mix(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ weight.T)


@pytest.mark.extended(but=("True",))
@pytest.mark.parametrize("whole", [True, False])
def test_compiled_code_reads_what_is_there(whole: bool) -> None:
    def run() -> tuple[float, int]:
        net, plain = PartlyCompiled(whole), PartlyCompiled(True)
        if whole:
            net.compile(backend="aot_eager")
        engine = engines.make_engine(net, adamw(net), 2)
        attach(engine, overlap_gather=True)
        oracle = Oracle(plain, adamw(plain))
        for k in range(4):
            engine.backward(loss_of(engine, k, rank()))
            engine.step()
            oracle.backward(lambda of_rank, k=k: loss_of(plain, k, of_rank))
            oracle.step()
        return distance(full_parameters(net), full_parameters(plain)), counters["stats"]["unique_graphs"]

    compiles = whole and SIMULATED not in os.environ  # there, what is compiled runs as it is written
    for error, graphs in run_ranks(run):
        assert error == 0.0
        assert graphs == 1 or not compiles
