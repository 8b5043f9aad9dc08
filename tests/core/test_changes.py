"""R7: what is gathered after a step by its changes has the bits of what is gathered in full."""

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.harness.engines import make_engine, rank
from tests.harness.networks import stack
from tests.harness.ranks import run_ranks
from tests.harness.releases import needs_fp16
from zerosync_strategy import RankError, attach
from zerosync_strategy.core.comm import messages
from zerosync_strategy.core.comm.collectives import InFlight
from zerosync_strategy.core.comm.differences import digest
from zerosync_strategy.core.comm.faster import MEASURE_EVERY, FasterWay
from zerosync_strategy.core.comm.surveys import SURVEY_EVERY
from zerosync_strategy.core.gradients import buckets, changes
from zerosync_strategy.core.gradients.changes import _HEADER, ChangesGather

WIDTH, LAYERS = 64, 5
RATE = 1e-4
BF16: dict[str, Any] = {"bf16": {"enabled": True}}
FP16: dict[str, Any] = {"fp16": {"enabled": True, "loss_scale": 64.0}}
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}


@pytest.fixture(autouse=True)
def several_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "WITHIN_HOST", messages.Messages(20_000, 2))
    monkeypatch.setattr(messages, "BETWEEN_HOSTS", messages.Messages(20_000, 2))
    monkeypatch.setattr(changes, "SMALLEST", 1000)


def make(stage: int, options: dict[str, Any], config: dict[str, Any], zero: dict[str, Any] | None = None) -> Any:
    net = stack(WIDTH, LAYERS, seed=2)
    engine = make_engine(net, torch.optim.AdamW(net.parameters(), lr=RATE), stage, zero, **config)
    return attach(engine, **options)


def step(zerosync: Any, k: int, rate: float = RATE, loss_times: float = 1.0) -> None:
    engine = zerosync.engine
    for group in engine.optimizer.param_groups:
        group["lr"] = rate
    engine.backward(loss_of(engine, k, rank()) * loss_times)
    engine.step()


def loss_of(module: Any, k: int, of_rank: int) -> torch.Tensor:
    dtype = next(module.parameters()).dtype
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * k + of_rank)).to(dtype)
    loss: torch.Tensor = (module(x) - 0.2).float().square().mean()
    return loss


def bits(zerosync: Any) -> torch.Tensor:
    return torch.cat([param.detach().view(torch.int16).flatten() for param in zerosync.engine.module.parameters()])


def share(zerosync: Any) -> float:
    report = zerosync.report
    return float(report.gathered_bytes / report.gathered_bytes_in_full)


@pytest.mark.parametrize(
    ("stage", "options", "config", "zero", "ranks"),
    [
        (1, {}, BF16, {}, 2),
        (2, {}, BF16, {}, 3),
        (2, {"node_size": 2}, BF16, {}, 4),
        (2, {"overlap_gather": True}, BF16, {}, 3),
        (2, {"grad_memory_budget": 0}, BF16, OFFLOAD, 2),
        pytest.param(2, {}, FP16, {}, 2, marks=needs_fp16()),
    ],
)
def test_the_same_bits_in_fewer_bytes(stage: int, options: Any, config: Any, zero: Any, ranks: int) -> None:
    """As of the same engine that gathers in full: all else is the same, and order of sums too.

    With a rate that jumps; with edits, on all ranks and on one; with a dropped window.
    """
    jump = 100 if config is BF16 else 10  # fp16 has finer units: by more of them, it would go in full for a while

    def run() -> list[tuple[float, float]]:
        changes, full = (
            make(stage, {"gather_changes": True, **options}, config, zero),
            make(stage, options, config, zero),
        )
        reports = []
        for k in range(14):
            for each in (changes, full):
                module = each.engine.module
                if k == 4:
                    module[1][0].weight.data.clamp_(-0.05, 0.05)
                if k == 9 and rank() == 1:
                    with torch.no_grad():
                        module[2][0].weight.mul_(1.25)
                if k == 11:
                    each.engine.backward(each.engine(torch.ones(1, WIDTH).to(next(module.parameters()).dtype)).sum())
                    each.engine.zero_grad()
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    step(each, k, RATE * (jump if k == 6 else 1))
                told = [str(each.message) for each in caught if "gather_changes" in str(each.message)]
                assert bool(told) == (k == 9 and each is changes), told
                assert all("rank 1" in each for each in told)
            assert torch.equal(bits(changes), bits(full)), k
            report = changes.report
            reports.append((share(changes), report.bytes_sent / report.floor_bytes))
            assert full.report.gathered_bytes_in_full == 0
            if options.get("node_size") and k in (3, 13):
                assert report.bytes_sent_between_nodes < 0.8 * full.report.bytes_sent_between_nodes
        return reports

    for reports in run_ranks(run, world_size=ranks):
        shares = [share for share, _ in reports]
        assert shares[0] == 1.0  # the first is full
        assert max(shares[1:9] + shares[10:]) < 0.7, shares
        assert sum(shares) < 0.5 * len(shares)


