"""W4: ranks that disagree are right, or each of them gets an error that says which rank did what."""

import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import deepspeed
import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.harness import engines
from tests.harness.copying import adamw, loss_of, make_engine, network, oracle
from tests.harness.engines import expect_timeout, rank, start
from tests.harness.extended import STAGES
from tests.harness.groups import ROWS
from tests.harness.native import send_natively
from tests.harness.oracle import Oracle, distance, full_parameters
from tests.harness.racecheck import simulate
from tests.harness.ranks import DIED, RankOutcome, run_ranks
from tests.harness.releases import since
from zerosync_strategy import attach, shard_over
from zerosync_strategy.core.failures.agreement import BegunCollectives
from zerosync_strategy.core.failures.errors import RankError

TIMEOUT = timedelta(seconds=3)
SHARDED = dict.fromkeys(
    ("stage3_param_persistence_threshold", "stage3_max_reuse_distance", "stage3_prefetch_bucket_size"), 0
)
ends_by_timeout = pytest.mark.off_device("gloo's timeout ends a wait with an error; NCCL's ends the process")


@pytest.mark.extended(but=("2-True",))
@pytest.mark.parametrize("promised", [True, False])
@pytest.mark.parametrize("stage", [1, 2])
def test_different_numbers_of_backwards_are_right(stage: int, promised: bool) -> None:
    """With coalescing, a rank may make more backwards of a window than another."""
    backwards = [[3, 1], [1, 2], [4, 4]]  # by step and rank

    def run() -> float:
        engine = make_engine(stage)
        zerosync = attach(engine)
        for step, by_rank in enumerate(backwards):
            for k in range(by_rank[rank()]):
                if promised and k + 1 == by_rank[rank()]:
                    zerosync.window.expect_last()
                engine.backward(loss_of(engine, 10 * step + k, rank()))
            engine.step()
        module = network()
        plain = Oracle(module, adamw(module))
        for step, by_rank in enumerate(backwards):
            for of_rank, count in enumerate(by_rank):
                for k in range(count):
                    plain.backward_on(of_rank, loss_of(module, 10 * step + k, of_rank))
            plain.step()
        return distance(full_parameters(engine.module), full_parameters(module))

    assert run_ranks(run) == [0.0, 0.0]


DISAGREEMENTS: dict[str, dict[str, Any]] = {
    "reduced at every backward": {"options": {"coalesce": False}, "backwards": [3, 2]},
    "reduced beyond the budget": {"options": {"grad_memory_budget": 0}, "backwards": [2, 3]},
    "reduced at every loss.backward()": {"options": {"coalesce": False}, "backwards": [3, 2], "raw": True},
    "a rank is elsewhere": {"options": {}, "backwards": [2, 2], "elsewhere": 1},
}


@pytest.mark.extended(but=("3-a rank is elsewhere",))
@ends_by_timeout
@pytest.mark.parametrize("case", DISAGREEMENTS)
@pytest.mark.parametrize("stage", [2, 3])
def test_each_rank_says_what_all_were_doing(stage: int, case: str) -> None:
    disagreement = DISAGREEMENTS[case]

    def run() -> None:
        engine = make_engine(stage, {"stage3_param_persistence_threshold": 10**6})
        attach(engine, **disagreement["options"])
        for step in range(2):
            if step:
                expect_timeout()
            for k in range(disagreement["backwards"][rank()] if step else 2):
                loss = loss_of(engine, k, rank())
                loss.backward() if disagreement.get("raw") else engine.backward(loss)
            if step and disagreement.get("elsewhere") == rank():
                time.sleep(TIMEOUT.total_seconds() + 1)
            engine.step()

    outcomes = run_ranks(run, expect="any", timeout=60)
    errors_name_every_rank(outcomes)
    messages = "\n\n".join(outcome.message for outcome in outcomes)
    assert "1 optimizer step(s) done" in messages, messages
    if stage == 2 and len(set(disagreement["backwards"])) > 1:  # stage 3 disagrees in a forward
        assert "all ranks make as many" in messages, messages
        assert "param_memory_budget" not in messages, messages
    if case == "a rank is elsewhere":
        assert (
            "rank 1: outside of the engine, 1 optimizer step(s) done, 2 backward(s) since, at " in outcomes[0].message
        )
        assert "test_disagreement.py" in outcomes[0].message


