"""ZeroSync leaves nothing unordered (B1, B2, B3), every wait of it is needed, and stock DeepSpeed as the control."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from deepspeed.accelerator import get_accelerator

from tests.harness.copying import loss_of, make_engine, oracle
from tests.harness.engines import attached_of, rank
from tests.harness.extended import STAGES
from tests.harness.oracle import distance, full_parameters
from tests.harness.racecheck import Kind, simulate
from tests.harness.ranks import run_ranks
from tests.racecheck import scenarios
from tests.racecheck.scenarios import WIDTH, train
from zerosync_strategy import attach
from zerosync_strategy.core.comm.streams import Streams
from zerosync_strategy.core.params.copies import HostCache

OFFLOAD = {"offload_optimizer": {"device": "cpu", "pin_memory": True}}
SCENARIOS: dict[str, dict[str, Any]] = {
    "coalesced": {"ours": {"overlap_last": False}},
    "expected": {"ours": {}},  # the first window surprises, the second does not
    "not coalesced": {"ours": {"coalesce": False}},
    "budget": {"ours": {"grad_memory_budget": 20_000}},
    "overlap_last": {"ours": {}, "last": True},
    "ordered": {"ours": {"reduction": "ordered"}, "last": True},
    "oversized": {"ours": {"coalesce": False}, "oversized": True},
    "round robin": {"ours": {}, "last": True, "zero": {"round_robin_gradients": True}},
    "bf16": {"ours": {"coalesce": False}, "bf16": {"enabled": True}},
    "bf16, fp32 sums": {
        "ours": {"coalesce": False}, "bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"},
    },
    # DeepSpeed looks for infinities in the gradients, on stage 3 on the stream of its own reductions.
    "fp16": {"ours": {"coalesce": False}, "fp16": {"enabled": True, "initial_scale_power": 8}},
    "offload": {"ours": {"coalesce": False}, "zero": OFFLOAD},
    # It has no event to wait for, and may be given the memory of the last window's gradient shards.
    "a bucket without a gradient": {"ours": {"coalesce": False}, "unused": True, "sgd": True},
    "no overlap_comm": {"ours": {"coalesce": False}, "zero": {"overlap_comm": False}},
}  # fmt: skip


def findings(*args: Any, **kwargs: Any) -> list[tuple[Kind, str]]:
    """Of all ranks, each once."""
    found = run_ranks(lambda: [(finding.kind, str(finding)) for finding in train(*args, **kwargs)])
    return sorted({finding for of_rank in found for finding in of_rank}, key=str)


@pytest.mark.extended(
    but=(
        "coalesced",
        "not coalesced",
        "overlap_last",
        "offload",
        "a bucket without a gradient",
    )
)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_nothing_is_left_unordered(scenario: str) -> None:
    stages = (2, 3) if scenario == "bf16, fp32 sums" else (1, 2, 3)  # on stage 1 that is refused
    producers = (1, 2, 3) if scenario == "not coalesced" else (3,)

    def run() -> Any:
        options = SCENARIOS[scenario]
        return {(stage, n): list(map(str, train(stage, n, **options))) for stage in stages for n in producers}

    for found in run_ranks(run):
        assert not any(found.values()), found


COPIES_OFF = {"reduce_scatter": False, "contiguous_gradients": False}
RARER: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "all-reduce into gradients as they are": ((1, 2, 3), {"zero": COPIES_OFF}),
    "two dtypes": ((1, 2), {"half": True}),
    "compiled regions": ((1, 2), {"compiled": True}),  # which run as they are: Dynamo leaves the checker's modes alone
    "parameters and optimizer on the CPU": ((3,), {"zero": {**OFFLOAD, "offload_param": {"device": "cpu"}}}),
}  # fmt: skip


@pytest.mark.extended
@pytest.mark.parametrize("stage", STAGES)
def test_nothing_is_left_unordered_in_rarer_settings(stage: int) -> None:
    def run() -> Any:
        scenarios = {name: scenario for name, (stages, scenario) in RARER.items() if stage in stages}
        found = {name: train(stage, 3, {"coalesce": False}, **scenario) for name, scenario in scenarios.items()}
        return {name: list(map(str, findings)) for name, findings in found.items()}

    for found in run_ranks(run):
        assert not any(found.values()), found


@pytest.mark.extended
def test_nothing_is_left_unordered_with_a_mixture_of_experts() -> None:
    def run() -> Any:
        options: list[dict[str, Any]] = [{"coalesce": False}, {}]
        found = [train(stage, 3, ours, experts=True) for stage in (1, 2) for ours in options]
        return [list(map(str, findings)) for findings in found]

    assert run_ranks(run, world_size=4) == [[[]] * 4] * 4


HOST = {"ours": {"param_memory_budget": {"device": 4 * WIDTH * WIDTH, "host": "all"}}}


@pytest.mark.extended
def test_copies_on_the_host_are_ordered_by_the_gather_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are made and read there; made on the caller's stream, they are not."""
    assert findings(3, 3, **HOST) == []
    stock = HostCache.keep

    def keep_on_callers_stream(self: Any, params: Any) -> None:
        with get_accelerator().stream(get_accelerator().default_stream()):
            stock(self, params)

    monkeypatch.setattr(HostCache, "keep", keep_on_callers_stream)
    found = findings(3, 3, **HOST)
    assert any(of.value == "race" and "keep" in text for of, text in found), found


