"""R7 on stage 3: what is held and gathered by its changes has the bits of what is gathered in full."""

import contextlib
import os
import warnings
from typing import Any

import pytest
import torch

from tests.core.test_changes import BF16, FP16, LAYERS, RATE, WIDTH, loss_of, make, several_buckets, share, step
from tests.harness.engines import rank
from tests.harness.masters import Masters
from tests.harness.networks import stack
from tests.harness.ranks import SIMULATED, run_ranks
from tests.harness.releases import needs_fp16
from zerosync_strategy import RankError
from zerosync_strategy.core.comm.collectives import InFlight
from zerosync_strategy.core.params import held_changes
from zerosync_strategy.core.params.held_changes import HeldChanges

__all__ = ["several_buckets"]
ZERO: dict[str, Any] = {"stage3_param_persistence_threshold": 0}
OFFLOAD = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_changes, "SMALLEST", 1000)


def pair(options: dict[str, Any], config: dict[str, Any] = BF16, zero: dict[str, Any] = ZERO) -> tuple[Any, Any]:
    """Return an engine that gathers changes, and one that does not."""
    return make(3, {"gather_changes": True, **options}, config, zero), make(3, options, config, zero)


def check_alike(changes: Any, full: Any) -> None:
    weights = zip(changes.full_weights(), full.full_weights(), strict=True)
    for (name, mine), (_, other) in weights:
        assert torch.equal(mine.view(torch.int16), other.view(torch.int16)), name


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("options", "config", "zero", "ranks"),
    [
        ({"param_memory_budget": "all"}, BF16, ZERO, 2),
        ({"param_memory_budget": 20_000}, BF16, ZERO, 3),
        ({"param_memory_budget": "all"}, BF16, {"stage3_param_persistence_threshold": WIDTH + 1}, 2),
        ({"param_memory_budget": "all", "node_size": 2}, BF16, ZERO, 4),
        ({"param_memory_budget": "all", "grad_memory_budget": 0}, BF16, ZERO | OFFLOAD, 2),
    ],
)
def test_the_same_bits_in_fewer_bytes(options: Any, config: Any, zero: Any, ranks: int) -> None:
    """With a rate that jumps, edits on all ranks and on one, a dropped window, and readers of old values."""

    def run() -> list[float]:
        changes, full = pair(options, config, zero)
        shares, kept, places = [], [], []
        for k in range(14):
            for each in (changes, full):
                engine = each.engine
                weight = engine.module[1][0].weight
                x = torch.ones(1, WIDTH).to(weight.dtype)
                if k in (2, 3) and each is changes:
                    engine(x)
                    places.append(weight.data_ptr())
                if k == 4:
                    with each.full_parameters(engine.module[1]):
                        weight.data.clamp_(-0.05, 0.05)
                if k == 9:  # in the window, where it is held
                    engine.backward(engine(x).float().mean())
                    if rank() == 1:
                        with torch.no_grad():
                            weight.mul_(1.25)
                if k == 11:
                    engine.backward(engine(x).sum())
                    engine.zero_grad()
                if k == 12:
                    engine(x)
                    kept.append((weight, weight.detach(), weight.detach().clone()))
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    step(each, k, RATE * (100 if k == 6 else 1))
                told = [str(each.message) for each in caught if "gather_changes" in str(each.message)]
                assert bool(told) == (k == 9 and each is changes), told
                assert all("rank 1 had other parameters than rank 0" in each for each in told)
            check_alike(changes, full)
            if k > 10:
                assert changes.report.peak_held_bytes == full.report.peak_held_bytes
            shares.append(share(changes) if changes.report.gathered_bytes_in_full else 1.0)  # nothing is held yet
            assert full.report.gathered_bytes_in_full == 0
        assert len(set(places)) == 1  # updated in place
        # On a device, where its gather may not be complete, it is a view of the parameter, as in plain torch.
        for weight, view, copy in kept:
            assert torch.equal(view, weight if os.environ.get(SIMULATED) else copy)
        return shares

    for shares in run_ranks(run, world_size=ranks):
        assert shares[0] == 1.0  # the first is full
        assert max(shares[2:4] + shares[6:7] + shares[12:]) < 0.6, shares
        assert sum(shares) < 0.8 * len(shares)


@needs_fp16()
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("stage", "options"), [(2, {}), (3, {"param_memory_budget": "all"})])
def test_a_step_that_overflows_changes_nothing(stage: int, options: Any) -> None:
    """Stage 2 gathers nothing after it, stage 3 differences of zero."""

    def run() -> list[int]:
        zero = ZERO if stage == 3 else {}
        changes, full = make(stage, {"gather_changes": True, **options}, FP16, zero), make(stage, options, FP16, zero)
        sent = []
        for k in range(6):
            for each in (changes, full):
                step(each, k, loss_times=float("inf") if k == 3 and rank() == 1 else 1.0)
            check_alike(changes, full)
            sent.append(changes.report.gathered_bytes)
        assert changes.engine.skipped_steps == full.engine.skipped_steps == 1
        return sent

    for sent in run_ranks(run):
        if stage == 2:
            assert sent[3] == 0 < sent[4] < sent[0] / 2
        else:
            assert sent[4] < min(sent[:4] + sent[5:]), sent


