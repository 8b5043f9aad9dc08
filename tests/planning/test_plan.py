"""`zerosync plan`: what a replay says is what a run does."""

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
import torch
import torch.distributed as dist
from torch import nn
from typer.testing import CliRunner

from tests.harness import optimizers
from tests.harness.engines import make_engine
from tests.harness.ranks import run_ranks
from zerosync_strategy import attach
from zerosync_strategy.core.comm.traffic import CollectiveCounter
from zerosync_strategy.core.runlog import LARGE_BYTES, RunLog
from zerosync_strategy.tools import links
from zerosync_strategy.tools.commands import app
from zerosync_strategy.tools.doctor import configurations
from zerosync_strategy.tools.doctor.findings import Level
from zerosync_strategy.tools.links import Links
from zerosync_strategy.tools.plan import models, output, replay, training
from zerosync_strategy.tools.plan.check import Run, compare, read_run
from zerosync_strategy.tools.plan.jobs import (
    CHANGES,
    NODE_SHARDS,
    STOCK,
    ZEROSYNC,
    Cluster,
    OptionSet,
    Workload,
    usual_sets,
)
from zerosync_strategy.tools.plan.memory import Ledger
from zerosync_strategy.tools.plan.plan import KERNELS, Outcome, Plan, PlanError, plan
from zerosync_strategy.tools.plan.skipped import SkippedCompute
from zerosync_strategy.tools.plan.timing import Bounds, Crossing, Floor, Span, bounds, crossing, floor, own_work

ZERO = {"stage3_param_persistence_threshold": 0}
WORKLOAD = Workload(
    "layers=2,hidden=128,heads=4,vocab=512", batch=(2, 32), micro_batches=3, dtype="fp32",
    deepspeed={"zero_optimization": ZERO},
)  # fmt: skip
SETS = [(STOCK, 2, {}), (ZEROSYNC, 1, {}), (ZEROSYNC, 2, {"grad_memory_budget": 0}), (ZEROSYNC, 3, {}),
        (ZEROSYNC, 3, {"param_memory_budget": "all"}),
        (ZEROSYNC, 3, {"param_memory_budget": {"device": 50_000, "host": "all"}})]  # fmt: skip


def replayed(workload: Workload, options: OptionSet, ranks: int = 2, backend: str = "gloo", mode: Any = None) -> Any:
    """What the replay of rank 0 finds, in a process of its own."""

    def one() -> Any:
        os.environ["WORLD_SIZE"] = str(ranks)
        if mode is not None:
            SkippedCompute._run = mode  # type: ignore[method-assign]
        from zerosync_strategy import prepare_cpu

        prepare_cpu()
        return replay.replay(workload, options, Cluster(ranks, ranks, backend=backend))

    (found,) = run_ranks(one, world_size=1, timeout=200)
    return found


def trained(options: OptionSet, make: Any = lambda module: torch.optim.AdamW(module.parameters())) -> Any:
    """What rank 0 of two that really train sends in the last of three steps."""
    module, batch = models.build(WORKLOAD)
    is_stock, backwards = options.system == STOCK, WORKLOAD.micro_batches
    engine = make_engine(
        module, make(module), options.stage, ZERO,
        gradient_accumulation_steps=backwards if is_stock else 1,
    )  # fmt: skip
    if not is_stock:
        attach(engine, **options.options)
    with CollectiveCounter() as counter:
        for _ in range(3):
            counter.take()
            for index in range(backwards):
                engine.backward(models.loss_of(engine, batch) / (1 if is_stock else backwards))
                if is_stock and index < backwards - 1:
                    engine.step()
            engine.step()
        return {kind: [each.calls, each.bytes] for kind, each in counter.take().items()}


@pytest.mark.parametrize(("system", "stage", "given"), SETS, ids=lambda value: str(value))
def test_a_replay_sends_what_a_run_sends(system: str, stage: int, given: dict[str, Any]) -> None:
    options = OptionSet(system, stage, given)
    ran, _ = run_ranks(lambda: trained(options), timeout=200)
    assert replayed(WORKLOAD, options)["collectives"] == ran


