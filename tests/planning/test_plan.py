"""`zerosync plan`: what a replay says is what a run does."""

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.harness import optimizers
from tests.harness.command import command
from tests.harness.engines import make_engine
from tests.harness.forked import fork_instead
from tests.harness.ranks import RanksFailed, run_ranks
from zerosync_strategy import attach
from zerosync_strategy.core.comm.journal import Traffic
from zerosync_strategy.core.comm.streams import Streams
from zerosync_strategy.tools.plan import jobs, measures, replay
from zerosync_strategy.tools.plan import plan as planning
from zerosync_strategy.tools.plan.jobs import NODE_SHARDS, STOCK, ZEROSYNC, Cluster, OptionSet, Workload, usual_sets
from zerosync_strategy.tools.plan.measures import Ledger, ProcessCounter
from zerosync_strategy.tools.plan.plan import Outcome, Plan, PlanError, plan
from zerosync_strategy.tools.plan.skipped import LARGE_BYTES, SkippedCompute

ZERO = {"stage3_param_persistence_threshold": 0}
SETS = [(STOCK, 2, {}), (ZEROSYNC, 1, {}), (ZEROSYNC, 2, {"grad_memory_budget": 0}), (ZEROSYNC, 3, {}),
        (ZEROSYNC, 3, {"param_memory_budget": "all"}),
        (ZEROSYNC, 3, {"param_memory_budget": {"device": 500_000, "host": "all"}})]  # fmt: skip


class Network(nn.Module):
    """Two residual blocks, an embedding and a head; its loss is its own."""

    def __init__(self, recomputes: bool = False) -> None:
        super().__init__()
        self.recomputes = recomputes
        self.embedding, self.head = nn.Embedding(512, 128), nn.Linear(128, 512, bias=False)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(128), nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128)) for _ in range(2)
        )

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + (checkpoint(block, x, use_reentrant=False) if self.recomputes else block(x))
        return functional.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


def network(recomputes: bool = False) -> tuple[nn.Module, Any]:
    return Network(recomputes), (torch.zeros(2, 32, dtype=torch.long),)


def recomputing() -> tuple[nn.Module, Any]:
    return network(recomputes=True)


WORKLOAD = Workload(f"{__name__}:network", micro_batches=3, dtype="fp32", deepspeed={"zero_optimization": ZERO})
LARGE = {"zero_optimization": {**ZERO, "stage3_max_reuse_distance": 0}}  # as a large model, which stays for nothing


TWO = Cluster(2, backend="gloo")


def replayed(workload: Workload, options: OptionSet, cluster: Cluster = TWO) -> dict[str, Any]:
    """What the replay of rank 0 finds, in a fork of this process."""

    def one() -> dict[str, Any]:
        os.environ["WORLD_SIZE"] = str(cluster.ranks)
        from zerosync_strategy import prepare_cpu

        prepare_cpu()
        return replay.replay(workload, options, cluster)

    (found,) = run_ranks(one, world_size=1, timeout=200)
    return json.loads(json.dumps(found))  # as a plan reads it