def of_another_step(row: torch.Tensor) -> None:
    step, checksum = row[:_HEADER].view(torch.int64)
    step.add_(1)
    checksum.zero_()
    checksum.copy_(digest(row.view(1, -1))[0])


DAMAGE: dict[str, Callable[[torch.Tensor], Any]] = {
    "code": lambda row: row[_HEADER + 40].bitwise_xor_(1),
    "checksum": lambda row: row[8].bitwise_xor_(1),
    "the last byte": lambda row: row[-1].bitwise_xor_(128),
    "another step": of_another_step,
}


@pytest.mark.off_device("one rank ends, and the other waits for it, as on NCCL until its watchdog")
@pytest.mark.parametrize("name", DAMAGE)
def test_what_was_damaged_on_the_way_is_refused(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    gather = buckets.all_gather

    def damaged(rows: torch.Tensor, *told: Any) -> InFlight:
        in_flight = gather(rows, *told)
        if rank() == 1 and rows.dtype is torch.uint8:
            finish = in_flight._finish
            in_flight._finish = lambda: (DAMAGE[name](rows[0]), finish())
        return in_flight

    monkeypatch.setattr(buckets, "all_gather", damaged)

    def run() -> None:
        zerosync = make(2, {"gather_changes": True}, BF16)
        step(zerosync, 0)
        if rank() == 1:
            with pytest.raises(RankError, match="is not what rank 0 has sent, by its checksum"):
                step(zerosync, 1)
        else:
            with contextlib.suppress(RankError):  # that the other one is gone, if something was still to come from it
                step(zerosync, 1)

    run_ranks(run)


@pytest.mark.parametrize("slow", ["coded", "full"])
def test_the_faster_one_is_kept_on_all_ranks(monkeypatch: pytest.MonkeyPatch, slow: str) -> None:
    """One of three ranks is slow one way; all ranks take the longest times of any."""
    begin = ChangesGather.begin_step

    def begin_step(self: Any) -> None:
        begin(self)
        if rank() == 1 and self._way.codes == (slow == "coded"):
            self._began -= 100.0

    monkeypatch.setattr(ChangesGather, "begin_step", begin_step)

    def run() -> list[bool]:
        zerosync = make(2, {"gather_changes": "auto"}, BF16)
        coded = []
        for k in range(12):
            step(zerosync, k)
            coded.append(share(zerosync) != 1.0)
        return coded

    for coded in run_ranks(run, world_size=3):
        assert coded[:8] == [False, True, False, True, False, True, False, True]
        assert coded[8:] == [slow == "full"] * 4


@pytest.mark.parametrize(
    ("coded", "turns", "is_faster"), [(0.5, 7, True), (2.0, 7, False), (0.98, 19, False), (0.96, 7, True)]
)
def test_a_measurement_goes_on_where_both_are_close(coded: float, turns: int, is_faster: bool) -> None:
    """To the end of 19 steps at most, and full gathers are kept then."""
    way = FasterWay(automatic=True)
    for _ in range(2):
        for turn in range(MEASURE_EVERY + 1):
            assert way.measures == (0 < turn <= turns)
            assert way.codes == (turn % 2 == 1 if way.measures else is_faster or not turn), turn
            assert way.end_turn(coded if way.codes else 1.0, way.own_times()) == (turn == MEASURE_EVERY)
        way.reset()


def test_no_step_costs_more_than_in_full() -> None:
    """Steps that change everything follow on others; what is not worth it is looked at again after some steps."""

    def run() -> list[float]:
        zerosync = make(2, {"gather_changes": True}, BF16)
        shares = []
        for k in range(8 + SURVEY_EVERY):
            step(zerosync, k, 0.5 if k == 4 else 1e-7)
            shares.append(share(zerosync))
            assert not k or zerosync.report.bytes_sent <= 1.02 * zerosync.report.floor_bytes
        return shares

    for shares in run_ranks(run):
        paused = slice(4, 5 + SURVEY_EVERY)
        assert set(shares[paused]) == {1.0} == {shares[0]}
        assert max(shares[1:4] + shares[5 + SURVEY_EVERY :]) < 0.5


def test_where_it_is_refused() -> None:
    def run() -> None:
        with pytest.raises(
            ValueError, match=r"'gather_changes' got True, and is for parameters of 16 bits; found torch\.f"
        ):
            make(2, {"gather_changes": True}, {})
        with pytest.raises(ValueError, match="'gather_changes' got 'auto', which on stage 3 is for parameters that"):
            make(3, {"gather_changes": "auto", "param_memory_budget": {"host": "all"}}, BF16)
        with pytest.raises(ValueError, match=r"'gather_changes' got True, .* is for parameters of 16 bits; found"):
            make(3, {"gather_changes": True, "param_memory_budget": "all"}, {})
        for otherwise in ("zero_quantized_weights", "use_all_reduce_for_fetch_params", "allgather_sequential"):
            net = stack(WIDTH, LAYERS, seed=2)
            engine = make_engine(net, torch.optim.AdamW(net.parameters()), 3, None, **BF16)
            if otherwise in type(engine._config.zero_config).model_fields:  # DeepSpeed's CPU has no quantizer to build
                setattr(engine._config.zero_config, otherwise, True)
                with pytest.raises(ValueError, match=r"'gather_changes' got True, .* lets DeepSpeed gather others \(q"):
                    attach(engine, gather_changes=True, param_memory_budget="all")
        with pytest.raises(ValueError, match="'gather_changes' got 'auto' with overlap_gather=True"):
            make(2, {"gather_changes": "auto", "overlap_gather": True}, BF16)
        with pytest.raises(TypeError, match="'gather_changes' takes True, False or \"auto\", got 'always'"):
            make(2, {"gather_changes": "always"}, BF16)
        zerosync = make(2, {"gather_changes": "auto"}, {})  # fp32: as without
        step(zerosync, 0)
        assert zerosync.report.gathered_bytes_in_full == 0

    run_ranks(run)


def test_a_loaded_checkpoint_is_gathered_from_in_full(tmp_path: Any) -> None:
    def run() -> list[bool]:
        zerosync = make(2, {"gather_changes": True}, BF16)
        full = []
        for k in range(6):
            if k == 3:
                zerosync.engine.save_checkpoint(str(tmp_path))
            if k == 5:
                zerosync.engine.load_checkpoint(str(tmp_path))
            step(zerosync, k)
            full.append(share(zerosync) == 1.0)
        again = make(2, {}, BF16)
        again.engine.load_checkpoint(str(tmp_path))
        step(again, 5)
        assert torch.equal(bits(again), bits(zerosync))
        return full

    assert run_ranks(run) == [[True, False, False, False, False, True]] * 2