@pytest.mark.timeout(120)
@pytest.mark.off_device("on a device, the host reads the answer before the next step")
def test_what_was_damaged_on_the_way_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a module computes with it. In the code, in its digest, or that of another step."""
    gather, places = held_changes.all_gather, (0, 8, 40)

    def run(place: int) -> None:
        def damaged(rows: torch.Tensor, *told: Any) -> InFlight:
            in_flight = gather(rows, *told)
            if rank() == 1:
                in_flight.then(lambda _: rows[0, place].bitwise_xor_(1))
            return in_flight

        monkeypatch.setattr(held_changes, "all_gather", damaged)
        zerosync = make(3, {"gather_changes": True, "param_memory_budget": "all"}, BF16, ZERO)
        step(zerosync, 0)
        if rank() == 1:
            with pytest.raises(RankError, match="that rank 0 has sent are others here, by their digest"):
                step(zerosync, 1)
        else:
            with contextlib.suppress(RankError):  # that the other one is gone
                step(zerosync, 1)

    for place in places:
        run_ranks(run, place)


@pytest.mark.timeout(120)
def test_shards_that_others_have_written_are_gathered_in_full(tmp_path: Any) -> None:
    """After a checkpoint was saved, and after one was loaded. Also with a parameter that is frozen later."""

    def run() -> list[bool]:
        changes, full = pair({"param_memory_budget": "all"})
        in_full = []
        for k in range(8):
            for each in (changes, full):
                engine = each.engine
                if k == 2:
                    engine.module[4][0].weight.requires_grad_(False)
                if k == 4:
                    engine.save_checkpoint(str(tmp_path / str(each is full)))
                if k == 6:
                    engine.load_checkpoint(str(tmp_path / str(each is full)))
                step(each, k)
            check_alike(changes, full)
            in_full.append(share(changes) == 1.0)
        return in_full

    assert run_ranks(run) == [[True, False, False, False, True, False, True, False]] * 2


@pytest.mark.parametrize("slow", ["coded", "full"])
def test_auto_keeps_the_faster_one_on_all_ranks(monkeypatch: pytest.MonkeyPatch, slow: str) -> None:
    """One of three ranks says that windows of one kind took it long; all ranks take the longest times of any."""
    begin = HeldChanges.begin_step

    def begin_step(self: Any) -> None:
        if rank() == 1 and self._way.codes == (slow == "coded"):
            self._began -= 100.0
        begin(self)

    monkeypatch.setattr(HeldChanges, "begin_step", begin_step)

    def run() -> list[bool]:
        zerosync = make(3, {"gather_changes": "auto", "param_memory_budget": "all"}, BF16, ZERO)
        coded = []
        for k in range(12):
            step(zerosync, k)
            coded.append(bool(zerosync.report.gathered_bytes_in_full) and share(zerosync) != 1.0)
        return coded

    for coded in run_ranks(run, world_size=3):
        assert coded[:8] == [False, True] * 4, coded
        assert coded[8:] == [slow == "full"] * 4, coded


@pytest.mark.timeout(120)
def test_the_gather_after_a_step_that_raised_is_in_full() -> None:
    """The optimizer raises on all ranks, and has changed nothing; training goes on as plain torch's."""
    rate = 10 * RATE

    def run() -> tuple[list[float], float]:
        changes, full = pair({"param_memory_budget": "all"})
        net = stack(WIDTH, LAYERS, seed=2)
        plain = Masters(net, torch.bfloat16, lambda weights: torch.optim.AdamW(weights, lr=rate))
        shares = []
        for k in range(7):
            for each in (changes, full):
                if k != 3:
                    step(each, k, rate)
                    continue
                hook = each.engine.optimizer.optimizer.register_step_pre_hook(fail)
                with pytest.raises(ArithmeticError, match="in the optimizer"):
                    step(each, k, rate)
                hook.remove()
            if k != 3:
                plain.step(loss_of, [k])
                shares.append(share(changes))
            check_alike(changes, full)
        weights = dict(changes.full_weights())
        error = torch.cat([(weights[name] - master).abs().flatten() for name, master in plain.parameters().items()])
        return shares, float(error.mean())

    for shares, error in run_ranks(run):
        assert shares[3] > 0.5 > max(shares[1:3] + shares[4:]), shares  # with the window before, which was coded
        assert error < rate / 5  # bf16 rounds by about a tenth of a step


def fail(*_: Any) -> None:
    raise ArithmeticError("in the optimizer")


@pytest.mark.timeout(120)
@pytest.mark.off_device("one rank ends, and the other waits for it, as on NCCL until its watchdog")
def test_a_step_that_raises_on_one_rank_ends_the_others() -> None:
    """They wait for what it was to say, update nothing, and name it."""

    def run() -> None:
        zerosync = make(3, {"gather_changes": True, "param_memory_budget": "all"}, BF16, ZERO)
        for k in range(3):
            if k == 2 and rank() == 1:
                zerosync.engine.optimizer.optimizer.register_step_pre_hook(fail)
            step(zerosync, k)

    lost, raised = run_ranks(run, expect="any", timeout=60)
    assert raised.error == "ArithmeticError"
    assert lost.error == "RankError"
    assert "rank 1: has stopped: ArithmeticError in the optimizer step, 2 optimizer step(s) done" in lost.message