# Each rule, how it is switched off, where that shows, and in which words.
RULES = {
    "B1, producers": ("record_grad_ready", 2, SCENARIOS["not coalesced"], "race", "reduce_scatter"),
    "B1, producers, stage 3": ("record_grad_ready", 3, SCENARIOS["not coalesced"], "race", "reduce_scatter"),
    "B1, compiled regions": (
        "record_grad_ready",
        2,
        {"ours": {"coalesce": False}, "compiled": True},
        "race",
        "reduce_scatter",
    ),
    "B1, experts": ("record_grad_ready", 2, {"ours": {"coalesce": False}, "experts": True}, "race", "reduce_scatter"),
    "B3": ("wait_for_reductions", 2, SCENARIOS["coalesced"], "race", "step"),
    "L1, gradients": ("producers_wait", 2, SCENARIOS["bf16"], "reuse", "stage12.py"),
    "L1, earlier backwards": ("record_stream_for_reduction", 2, SCENARIOS["ordered"], "reuse", "reduce_scatter"),
    "S2": ("reductions_wait_for_caller", 2, SCENARIOS["a bucket without a gradient"], "reuse", "pack"),
    # A gather that fills memory of the caller's stream waits for its writes, too.
    "S1, L2": ("gathers_wait_for_writes gathers_wait_for_caller", 3, SCENARIOS["coalesced"], "race", "read by"),
}


@pytest.mark.extended(but=("B3",))
@pytest.mark.parametrize("rule", RULES)
def test_every_rule_is_needed(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    methods, stage, scenario, kind, place = RULES[rule]
    for method in methods.split():
        monkeypatch.setattr(Streams, method, lambda self, *args: None)
    found = findings(stage, 3, **scenario)
    assert any(of.value == kind and place in text for of, text in found), found


def test_gathers_of_rows_that_are_not_aligned_wait_for_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """S1: such a gather receives in memory of its own, and so waits for nothing else of its caller's stream."""
    monkeypatch.setattr(scenarios, "WIDTH", 33)
    assert findings(3, 3, **SCENARIOS["coalesced"]) == []
    monkeypatch.setattr(Streams, "gathers_wait_for_writes", lambda self, *args: None)
    found = findings(3, 3, **SCENARIOS["coalesced"])
    assert any(of.value == "race" and "read by _foreach_copy_" in text for of, text in found), found


def test_a_reduction_at_the_close_starts_after_the_backwards(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = Streams.on_reduction_stream
    monkeypatch.setattr(Streams, "on_reduction_stream", lambda self, events=None: stock(self, events or ()))
    found = findings(2, 1, **SCENARIOS["coalesced"])
    assert any(kind is Kind.RACE and "collectives.py" in text for kind, text in found), found


@pytest.mark.extended(but=("2",))
@pytest.mark.parametrize("stage", STAGES)
def test_stock_deepspeed(stage: int) -> None:
    """The control. Stages 1 and 2 overwrite a bucket that is being reduced; stage 3 gathers what is being written."""
    found = findings(stage, 3, oversized=stage == 1)
    assert any(kind is Kind.RACE for kind, _ in found)
    where = "_all_gather" if stage == 3 else "average_tensor"
    assert any(where in text for _, text in found), found


class _Forgets(set):  # type: ignore[type-arg]
    def add(self, stream: Any) -> None:
        pass


@pytest.mark.extended
def test_stock_deepspeed_without_its_record_of_producers() -> None:
    """As before upstream's PR 8080: a bucket is reduced while another producer still fills it."""

    def forget(engine: Any) -> None:
        for bucket in engine.optimizer.ipg_buckets.values():
            bucket.copy_streams = _Forgets()

    with_record, without = findings(2, 3), findings(2, 3, before=forget)
    assert len(without) > len(with_record)


@pytest.mark.extended(but=("3-0",))
@pytest.mark.parametrize(("stage", "budget"), [(1, 0), (2, 0), (3, 0), (3, "all")])
def test_what_is_captured_into_a_cuda_graph_is_refused(stage: int, budget: Any) -> None:
    """Simulated: no backward begins, nor a forward of ZeRO-3, and training goes on exactly."""

    def run() -> Any:
        with simulate():
            engine = make_engine(stage)
            zerosync = attach(engine, param_memory_budget=budget) if stage == 3 else attach(engine)
            streams = attached_of(zerosync).parts.reducer.streams
            engine.backward(loss_of(engine, 0, rank()))
            engine.step()
            refused = pytest.raises(
                RuntimeError, match=r"captured into a CUDA graph.*1 and 2, capture the forward alone; on stage 3,"
            )
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: captures)
                captures = False
                streams.has_graphs = True
                loss = loss_of(engine, 1, rank())
                zerosync.counter.take()
                captures = True
                for part in (engine, engine.module):
                    with refused if stage == 3 else nullcontext():
                        loss_of(part, 1, rank())
                with refused:
                    engine.backward(loss)
            streams.has_graphs = False
            sent = {kind for kind in zerosync.counter.take() if stage == 3 or "gather" not in kind}
            state = zerosync.window.state.value
            engine.backward(loss_of(engine, 1, rank()))
            engine.step()
        return sent, state, full_parameters(engine.module)

    for sent, state, parameters in run_ranks(run):
        assert sent == set() and state == "closed"
        assert distance(parameters, oracle(2, 1)) == 0.0