def errors_name_every_rank(outcomes: list[RankOutcome]) -> None:
    for outcome in outcomes:
        assert outcome.error == "RankError", str(outcome)
        for of_rank in range(len(outcomes)):
            assert f"\n  rank {of_rank}: " in outcome.message, outcome.message


def save(engine: Any, path: Path) -> None:
    engine.save_checkpoint(str(path))


def evaluate(engine: Any, path: Path) -> None:
    with torch.no_grad():
        engine(torch.ones(2, 8))


def collect(engine: Any, path: Path) -> None:
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())[::-1]):
        pass


ALONE = {
    (2, save): "in the attempt to write the checkpoint in",
    (3, evaluate): "in the gather of",
    (3, collect): "in the gather of",
}


@pytest.mark.extended(
    but=(
        "2-save",
        "3-collect",
    )
)
@ends_by_timeout
@pytest.mark.parametrize(("stage", "act"), ALONE)
def test_one_rank_alone(stage: int, act: Callable[[Any, Path], None], tmp_path: Path) -> None:
    """Ranks that wait for each other in different calls: at the timeout, both say who waits where and for what."""

    def run() -> None:
        engine = make_engine(stage, SHARDED if stage == 3 else {})
        attach(engine)
        for k in range(2):
            if k:
                expect_timeout()
            if k and rank() == 0:
                act(engine, tmp_path)
            engine.backward(loss_of(engine, k, rank()))
            engine.step()

    for outcome in run_ranks(run, expect="any", timeout=60):
        assert outcome.error == "RankError" and "on all ranks, not on one" in outcome.message, str(outcome)
        assert "Verdict: " in outcome.message and ", at test_disagreement.py:" in outcome.message, outcome.message
        assert f"\n  rank 0: {ALONE[stage, act]}" in outcome.message, outcome.message
        assert "\n  rank 1: in the " in outcome.message, outcome.message


@pytest.mark.extended(but=("3",))
@ends_by_timeout
@pytest.mark.parametrize("stage", STAGES)
def test_reason_of_a_rank_that_raised(stage: int) -> None:
    def run() -> None:
        engine = make_engine(stage)
        attach(engine)
        for step in range(2):
            if step:
                expect_timeout()
            loss = loss_of(engine, step, rank())
            if step and rank() == 1:
                loss.register_hook(_raise)
            engine.backward(loss)
            engine.step()

    lost, raised = run_ranks(run, expect="any", timeout=60)
    assert raised.error == "ValueError"
    assert lost.error == "RankError"
    assert "rank 1: has stopped: ValueError in the backward, 1 optimizer step(s) done" in lost.message


def _raise(_: Any) -> None:
    raise ValueError("boom")


@pytest.mark.extended(
    but=(
        "2-engine",
        "3-raw",
    )
)
@pytest.mark.off_device("by order alone, reductions would meet others: ranks get the error of the next test")
@pytest.mark.parametrize("how", ["engine", "raw", "raw, dropped by abort()"])
@pytest.mark.parametrize("stage", [2, 3])
def test_what_an_aborted_backward_has_sent_is_in_no_other_window(stage: int, how: str) -> None:
    """Ranks raise at different places of a backward that reduces as it goes, and train on.

    In the first backward, DeepSpeed has not compared yet in which order modules run; later it has.
    """

    def run() -> float:
        engine = make_engine(stage)
        zerosync = attach(engine, grad_memory_budget=0)  # a bucket per parameter
        for k in range(3):
            if k < 2:
                # Backward comes to the last layer's parameters first: rank 0 has sent them by then, and rank 1 none.
                param = engine.module[2 * rank()].bias
                hook = param.register_hook(_raise)
                loss = loss_of(engine, 9, rank())
                with pytest.raises(ValueError, match="boom"):
                    engine.backward(loss) if how == "engine" else loss.backward()
                hook.remove()
                if how == "raw":
                    engine.zero_grad()
                elif how != "engine":
                    zerosync.abort()
            engine.backward(loss_of(engine, k, rank()))
            engine.step()
        return distance(full_parameters(engine.module), oracle(3, 1))

    assert run_ranks(run) == [0.0, 0.0]


