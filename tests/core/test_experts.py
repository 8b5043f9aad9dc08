"""Experts without tokens: a parameter that some ranks do not use, inside a module that all ranks run (W4).

Under ZeRO-3 its gradient comes, or does not come, between the gathers of the backward. Reductions and gathers share
one order of calls, so it must not depend on which gradients a rank has.
"""

from typing import Any

import pytest
import torch
from deepspeed.utils import set_z3_leaf_modules
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.harness.engines import make_engine, rank
from tests.harness.experts import Switch, Tables, gathered_anew
from tests.harness.native import send_natively
from tests.harness.oracle import Oracle, distance, full_parameters
from tests.harness.ranks import run_ranks
from zerosync_strategy import attach
from zerosync_strategy.core.comm import nodes
from zerosync_strategy.core.gradients import reducer
from zerosync_strategy.core.params import unit_order
from zerosync_strategy.core.params.units import Unit

WIDTH, EXPERTS, LAYERS, TOKENS, STEPS = 8, 4, 2, 4, 3
ZERO = {"stage3_param_persistence_threshold": 0, "reduce_bucket_size": 300}


class Transformer(nn.Module):
    """Layers of attention's place, a switch and tables, the last two with unused parameters on most ranks."""

    def __init__(self, recompute: str = "") -> None:
        super().__init__()
        torch.manual_seed(2)
        self.read = nn.Linear(WIDTH, WIDTH)
        self.mixers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.switches = nn.ModuleList(Switch(WIDTH, EXPERTS) for _ in range(LAYERS))
        self.tables = Tables(WIDTH, EXPERTS)
        self.write = nn.Linear(WIDTH, WIDTH)
        self.recompute = recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.read(x)
        for mixer, switch in zip(self.mixers, self.switches, strict=True):

            def layer(x: torch.Tensor, mixer: nn.Module = mixer, switch: nn.Module = switch) -> torch.Tensor:
                return x + switch(torch.tanh(mixer(x)))

            x = checkpoint(layer, x, use_reentrant=self.recompute == "reentrant") if self.recompute else layer(x)
        return self.write(self.tables(torch.tanh(x)) + self.mixers[0](x)).square().mean()  # a module that runs twice


def data(k: int, of_rank: int) -> torch.Tensor:
    return torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(100 * k + of_rank))


def train(world: int, promised: bool, recompute: str, zero: dict[str, Any], options: dict[str, Any]) -> Any:
    """How far from plain torch the parameters are, how many gradients ranks lacked, and reductions before the close."""
    net, plain = Transformer(recompute), Transformer()
    set_z3_leaf_modules(net, [Switch])
    engine = make_engine(net, torch.optim.SGD(net.parameters(), lr=0.3), 3, {**ZERO, **zero})
    zerosync = attach(engine, **options)
    oracle = Oracle(plain, torch.optim.SGD(plain.parameters(), lr=0.3), world)
    early = lacking = 0
    for k in range(2 * STEPS):
        with torch.no_grad():
            engine(data(k, rank()))  # is no part of the graph
        loss = engine(data(k, rank()))
        if k % 2 and promised:
            zerosync.window.expect_last()
        engine.backward(loss / 2)
        oracle.backward(lambda r, k=k: plain(data(k, r)) / 2)
        if k % 2:
            lacking += sum(grad is None for grads in oracle.ranks for grad in grads)
            early += zerosync.window.early_reductions
            oracle.step()
            engine.step()
    return distance(full_parameters(net), full_parameters(plain)), lacking, early


CASES: list[tuple[bool, str, dict[str, Any], dict[str, Any]]] = [
    # the last backward is promised, recomputation, options of DeepSpeed, of ZeroSync
    (True, "", {}, {}),
    (True, "reentrant", gathered_anew(), {}),
    (False, "non-reentrant", {}, {"coalesce": False}),
    (True, "", {"stage3_max_live_parameters": 0}, {"grad_memory_budget": 0}),
    (True, "", {}, {"param_memory_budget": 3000}),
    (False, "", {}, {"param_memory_budget": {"device": 2000, "host": "all"}, "grad_memory_budget": 2000}),
]


@pytest.mark.extended
@pytest.mark.parametrize(("world", "native"), [(2, False), (2, True), (4, True)])
def test_parameters_that_some_ranks_do_not_use(world: int, native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By native collectives, nothing but their order on the one process group decides what meets what."""
    monkeypatch.setattr(nodes, "WITHIN_HOST", nodes.MessageSizes(400, 2))
    monkeypatch.setattr(reducer, "SMALL_BYTES", 400)
    if native:
        send_natively(monkeypatch)
    cases = CASES[: 4 if world == 4 else None]

    def run() -> Any:
        return [train(world, *case) for case in cases]

    for case, (error, lacking, early) in zip(cases, run_ranks(run, world_size=world, timeout=200)[0], strict=True):
        assert error == 0.0 and lacking > 5, (error, lacking, case)
        every = case[3].get("coalesce") is False or "grad_memory_budget" in case[3]
        assert early == (2 * STEPS if every else STEPS), case


def test_forwards_without_a_backward_are_not_noted_down_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unit_order, "LONGEST", 10)
    layer = nn.Linear(1, 1)
    order, unit = unit_order.UnitOrder(), Unit(layer, layer.parameters(), False)
    for _ in range(95):
        order.begins(unit)
        order.ends(unit)
    assert len(order._ended[unit]) == 5
    order.backward_begins()
    assert order.comes_to(unit) == 5 and order.first_uses() == {id(param): 1 for param in layer.parameters()}