@pytest.mark.parametrize("stage", [2, 3])
def test_skipping_the_arithmetic_changes_neither_memory_nor_bytes(stage: int) -> None:
    def compute(self: Any, func: Any, args: Any, kwargs: Any) -> Any:
        return func(*args, **kwargs)

    workload = dataclasses.replace(WORKLOAD, model="layers=2,hidden=256,heads=4,vocab=2048", batch=(4, 64))
    options = OptionSet(ZEROSYNC, stage)
    skipped, computed = (replayed(workload, options, 8, "nccl", mode) for mode in (None, compute))
    assert skipped["collectives"] == computed["collectives"]
    for name in ("peak", "resident"):  # kernels allocate a little for themselves
        for kind, nbytes in computed[name].items():
            assert skipped[name][kind] == pytest.approx(nbytes, rel=0.01, abs=LARGE_BYTES), (name, kind)


def test_backwards_that_are_not_replayed_are_counted() -> None:
    options = OptionSet(ZEROSYNC, 3)
    sent = []
    for count in (2, 3, 7):
        found = replayed(dataclasses.replace(WORKLOAD, micro_batches=count), options)
        sent.append(sum(nbytes for _, nbytes in found["collectives"].values()))
    assert sent[2] - sent[1] == 4 * (sent[1] - sent[0]) > 0


def test_memory_counts_what_lives_and_what_is_written_to() -> None:
    ledger = Ledger()
    with SkippedCompute(ledger.see):
        untouched = torch.empty(1 << 20)
        twice = torch.ones(1 << 20)
        view = twice[5:]
        del twice
        assert sum(ledger.allocated.live.values()) == 2 * (4 << 20)
        assert sum(ledger.written.live.values()) == 4 << 20
        untouched.add_(1)
        assert sum(ledger.written.live.values()) == 2 * (4 << 20)
        del view, untouched
    assert sum(ledger.allocated.live.values()) == 0 == sum(ledger.written.live.values())
    assert sum(ledger.allocated.peak.values()) == 2 * (4 << 20)


def test_what_crosses_which_link() -> None:
    cluster = Cluster(16, 4, Links(within=100.0, between=10.0, latency_within=0.0, latency_between=0.0))
    ring = crossing({"all_gather_into_tensor": (1, 1000)}, cluster)
    assert (ring.within, ring.between) == (750.0, 250.0)
    assert (ring.seconds, ring.in_turn) == (Span(100.0, 100.0), 100.0)  # a node sends what a rank sends
    pairs = crossing({"isend": (15, 1500)}, cluster)
    assert (pairs.within, pairs.between) == (pytest.approx(300.0), pytest.approx(1200.0))
    assert pairs.seconds.most == pytest.approx(4 * 1200 / 10)  # of four ranks at once
    one_node = crossing({"all_reduce": (1, 1000)}, dataclasses.replace(cluster, ranks=4))
    assert (one_node.within, one_node.between, one_node.seconds) == (1000.0, 0.0, Span(10.0, 10.0))
    slow = dataclasses.replace(cluster.links, between=5.0, latency_between=1.0)
    two_levels = crossing(
        {"reduce_scatter_tensor within nodes": (1, 3000), "reduce_scatter_tensor between nodes": (1, 200)}, cluster
    )
    assert (two_levels.within, two_levels.between) == (3000.0, 200.0)
    assert (two_levels.seconds, two_levels.in_turn) == (Span(80.0, 110.0), 110.0)  # 4 ranks of a node send to others
    measured = crossing({"all_reduce": (2, 1000), "isend": (30, 0)}, dataclasses.replace(cluster, slow_links=slow))
    assert measured.seconds == Span(100.0, 200.0 + 2 * 4 + 2)  # 16 ranks: four doublings, or one exchange
    assert bounds(measured, Span(150.0, 160.0)) == Bounds(150.0, 370.0)
    assert bounds(measured, Span(50.0, 60.0)) == Bounds(100.0, 270.0)
    late = dataclasses.replace(cluster, links=Links(1.0, 1.0, latency_within=1.0, latency_between=10.0))
    calls = {"all_gather_into_tensor within nodes": (1, 0), "isend within nodes": (3, 0), "isend between nodes": (3, 0)}
    assert crossing(calls, late).seconds == Span(0.0, 2.0 + 1.0 + 10.0)  # two doublings, and two exchanges