@pytest.fixture
def in_forks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans are made of replays in forks of this process, which has imported everything, not of a new interpreter."""
    monkeypatch.setattr(
        planning, "_replay",
        lambda workload, cluster, sets, progress: [replayed(workload, each, cluster) or None for each in sets],
    )  # fmt: skip


class Computed(SkippedCompute):
    """Sees what is allocated, and skips nothing."""

    def _run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        return func(*args, **kwargs)


def trained(
    options: OptionSet, make: Any = lambda module: torch.optim.AdamW(module.parameters())
) -> tuple[dict[str, list[int]], int]:
    """What rank 0 of two that really train sends in the last of four steps, and the most that it holds."""
    ledger, is_stock, backwards = Ledger(), options.system == STOCK, WORKLOAD.micro_batches
    with Computed(ledger.see), ledger.following_resizes():
        module, batch = jobs.build(WORKLOAD)
        engine = make_engine(
            module, make(module), options.stage, ZERO,
            gradient_accumulation_steps=backwards if is_stock else 1,
        )  # fmt: skip
        zerosync = None if is_stock else attach(engine, **options.options)
        with ProcessCounter() as counter:
            for _ in range(4):
                counter.take()
                ledger.restart()
                for index in range(backwards):
                    engine.backward(jobs.loss_of(engine, batch) / (1 if is_stock else backwards))
                    if is_stock and index < backwards - 1:
                        engine.step()
                engine.step()
            report = None if zerosync is None else zerosync.report
            collectives = counter.take() if report is None else report.collectives
    sent = {kind: [each.calls, each.bytes, each.between] for kind, each in collectives.items()}
    return sent, sum(ledger.peak.values())


@pytest.mark.extended(but=("zerosync-1-{}", "zerosync-3-{'param_memory_budget': 'all'}"))
@pytest.mark.parametrize(("system", "stage", "given"), SETS, ids=lambda value: str(value))
def test_a_replay_sends_and_holds_what_a_run_does(system: str, stage: int, given: dict[str, Any]) -> None:
    options = OptionSet(system, stage, given)
    (sent, held), _ = run_ranks(lambda: trained(options), timeout=200)
    found = replayed(WORKLOAD, options)
    assert found["collectives"] == sent
    assert sum(found["peak"].values()) == pytest.approx(held, rel=0.01, abs=LARGE_BYTES)


IN_BACKGROUND = {"checkpoint_format": "distributed", "checkpoint_background": True}


def frozen() -> tuple[nn.Module, Any]:
    """Frozen weights, whose number of elements two ranks do not divide, and buffers."""
    network = nn.Sequential(nn.Linear(301, 101), nn.BatchNorm1d(101), nn.Linear(101, 301))
    network[0].requires_grad_(False)
    return network, (torch.zeros(4, 301),)


@pytest.mark.extended(
    but=(
        "3-AdamW",
        "2-mixed",
    )
)
@pytest.mark.parametrize(("stage", "optimizer"), [(1, "AdamW"), (2, "AdamW"), (3, "AdamW"), (2, "mixed"), (3, "mixed")])
def test_the_copies_of_a_checkpoint_take_what_a_run_takes(stage: int, optimizer: str, tmp_path: Path) -> None:
    workload = dataclasses.replace(
        WORKLOAD, model=f"{__name__}:frozen", dtype="bf16", micro_batches=1,
        optimizer=f"{__name__}:mixed" if optimizer == "mixed" else optimizer,
    )  # fmt: skip
    make = optimizers.mixed if optimizer == "mixed" else (lambda module: torch.optim.AdamW(module.parameters()))

    def run() -> int:
        module, batch = jobs.build(workload)
        engine = make_engine(module, make(module), stage, ZERO, bf16={"enabled": True})
        handle = attach(engine, **IN_BACKGROUND)
        for _ in range(2):
            engine.backward(jobs.loss_of(engine, batch))
            engine.step()
            engine.save_checkpoint(tmp_path)
        engine.backward(jobs.loss_of(engine, batch))
        engine.step()
        assert handle.report is not None
        return handle.report.copied_bytes

    copied, _ = run_ranks(run, timeout=200)
    found = replayed(workload, OptionSet(ZEROSYNC, stage, IN_BACKGROUND))
    assert found["copied_bytes"] == copied > 0


@pytest.mark.extended
def test_backwards_that_are_not_replayed_are_counted() -> None:
    options = OptionSet(ZEROSYNC, 3)
    sent = []
    for count in (2, 3, 7):
        found = replayed(dataclasses.replace(WORKLOAD, micro_batches=count, deepspeed=LARGE), options)
        sent.append(sum(nbytes for _, nbytes, _ in found["collectives"].values()))
    assert sent[2] - sent[1] == 4 * (sent[1] - sent[0]) > 0


def test_memory_counts_what_lives() -> None:
    ledger = Ledger()
    with SkippedCompute(ledger.see):
        one = torch.empty(1 << 20)
        other = torch.ones(1 << 20)
        view = other[5:]
        del other
        assert sum(ledger.live.values()) == 2 * (4 << 20)
        one.add_(1)
        del view, one
    assert sum(ledger.live.values()) == 0
    assert sum(ledger.peak.values()) == 2 * (4 << 20)


def test_what_lies_in_host_memory_does_not_count() -> None:
    ledger = Ledger()
    with SkippedCompute(ledger.see):
        kept = Streams().host_memory(1 << 20, torch.float32)
    assert kept.numel() == 1 << 20 and sum(ledger.peak.values()) == 0


def not_finite() -> tuple[nn.Module, Any]:
    return nn.Linear(8, 8), (torch.full((1, 8), torch.inf),)


def fails_inside() -> nn.Module:
    return nn.Linear(8, 8).nowhere  # type: ignore[return-value]


def matrices() -> tuple[nn.Module, Any]:
    return nn.Sequential(*[nn.Linear(128, 128, bias=False) for _ in range(16)]), (torch.zeros(2048, 128),)


def mixed(module: nn.Module) -> torch.optim.Optimizer:
    return optimizers.mixed(module)


@pytest.mark.extended
@pytest.mark.parametrize("stage", [2, 3])
def test_what_whole_parameters_cost(stage: int) -> None:
    """A replay sends what a run sends, and has on rank 0 of 8 what it owns: two of 16 matrices, and their momenta."""
    options = OptionSet(ZEROSYNC, stage)
    (sent, _), _ = run_ranks(lambda: trained(options, optimizers.mixed), timeout=200)
    assert replayed(dataclasses.replace(WORKLOAD, optimizer=f"{__name__}:mixed"), options)["collectives"] == sent
    found = replayed(Workload(f"{__name__}:matrices", optimizer="Muon"), options, Cluster(8))
    assert found["peak"]["optimizer"] == (2 * stage) * 128**2 * 4  # on stage 3, shards of the master weights beside


@pytest.mark.usefixtures("in_forks")
def test_whole_parameters_on_several_nodes() -> None:
    """Each gradient and each matrix crosses between two nodes once, in two levels; in one, to each rank of a node.

    Stock DeepSpeed, whose flat shards do not train under Muon, is left out.
    """
    workload = Workload(f"{__name__}:matrices", optimizer="Muon", dtype="fp32", micro_batches=2)
    sets = [OptionSet(STOCK, 2), OptionSet(ZEROSYNC, 2), OptionSet(ZEROSYNC, 2, {"grad_memory_budget": NODE_SHARDS}),
            OptionSet(ZEROSYNC, 2, {"node_size": 1})]  # fmt: skip
    made = plan(workload, Cluster(8, 4, backend="gloo"), sets)
    assert [made.over_floor(each) for each in made.outcomes] == pytest.approx([1.0, 1.0, 4.0], rel=1e-3)
    assert made.outcomes[1].peak["node shards"] == 16 * 128**2 * 4 // 4
    assert made.left_out == (sets[0].name,)
    with pytest.raises(PlanError, match="Muon needs whole parameters, which stock 2 has not"):
        plan(workload, Cluster(4, 4), sets[:1])


def test_what_is_recommended() -> None:
    """Of what fits, least between nodes; where that is the same but for padding, least in all."""

    def outcome(name: str, memory: int, sent: int, between: int) -> Outcome:
        options = OptionSet(STOCK if name == "stock" else ZEROSYNC, 3, {"param_memory_budget": name})
        return Outcome(options, {"isend": Traffic(1, sent, between)}, {"parameters": memory})

    outcomes = (outcome("a", 10, 100, 0), outcome("b", 20, 50, 0), outcome("c", 30, 60, 0), outcome("d", 40, 10, 0),
                outcome("stock", 1, 1, 0))  # fmt: skip
    made = Plan(WORKLOAD, Cluster(8, memory=35), 1, 50.0, 0.0, outcomes)
    assert made.over_floor(outcomes[0]) == 2
    assert made.recommended is outcomes[1] and made.fits(outcomes[1]) == 15 and made.fits(outcomes[3]) == -5
    assert dataclasses.replace(made, cluster=Cluster(8, memory=5)).recommended is None
    assert dataclasses.replace(made, cluster=Cluster(8)).recommended is outcomes[3]
    nodes = (outcome("whole", 20, 50_000, 1001), outcome("shards", 10, 90_000, 1000), outcome("far", 1, 40_000, 2000))
    assert Plan(WORKLOAD, Cluster(16), 1, 50_000.0, 1000.0, nodes).recommended is nodes[0]


@pytest.mark.usefixtures("in_forks")
def test_a_plan_has_rows_along_the_scale_of_node_shards() -> None:
    """As one of 1,024 ranks, 8 per node: nothing whole fits, and what is in node shards crosses between nodes once."""
    cluster = Cluster(1024, memory=1)
    names = [each.name for each in usual_sets((2, 3), stock=False, cluster=cluster)]
    assert sum("on the node" in name for name in names) == 4
    assert not any("on the node" in each.name for each in usual_sets(cluster=Cluster(8)))
    in_shards = {"param_memory_budget": NODE_SHARDS, "grad_memory_budget": NODE_SHARDS}
    given = ({"param_memory_budget": "all"}, {"param_memory_budget": 0.5}, in_shards, {"grad_memory_budget": 0})
    workload = dataclasses.replace(
        WORKLOAD, model=f"{__name__}:recomputing", micro_batches=5, dtype="bf16", deepspeed=LARGE
    )  # fmt: skip
    made = plan(workload, cluster, [OptionSet(ZEROSYNC, 3, options) for options in given])
    assert made.units == {"Sequential": 2} and made.unit_bytes > 0, made.units
    whole, half, nodes, sharded = made.outcomes
    assert half.options.options["param_memory_budget"] == made.parameters  # half of two bytes each
    assert whole.sent.bytes < half.sent.bytes < sharded.sent.bytes
    # Each parameter is padded to as many elements as there are ranks, which is little of a large one.
    assert 1.0 <= made.over_floor(nodes) < 1.04 and made.over_floor(sharded) > workload.micro_batches
    assert made.floor == pytest.approx(2 * 2 * made.parameters * 1023 / 1024)
    assert nodes.peak["node shards"] == pytest.approx((2 + 2) * made.parameters / 8, rel=0.05)
    assert sharded.peak["node shards"] == 0
    small = dataclasses.replace(made, cluster=dataclasses.replace(cluster, memory=nodes.memory))
    assert whole.memory > nodes.memory and small.recommended is nodes
    shown = json.loads(small.to_json())["outcomes"][2]
    assert shown["recommended"] and shown["configuration"]["zerosync"] == in_shards


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"model": "nowhere_at_all:build"}, "nowhere_at_all"), ({"model": "layer=2,hidden=8"}, "'layer=2'"),
        ({"optimizer": "Adamw"}, "'Adamw'"), ({"model": f"{__name__}:not_finite"}, "gradients are not finite"),
    ],
    ids=["module", "sizes", "optimizer", "batch"],
)  # fmt: skip
def test_what_cannot_be_replayed_is_named(change: dict[str, Any], found: str) -> None:
    with pytest.raises(RanksFailed, match=found):
        replayed(dataclasses.replace(WORKLOAD, **change), OptionSet(ZEROSYNC, 2))


def test_the_command_names_the_option_set_whose_replay_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    fork_instead(monkeypatch, planning)
    done = command("plan", f"{__name__}:fails_inside", "--ranks", "2", "--stage", "2")
    assert done.status == 1, done
    assert re.search(r"The replay of '(stock|zerosync) 2.*' failed: AttributeError.*nowhere", done.stderr), done


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--dtype", "fp8"], "fp8"), (["--ranks", "12"], "divisor"), (["--stage", "4"], "takes 1, 2 or 3, got 4"),
        (["--batch", "4*8"], "--batch takes a shape"), (["--no-such-option"], "--no-such-option"),
        (["--device-memory", "much"], "device-memory"), (["--config", "nowhere.json"], "nowhere.json"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)  # fmt: skip
def test_a_wrong_command_is_told_from_a_failed_replay(
    arguments: list[str], word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    done = command("plan", "layers=1,hidden=8,heads=1", *arguments)
    assert done.status == 2, done
    assert word in " ".join(re.sub(r"[│╭╮╰╯─]", " ", done.stderr).split()), done


@pytest.mark.parametrize("starts", ["forks", pytest.param("interpreters", marks=pytest.mark.extended)])
def test_a_plan_is_a_table_and_a_configuration(starts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a Llama of given sizes; the options for checkpoints are those of the configuration."""
    (tmp_path / "ds.json").write_text(json.dumps({"zerosync": IN_BACKGROUND | {"grad_memory_budget": 7}}))
    arguments = ["layers=1,hidden=128,heads=4,vocab=512,checkpointing=1", "--ranks", "2", "--batch", "2x32"]
    arguments += ["--stage", "2", "--device-memory", "1GB", "--micro-batches", "2"]
    arguments += ["--config", str(tmp_path / "ds.json")]
    if starts == "forks":
        fork_instead(monkeypatch, planning)
        done = command("plan", *arguments)
        assert done.status == 0, done.stderr
    else:
        whole = [sys.executable, "-m", "zerosync_strategy", "plan", *arguments]
        done = subprocess.run(whole, capture_output=True, text=True, timeout=300, cwd=Path(__file__).parent)
        assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[:4] == [f"{index} of 3 replays" for index in range(4)], done.stderr
    rows = [line for line in done.stdout.splitlines() if "zerosync 2" in line or "stock 2" in line]
    assert "\x1b" not in done.stdout and len(rows) == 3
    assert [row.startswith("|>") for row in rows].count(True) == 1
    assert "| copies|" in done.stdout
    chosen = json.dumps({"zero_optimization": {"stage": 2}, "zerosync": IN_BACKGROUND})
    assert f"> recommended: of those that fit, it sends least. {chosen}" in done.stdout


def test_the_files_that_decide_on_a_kind_exist() -> None:
    source = Path(measures.__file__).parents[3]
    ours = [part for part in (*dict(measures._BY_FILE), *measures._PASSED) if part.startswith("/zerosync_strategy/")]
    assert [part for part in ours if not (source / part[1:]).exists()] == []