@pytest.mark.parametrize("stage", [*STAGES, "native"])
def test_a_rank_drops_its_gradients_alone(stage: int | str, monkeypatch: pytest.MonkeyPatch) -> None:
    """W3: the other one takes no part in it, and drops its own by zero_grad(). ``"native"``: stage 3, without tags."""
    if stage == "native":
        send_natively(monkeypatch)

    def run() -> float:
        engine = make_engine(3 if stage == "native" else int(stage))
        zerosync = attach(engine)
        for k in range(3):
            engine.backward(loss_of(engine, 9, rank()))
            if rank() == 0:
                with pytest.warns(UserWarning, match="sent nothing to other ranks"):
                    zerosync.abort("alone")
            else:
                engine.zero_grad()
            engine.backward(loss_of(engine, k, rank()))
            engine.step()
        return distance(full_parameters(engine.module), oracle(3, 1))

    assert run_ranks(run) == [0.0, 0.0]


def test_after_a_drop_a_backward_that_has_sent_nothing_may_raise_on_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """W3: it waits for no other, whatever the dropped one had sent."""
    send_natively(monkeypatch)

    def run() -> float:
        engine = make_engine(2)
        zerosync = attach(engine)
        engine.backward(loss_of(engine, 9, rank()))
        if rank() == 0:
            with pytest.warns(UserWarning, match="sent nothing to other ranks"):
                zerosync.abort("between two backwards")
            hook = engine.module[0].bias.register_hook(_raise)
            with pytest.raises(ValueError, match="boom"):
                engine.backward(loss_of(engine, 8, rank()))
            hook.remove()
        else:
            engine.zero_grad()
        engine.backward(loss_of(engine, 0, rank()))
        engine.step()
        return distance(full_parameters(engine.module), oracle(1, 1))

    assert run_ranks(run, timeout=60) == [0.0, 0.0]


REDUCES = {"grad_memory_budget": 0}