def test_what_must_be_sent() -> None:
    assert floor(1600, Cluster(16, 4)) == Floor(within=1200.0, between=300.0)
    assert floor(1600, Cluster(16, 16)) == Floor(within=1500.0, between=0.0)
    assert floor(1600, Cluster(16, 1)).between == floor(1600, Cluster(16, 1)).sent == 1500.0


def test_own_work_is_bounded_by_how_often_ranks_meet() -> None:
    one, other = [[1.0, 3.0]] * 3, [[2.0, 1.0]] * 3
    assert own_work([one, other]) == Span(4.0, 5.0)
    assert own_work([one]) == Span(4.0, 4.0)


def convolution() -> tuple[nn.Module, Any]:
    """A convolution whose weights, of 19 MB, oneDNN lays out anew for its kernel, and a batch norm."""
    return nn.Sequential(nn.Conv2d(512, 1024, 3), nn.BatchNorm2d(1024)), (torch.randn(4, 512, 4, 4),)


def not_finite() -> tuple[nn.Module, Any]:
    return nn.Linear(8, 8), (torch.full((1, 8), torch.inf),)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="kernels of another library")
@pytest.mark.parametrize("stage", [1, 3])
def test_memory_has_that_of_kernels_where_the_arithmetic_runs(stage: int) -> None:
    workload = Workload(f"{__name__}:convolution", micro_batches=2, dtype="fp32")
    (found,) = plan(workload, Cluster(2, backend="gloo"), [OptionSet(ZEROSYNC, stage)], "measure", at_once=1).outcomes
    weights = 4 * 1024 * 512 * 9
    assert 0.9 * weights < found.resident[KERNELS] < 2 * weights, found.resident
    assert KERNELS not in found.peak  # a device's kernels are others


def test_gradients_that_are_not_finite_are_an_error() -> None:
    workload = Workload(f"{__name__}:not_finite", micro_batches=2, dtype="fp32")
    with pytest.raises(PlanError, match="gradients are not finite"):
        plan(workload, Cluster(2, backend="gloo"), [OptionSet(ZEROSYNC, 1)], "measure", at_once=1)


def test_what_arrives_in_a_replay_is_finite() -> None:
    def receive() -> list[float]:
        training.join(Cluster(2, backend="gloo"))
        replay.write_received()
        received = torch.full((2,), torch.nan)
        dist.irecv(received, 1)
        return list(received.tolist())

    assert run_ranks(receive, world_size=1) == [[0.0, 0.0]]


def outcome(name: str, memory: int, sent: int) -> Outcome:
    peak = {"parameters": memory}
    options = OptionSet(STOCK if name == "stock" else ZEROSYNC, 3, {"param_memory_budget": name})
    sending = Crossing(sent, 0, Span(1.0, 1.0), in_turn=sent)
    return Outcome(options, {"isend": (1, sent)}, peak, peak, sending, Span(2.0, 2.0), Bounds(2.0, 3.0))


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_the_assumed_share_of_changes(backend: str) -> None:
    """Of the gather of parameters alone; the option is in the configuration, and not in the replay."""
    sets = [each for each in usual_sets((2,), stock=False, dtype="bf16") if each.options in ({}, {CHANGES: "auto"})]
    workload = dataclasses.replace(WORKLOAD, dtype="bf16", micro_batches=1)
    made = plan(workload, Cluster(4, 4, backend=backend), sets)
    full, changes = made.outcomes
    assert full.bytes_sent - changes.bytes_sent == pytest.approx(0.7 * 2 * made.parameters * 3 / 4, rel=0.01)
    assert changes.configuration["zerosync"] == {CHANGES: "auto"}
    assert changes.options.name == "zerosync 2, gather_changes=auto (30% of the gather assumed)"
    assert made.recommended is changes
    assert all(CHANGES not in each.options for each in usual_sets((1, 2, 3), dtype="fp32"))


