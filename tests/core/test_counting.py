"""What each engine counts where it issues its collectives is what the process sends, in kinds, calls and bytes."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.core.test_nodes import node
from tests.harness.data import noise
from tests.harness.engines import make_engine, rank, start
from tests.harness.networks import stack
from tests.harness.optimizers import muon
from tests.harness.ranks import run_ranks
from tests.harness.strict import strict
from zerosync_strategy import ZeroSync, attach
from zerosync_strategy.core.comm.journal import SentCounter, Traffic
from zerosync_strategy.core.comm.nodes import Topology
from zerosync_strategy.core.optimizer import exchanged
from zerosync_strategy.core.params import values
from zerosync_strategy.tools.plan.measures import ProcessCounter

WIDTH, STEPS, BACKWARDS = 16, 4, 2
NODE = {"device": 0, "node": "all"}
CASES: list[tuple[str, int, int, dict[str, Any]]] = [  # the optimizer, stage, ranks per node
    ("adamw", 1, 4, {"grad_memory_budget": 900}),
    ("adamw", 2, 2, {"grad_memory_budget": NODE}),
    ("adamw", 2, 4, {"loss_reduction": "sum"}),
    ("adamw", 3, 4, {}),
    ("adamw", 3, 2, {"param_memory_budget": NODE, "grad_memory_budget": NODE}),
    ("adamw", 3, 4, {"param_memory_budget": "all", "reduction": "ordered"}),
    ("muon", 1, 2, {}),
    ("muon", 2, 4, {"coalesce": False}),
    ("muon", 3, 2, {"param_memory_budget": 2000}),
]
inputs = noise(4, WIDTH)


def network(optimizer: str, seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    if optimizer == "adamw":
        module: nn.Module = stack(WIDTH, 3, seed)
        return module, torch.optim.AdamW(module.parameters(), lr=1e-3)
    module = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(5)])
    return module, muon(module)


def counted(
    handles: Sequence[ZeroSync], node_size: int, step: Callable[[int], None]
) -> list[tuple[dict[str, Traffic], dict[str, Traffic]]]:
    """By step, what the reports have with the words that ranks say to each other, and what the process sends."""
    between, found = Topology(node_size, dist.group.WORLD).between, []
    words = SentCounter(between)  # in what is left of DeepSpeed's step, nothing is sent

    def noting(stock: Any) -> Any:
        def largest(said: Sequence[int], process_group: Any) -> Any:
            words.add("all_reduce", 8 * len(said), process_group)
            return stock(said, process_group)

        return largest

    with pytest.MonkeyPatch.context() as patch, ProcessCounter(between) as process:
        for module in (exchanged, values):  # whether masters were edited, and what no hook gathers
            patch.setattr(module, "largest", noting(module.largest))
        for k in range(STEPS):
            step(k)
            total: dict[str, Traffic] = {}
            for sent in (words.take(), *(handle.report.collectives for handle in handles if handle.report)):
                total = {kind: total.get(kind, Traffic()) + sent.get(kind, Traffic()) for kind in {*total, *sent}}
            assert not any(handle.report is not None and handle.report.apart for handle in handles)
            found.append((total, dict(process.take())))
    return found


@pytest.mark.extended(but=("False",))
@pytest.mark.parametrize("native", [False, True])
def test_a_report_has_what_the_process_sends(native: bool) -> None:
    def train(name: str, stage: int, node_size: int, options: dict[str, Any]) -> Any:
        module, optimizer = network(name)
        zero = {"reduce_bucket_size": 4 * WIDTH * WIDTH, "stage3_param_persistence_threshold": WIDTH}
        engine = make_engine(module, optimizer, stage, zero)
        zerosync = attach(engine, node_size=node_size, **options)

        def step(k: int) -> None:
            for _ in range(BACKWARDS):
                if "loss_reduction" in options:
                    zerosync.mean_over(4)
                engine.backward(engine(inputs(k, rank())).square().sum())
            engine.step()

        return counted([zerosync], node_size, step)

    def run() -> Any:
        start()
        with strict() if native else nullcontext():
            return [train(*case) for case in CASES]

    for of_rank in run_ranks(run, world_size=4, timeout=240, env=node(2)):
        for case, steps in zip(CASES, of_rank, strict=True):
            for of_report, of_process in steps:
                assert of_report == of_process != {}, case


@pytest.mark.extended(but=("3",))
@pytest.mark.parametrize("stage", [2, 3])
def test_several_engines_of_a_process_have_it_between_them(stage: int) -> None:
    """Each its own, also where a forward of one is between forward and backward of the other."""

    def run() -> Any:
        zero = {"stage3_param_persistence_threshold": 0} if stage == 3 else {}
        first, second = engines = [make_engine(*network("adamw", seed), stage, zero) for seed in (0, 1)]
        handles = [attach(engine) for engine in engines]

        def step(k: int) -> None:
            second.backward(second(first(inputs(k, rank())).detach()).square().mean())
            second.step()
            first.backward(first(inputs(k, rank())).square().mean())
            first.step()

        return counted(handles, 2, step), [handle.report.ratio for handle in handles if handle.report]

    for steps, ratios in run_ranks(run):
        for of_reports, of_process in steps:
            assert of_reports == of_process != {}
        assert all(1.0 <= ratio < 1.1 for ratio in ratios), ratios