@pytest.mark.extended(
    but=("2-options0-True-False", "2-options1-False-True", "3-options2-True-False", "3-options4-False-True")
)
@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize(
    ("stage", "options", "alike"),
    [(2, REDUCES, True), (2, REDUCES, False), (3, REDUCES, True), (3, {}, True)]
    + [pytest.param(3, options, False, marks=ends_by_timeout) for options in (REDUCES, {})],
)
def test_collectives_of_an_aborted_backward_on_nccl(
    stage: int, options: dict[str, Any], alike: bool, raw: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By gloo's own collectives, which have no tags either: ranks that have sent as many go on, others do not.

    Under ZeRO-3, the rank that is further waits for a gather here, where NCCL leaves that to a stream.
    """
    send_natively(monkeypatch)

    def run() -> float:
        zero = dict.fromkeys(
            ("stage3_prefetch_bucket_size", "stage3_max_live_parameters", "stage3_param_persistence_threshold"), 0
        )  # so that backwards gather
        engine = make_engine(stage, zero if stage == 3 else {})
        attach(engine, **options)
        expect_timeout()
        hook = engine.module[0 if alike else 2 * rank()].bias.register_hook(_raise)
        with pytest.raises(ValueError, match="boom"):
            loss = loss_of(engine, 9, rank())
            loss.backward() if raw else engine.backward(loss)
        hook.remove()
        engine.zero_grad()
        engine.backward(loss_of(engine, 0, rank()))
        engine.step()
        return distance(full_parameters(engine.module), oracle(1, 1))

    waits, compares = outcomes = run_ranks(run, expect="any", timeout=60)
    if alike:
        assert [(outcome.error, outcome.value) for outcome in outcomes] == [(None, 0.0)] * 2
        return
    assert waits.error is not None and compares.error == "RankError"
    assert "A backward was aborted after this rank had begun" in compares.message
    if stage == 2:
        assert waits.error == "RankError"
        assert all("1 of 2 ranks after another number of them" in outcome.message for outcome in outcomes)


def test_ranks_that_wait_for_others_ask_the_store_no_more_often() -> None:
    """However long one takes: with 1,024 ranks the store could not answer 50 questions a second of each."""

    class Counting:
        requests = 0

        def __init__(self, store: Any) -> None:
            self._store = store

        def __getattr__(self, name: str) -> Any:
            Counting.requests += name != "clone"
            found = getattr(self._store, name)
            return (lambda: Counting(found())) if name == "clone" else found

    def run(seconds: float) -> int:
        start()
        store = Counting(dist.distributed_c10d._get_default_store())
        begun = BegunCollectives([dist.group.WORLD])
        begun.expect()
        begun.abort()
        if rank() == 2:
            time.sleep(seconds)
        with patch.object(dist.distributed_c10d, "_get_default_store", lambda: store):
            begun.compare_aborted()
        return Counting.requests

    for requests in run_ranks(run, 1.0, world_size=3):
        assert requests <= 6


def test_aborted_windows_are_compared_whatever_other_engines_a_rank_has() -> None:
    def run() -> None:
        start()
        alone = [dist.new_group([index]) for index in range(2)]
        if rank() == 1:
            BegunCollectives([alone[1]])
        begun = BegunCollectives([dist.group.WORLD])
        engines.expect_timeout()
        begun.expect()
        begun.abort()
        begun.compare_aborted()

    run_ranks(run)


class Chooses(nn.Module):
    """After the first layer, one or the other."""

    def __init__(self, *widths: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, width) for width in (8, *widths))

    def forward(self, x: torch.Tensor, other: bool, reads: bool = False) -> torch.Tensor:
        layer, x = self.layers[1 + other], self.layers[0](x)
        return x @ layer.weight.T if reads else layer(x)


def engine_that_chooses(model: Chooses, **zero: Any) -> Any:
    nothing_ahead = dict.fromkeys(
        ("stage3_param_persistence_threshold", "stage3_max_reuse_distance", "stage3_prefetch_bucket_size"), 0
    )
    return engines.make_engine(model, torch.optim.SGD(model.parameters(), lr=1.0), zero={**nothing_ahead, **zero})


FOUR_RANKS = pytest.param(4, "backward", marks=since("0.19.3", "there is no shard_over()"))


@pytest.mark.extended(but=("2-forward",))
@ends_by_timeout
@pytest.mark.parametrize(("world_size", "where"), [(2, "forward"), (2, "outside of the module"), FOUR_RANKS])
def test_gathers_of_different_parameters_do_not_meet(world_size: int, where: str) -> None:
    """Of different sizes they would end the process on gloo. On four ranks, one of two groups disagrees."""

    def run() -> None:
        start()
        model = Chooses(8, 24)
        if world_size == 4:
            shard_over([dist.new_group(ranks) for ranks in ROWS][rank() // 2], model)
        engine = engine_that_chooses(model)
        attach(engine)
        engine.backward(engine(torch.ones(2, 8), other=False).sum())
        engine.step()
        expect_timeout()
        if where == "backward":
            both = [engine(torch.ones(2, 8), other=other).sum() for other in (False, True)]
            engine.backward(both[rank() == 1] + 0 * both[0].detach())
        else:
            reads = where == "outside of the module"
            engine.backward(engine(torch.ones(2, 8), other=rank() == 1, reads=reads).sum())
        engine.step()

    outcomes = run_ranks(run, world_size=world_size, expect="any", timeout=60)
    errors_name_every_rank(outcomes)
    params = ["layers.{}.weight"] if where == "outside of the module" else ["layers.{}.weight", "layers.{}.bias"]
    own, other = (", ".join(repr(param.format(k)) for param in params) for k in (1, 2))
    for outcome in outcomes[:2]:
        assert f"rank 0: in the gather of {own} over the ranks [0, 1] for" in outcome.message
        assert f"rank 1: in the gather of {other} over the ranks [0, 1] for" in outcome.message


@pytest.mark.off_device("the host does not wait for the answer there: not this step says so, but what comes next")
def test_gathers_of_different_parameters_that_have_met() -> None:
    """Each rank gets a mixture, off NCCL by all-reduce. Where the host waits for answers, a step changes nothing."""

    def run() -> float:
        engine = engine_that_chooses(Chooses(8, 8), use_all_reduce_for_fetch_params=True)
        attach(engine)
        before = full_parameters(engine.module)
        engine.backward(engine(torch.ones(2, 8), other=rank() == 1).sum())
        with pytest.raises(RankError, match="gathered different parameters") as error:
            engine.step()
        assert "rank 0: 'layers.1.weight', 'layers.1.bias'" in str(error.value)
        assert "rank 1: 'layers.2.weight', 'layers.2.bias'" in str(error.value)
        return distance(full_parameters(engine.module), before)

    assert run_ranks(run) == [0.0, 0.0]


def test_a_checkpoint_of_a_mixture_is_refused(tmp_path: Path) -> None:
    """Where the host does not wait for the answer, the step that used the mixture is taken, and not saved."""

    def run() -> None:
        with simulate(backend=None):
            engine = engine_that_chooses(Chooses(8, 8), use_all_reduce_for_fetch_params=True)
            attach(engine)
            engine.backward(engine(torch.ones(2, 8), other=rank() == 1).sum())
            engine.step()
            with pytest.raises(RankError, match="gathered different parameters"):
                engine.save_checkpoint(str(tmp_path))

    run_ranks(run)
    assert not list(tmp_path.iterdir())


def test_models_and_options_that_are_not_alike() -> None:
    def run() -> tuple[str, str, float]:
        engine = make_engine(3)
        with pytest.raises(ValueError) as options:
            attach(engine, overlap_last=rank() == 0, param_memory_budget="all")
        if rank():
            engine.module[0].bias.requires_grad_(False)
        with pytest.raises(ValueError) as models:
            attach(engine)
        engine.module[0].bias.requires_grad_(True)
        attach(engine)  # nothing was left behind
        engine.backward(loss_of(engine, 0, rank()))
        engine.step()
        return str(options.value), str(models.value), distance(full_parameters(engine.module), oracle(1, 1))

    for options, models, error in run_ranks(run):
        assert "ZeroSync's 'overlap_last': True on rank 0; False on rank 1" in options
        assert "parameter 0.bias: (32,) torch.float32 persistent, sharded over 2 ranks on rank 0; " in models
        assert "(32,) torch.float32 frozen persistent, sharded over 2 ranks on rank 1" in models
        assert error == 0.0


def test_parameters_that_are_numbered_otherwise() -> None:
    """ZeRO-3 numbers what a process builds, and gathers in that order: another module on one rank only shifts it."""

    def run() -> str:
        start()
        alone = [dist.new_group([index]) for index in range(2)][rank()]
        if rank() == 1:
            with deepspeed.zero.Init(data_parallel_group=alone):
                nn.Linear(4, 4)
        engine = make_engine(3)
        with pytest.raises(ValueError) as error:
            attach(engine)
        return str(error.value)

    for message in run_ranks(run):
        assert "ZeRO-3's numbers of the parameters" in message and "0 to 3 on rank 0; 2 to 5 on rank 1" in message


@ends_by_timeout
def test_a_rank_that_dies_is_missed() -> None:
    def run() -> None:
        engine = make_engine(2)
        attach(engine)
        for step in range(2):
            if step:
                expect_timeout()
            engine.backward(loss_of(engine, step, rank()))
            if step and rank() == 1:
                os.kill(os.getpid(), 9)
            engine.step()

    lost, died = run_ranks(run, expect="any", timeout=60)
    assert died.error == DIED and lost.error == "RankError"
    assert "rank 1: gave no answer: its process has ended" in lost.message