@pytest.mark.parametrize("budget", ["all", 0.5, {"device": 0.5, "host": "all"}])
def test_the_assumed_share_of_held_parameters(budget: Any) -> None:
    """On stage 3 the others are gathered in full."""
    zero = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}
    workload = dataclasses.replace(WORKLOAD, dtype="bf16", micro_batches=1, deepspeed=zero)
    held = {"param_memory_budget": budget}
    sets = [OptionSet(ZEROSYNC, 3, options) for options in (held, held | {CHANGES: True})]
    made = plan(workload, Cluster(4, 4), sets)
    full, changes = made.outcomes
    saved = (full.bytes_sent - changes.bytes_sent) / (0.7 * 2 * made.parameters * 3 / 4)
    assert saved == pytest.approx(1.0, rel=0.01) if budget == "all" else 0.1 < saved <= 0.5


def matrices() -> tuple[nn.Module, Any]:
    return nn.Sequential(*[nn.Linear(128, 128, bias=False) for _ in range(16)]), (torch.zeros(2048, 128),)


def mixed(module: nn.Module) -> torch.optim.Optimizer:
    return optimizers.mixed(module)


@pytest.mark.parametrize("stage", [2, 3])
def test_what_whole_parameters_cost(stage: int) -> None:
    """A replay sends what a run sends, and has on rank 0 of 8 what it owns: two of 16 matrices, and their momenta."""
    options = OptionSet(ZEROSYNC, stage)
    ran, _ = run_ranks(lambda: trained(options, optimizers.mixed), timeout=200)
    workload = dataclasses.replace(WORKLOAD, optimizer=f"{__name__}:mixed")
    assert replayed(workload, options)["collectives"] == ran
    workload = Workload(f"{__name__}:matrices", optimizer="Muon")
    found = replayed(workload, options, 8, "nccl")
    assert found["peak"]["optimizer"] == (2 * stage) * 128**2 * 4  # on stage 3, shards of the master weights beside


def test_whole_parameters_on_several_nodes() -> None:
    """Each gradient and each matrix crosses between two nodes once, in two levels; in one, to each rank of a node."""
    workload = Workload(f"{__name__}:matrices", optimizer="Muon", dtype="fp32", micro_batches=2)
    sets = [OptionSet(ZEROSYNC, 2), OptionSet(ZEROSYNC, 2, {"grad_memory_budget": NODE_SHARDS}),
            OptionSet(ZEROSYNC, 2, {"node_size": 1})]  # fmt: skip
    made = plan(workload, Cluster(8, 4, backend="gloo"), sets)
    assert [made.over_floor(each) for each in made.outcomes] == pytest.approx([1.0, 1.0, 4.0], rel=1e-3)
    assert made.outcomes[1].peak["node shards"] == 16 * 128**2 * 4 // 4


def test_rows_without_whole_parameters_are_left_out() -> None:
    workload = Workload(f"{__name__}:matrices", optimizer="Muon")
    sets = [OptionSet(STOCK, 2), OptionSet(ZEROSYNC, 2), OptionSet(ZEROSYNC, 2, {CHANGES: "auto"})]
    made = plan(workload, Cluster(4, 4), sets)
    assert [each.options for each in made.outcomes] == [OptionSet(ZEROSYNC, 2)]
    assert made.left_out == (sets[0].name, sets[2].name)
    assert made.over_floor(made.outcomes[0]) == pytest.approx(1.0, rel=1e-3)
    with pytest.raises(PlanError, match="Muon needs whole parameters, and has none in stock 2"):
        plan(workload, Cluster(4, 4), sets[:1])


def test_the_front_and_what_is_recommended() -> None:
    outcomes = (outcome("a", 10, 100), outcome("b", 20, 50), outcome("c", 30, 60), outcome("d", 40, 10),
                outcome("stock", 1, 1))  # fmt: skip
    made = Plan(WORKLOAD, Cluster(8, memory=25), 1, (2, 32), Floor(50, 0), 0.0, outcomes)
    assert made.over_floor(outcomes[0]) == 2
    assert [each.memory for each in made.front] == [10, 20, 40]
    assert made.recommended is outcomes[1] and made.fits(outcomes[1]) == 5 and made.fits(outcomes[3]) == -15
    assert dataclasses.replace(made, cluster=Cluster(8, memory=5)).recommended is None
    assert dataclasses.replace(made, cluster=Cluster(8)).recommended is outcomes[3]


def command(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    whole = [sys.executable, "-m", "zerosync_strategy", "plan", *map(str, arguments)]
    return subprocess.run(whole, capture_output=True, text=True, timeout=300, env=os.environ | environment)


def test_a_run_is_compared_with_its_plan(tmp_path: Path) -> None:
    model = "layers=2,hidden=256,heads=4,vocab=2048"

    def train() -> None:
        torch.set_num_threads(1)
        with RunLog(tmp_path / f"{os.environ['RANK']}.jsonl", ranks_of_machine=2) as log:
            module, batch = models.build(dataclasses.replace(WORKLOAD, model=model))
            engine = make_engine(module, torch.optim.AdamW(module.parameters()), 2)
            zerosync = attach(engine)
            for _ in range(5):
                for _ in range(2):
                    engine.backward(models.loss_of(engine, batch) / 2)
                engine.step()
                log.step(zerosync)

    run_ranks(train, timeout=200)
    run = read_run(tmp_path / "0.jsonl")
    assert (run.ranks, run.stage, run.backwards, run.memory, run.backend) == (2, 2, 2, "resident", "gloo")
    assert (run.ranks_of_machine, run.threads) == (2, 1)

    given = [model, "--dtype", "fp32", "--batch", "2x32", "--check", tmp_path / "0.jsonl"]
    done = command(*given, "--json", "--compute", "measure")
    sent, memory, seconds = json.loads(done.stdout)
    assert sent["holds"] and sent["planned"] == [run.bytes_sent], done.stderr
    assert memory["ran"] == run.peak_memory and memory["planned"][0] > 0
    assert 0 < seconds["planned"][0] < seconds["planned"][1] and seconds["ran"] == run.seconds
    assert done.returncode == int(not all(each["holds"] for each in (sent, memory, seconds)))

    lines = [json.loads(line) for line in (tmp_path / "0.jsonl").read_text().splitlines()]
    more = [{**line, "bytes_sent": 2 * line["bytes_sent"], "cores": 1 + line["cores"]} for line in lines]
    (tmp_path / "more.jsonl").write_text("\n".join(map(json.dumps, more)))
    elsewhere = command(*given[:-1], tmp_path / "more.jsonl", "--compute", "measure")
    assert elsewhere.returncode == 2 and "core(s) here" in elsewhere.stderr
    shown = command(*given[:-1], tmp_path / "more.jsonl")  # without the time, in a pipe
    assert "\x1b" not in shown.stdout and len(shown.stdout.splitlines()) == 6, shown.stderr
    assert shown.returncode == 1


def test_what_holds_is_within_its_limit(tmp_path: Path) -> None:
    run = Run(
        seconds=1.0, bytes_sent=1000, peak_memory=1000, memory="resident", backwards=1, stage=2, options={}, ranks=2,
        backend="gloo", ranks_of_machine=2, threads=1, cores=2,
    )  # fmt: skip
    planned = dataclasses.replace(outcome("x", 1000, 1000), time=Bounds(0.9, 1.1))
    assert [each.holds for each in compare(planned, run)] == [True] * 3
    off = dataclasses.replace(run, bytes_sent=1011, peak_memory=1101, seconds=1.2)
    found = compare(planned, off)
    assert [each.holds for each in found] == [False] * 3
    assert [round(each.off, 3) for each in found] == [0.011, 0.101, 0.091]


def test_a_plan_of_a_thousand_ranks(tmp_path: Path) -> None:
    cluster = Cluster(1024, memory=2 << 30)
    made = plan(
        WORKLOAD, cluster, [OptionSet(ZEROSYNC, 3), OptionSet(ZEROSYNC, 3, {"param_memory_budget": 0.5})], processes=1
    )
    nothing_held, half_held = made.outcomes
    assert half_held.bytes_sent < nothing_held.bytes_sent
    budget = half_held.options.options["param_memory_budget"]
    assert abs(budget - 2 * made.parameters) <= 1  # half of four bytes each
    found = json.loads(made.to_json())
    assert [each["bytes_sent"] for each in found["outcomes"]] == [each.bytes_sent for each in made.outcomes]
    (tmp_path / "accelerate.yaml").write_text(output.accelerate_yaml(made, half_held))
    findings = configurations.check(tmp_path / "accelerate.yaml")
    assert all(finding.level in (Level.OK, Level.NOTE) for finding in findings)
    assert configurations.read(tmp_path / "accelerate.yaml")["num_machines"] == 128


def test_a_plan_has_rows_along_the_scale_of_node_shards() -> None:
    """As one of 1,024 ranks, 8 per node: nothing whole fits, and what is in node shards crosses between nodes once."""
    cluster = Cluster(1024, links=Links(within=300e9, between=5e9), memory=1)
    names = [each.name for each in usual_sets((2, 3), stock=False, cluster=cluster)]
    assert sum("on the node" in name for name in names) == 4
    assert not any("on the node" in each.name for each in usual_sets(cluster=Cluster(8)))
    in_shards = {"param_memory_budget": NODE_SHARDS, "grad_memory_budget": NODE_SHARDS}
    sets = [OptionSet(ZEROSYNC, 3, given) for given in ({"param_memory_budget": "all"}, in_shards,
                                                        {"grad_memory_budget": 0})]  # fmt: skip
    workload = dataclasses.replace(WORKLOAD, model=WORKLOAD.model + ",checkpointing=1", micro_batches=5, dtype="bf16")
    made = plan(workload, cluster, sets, processes=1)
    whole, nodes, sharded = made.outcomes
    # Each parameter is padded to as many elements as there are ranks, which is little of a large one.
    assert 1.0 <= made.over_floor(nodes) < 1.04 and made.over_floor(sharded) > workload.micro_batches
    assert made.floor.sent == pytest.approx(2 * 2 * made.parameters * 1023 / 1024)
    assert nodes.peak["node shards"] == pytest.approx((2 + 2) * made.parameters / 8, rel=0.05)
    assert sharded.peak["node shards"] == 0 < nodes.sent.within
    small = dataclasses.replace(made, cluster=dataclasses.replace(cluster, memory=nodes.memory))
    assert whole.memory > nodes.memory and small.recommended is nodes
    assert json.loads(made.to_json())["outcomes"][1]["over_floor"] == made.over_floor(nodes)


def fails_inside() -> nn.Module:
    return nn.Linear(8, 8).nowhere  # type: ignore[return-value]


def test_what_cannot_be_planned_is_named() -> None:
    def of(**change: Any) -> Any:
        return plan(dataclasses.replace(WORKLOAD, **change), Cluster(2), [OptionSet(ZEROSYNC, 2)])

    for change, found in (
        ({"model": "nowhere_at_all:build"}, "nowhere_at_all"), ({"model": f"{__name__}:nothing"}, "'nothing'"),
        ({"model": "layer=2,hidden=8"}, "'layer=2'"), ({"optimizer": "Adamw"}, "'Adamw' is no class of torch.optim"),
        ({"optimizer": "Muon"}, "'Muon'.* 2D parameters.*package.module:function"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=found):
            of(**change)
    with pytest.raises(PlanError, match=r"'zerosync 2' failed: AttributeError.*nowhere"):
        of(model=f"{__name__}:fails_inside")
    with pytest.raises(PlanError, match=r"after 0\.1 s"):
        plan(WORKLOAD, Cluster(2), [OptionSet(ZEROSYNC, 2)], timeout=0.1)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--dtype", "fp8"], "fp8"), (["--ranks", "12"], "divisor"), (["--within", "fast"], "'fast'"),
        (["--links", __file__], "doctor --link --save"), (["--stage", "4"], "--stage takes 1, 2 or 3, got 4"),
        (["--batch", "4*8"], "--batch takes a shape"), (["--compute", "fast"], "--compute takes seconds"),
        (["--compute", "nan"], "--compute takes seconds"), (["--yaml", "nowhere/at/all.yaml"], "--yaml nowhere"),
        (["--processes", "0"], "--processes"), (["--no-such-option"], "--no-such-option"),
        (["--check", "nowhere.jsonl"], "nowhere.jsonl"), (["--device-memory", "much"], "device-memory"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)  # fmt: skip
def test_a_wrong_command_is_told_from_a_failed_replay(arguments: list[str], word: str) -> None:
    done = CliRunner().invoke(app, ["plan", "layers=1,hidden=8,heads=1", *arguments], env={"COLUMNS": "200"})
    assert done.exit_code == 2, done.output
    assert word in " ".join(re.sub(r"[│╭╮╰╯─]", " ", click.unstyle(done.output)).split()), done.output


def test_a_typo_in_the_model_is_a_wrong_command_too() -> None:
    done = command("layer=2,hidden=8,heads=1", "--stage", "2", "--no-stock")
    assert done.returncode == 2 and "sizes take layers" in " ".join(done.stderr.split()), done.stderr


def own_batch() -> tuple[nn.Module, Any]:
    return nn.Linear(8, 8), (torch.zeros(3, 8),)


def test_the_batch_that_is_shown_is_the_models_own() -> None:
    done = command(f"{__name__}:own_batch", "--stage", "2", "--no-stock", "--ranks", "2", "--batch", "5x8")
    assert "1 micro-batch(es) of 3x8 (the model's own; --batch is not used)" in done.stdout, done.stdout + done.stderr
    assert done.stderr.splitlines()[:3] == [f"{index} of 3 replays" for index in range(3)], done.stderr


def test_a_plan_is_a_table_a_picture_and_a_configuration(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    slow, fast = ({"within": speed, "latency_within": 1e-3} for speed in (1e8, 2e8))
    links.save(tmp_path / "links", slow, fast)
    png, configuration = tmp_path / "plan.png", tmp_path / "accelerate.yaml"
    done = command(
        WORKLOAD.model, "--ranks", "2", "--batch", "2x32", "--dtype", "fp32", "--backend", "gloo", "--stage", "2",
        "--links", tmp_path / "links", "--compute", "measure", "--device-memory", "1GB", "--png", png, "--yaml",
        configuration,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout and "2 rank(s) at once, 1 thread(s) each" in done.stdout
    rows = [line for line in done.stdout.splitlines() if "zerosync 2" in line or "stock 2" in line]
    assert len(rows) == 3 and all(re.search(r"\d to \d", row) for row in rows)
    assert [row.startswith("|>") for row in rows].count(True) == 1 and '"zerosync": {' in done.stdout
    assert png.read_bytes().startswith(b"\x89PNG") and png.stat().st_size > 10_000
    assert configurations.read(configuration)["num_processes"] == 2
