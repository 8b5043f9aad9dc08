"""What is reduced when, and how: budget, last backward, order of summation, bytes, odd configurations."""

import os
from typing import Any

import pytest
import torch
from deepspeed.utils import safe_get_full_fp32_param
from torch import nn

from tests.harness import engines
from tests.harness.engines import attached_of, rank
from tests.harness.extended import STAGES, VALUES
from tests.harness.native import send_natively
from tests.harness.oracle import Oracle, distance, full_parameters
from tests.harness.racecheck import simulate
from tests.harness.ranks import KEPT_ON_DEVICES, SIMULATED, run_ranks
from tests.harness.releases import since
from tests.harness.rounding import bounded, excess
from zerosync_strategy import attach
from zerosync_strategy.core.comm import collectives, nodes
from zerosync_strategy.core.gradients import layout, reducer
from zerosync_strategy.core.gradients.window import Window

LAYERS, WIDTH, BACKWARDS = 6, 32, 4
LAYER = WIDTH * WIDTH * 4  # bytes


def model() -> nn.Module:
    torch.manual_seed(4)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh()) for _ in range(LAYERS)]
    return nn.Sequential(*layers)


def loss_of(module: Any, k: int, rank: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * k + rank)).to(dtype)
    return (module(x).float() - 0.1).square().mean() / BACKWARDS


def make_engine(
    stage: int, optimizer: Any = torch.optim.AdamW, zero: dict[str, Any] | None = None, **config: Any
) -> Any:
    module, zero = model(), {"reduce_scatter": False, **(zero or {})}
    return engines.make_engine(module, optimizer(module.parameters(), lr=0.01), stage, zero, **config)


def train(engine: Any, zerosync: Any, steps: int, promise: bool = False, dtype: torch.dtype = torch.float32) -> None:
    zerosync.window.expect_last(False)
    for k in range(steps * BACKWARDS):
        last = (k + 1) % BACKWARDS == 0
        if last and promise:
            zerosync.window.expect_last()
        engine.backward(loss_of(engine, k, rank(), dtype))
        if last:
            engine.step()


def oracle(steps: int, ranks: int = 2, optimizer: Any = torch.optim.AdamW) -> dict[str, torch.Tensor]:
    module = model()
    return Oracle(module, optimizer(module.parameters(), lr=0.01), ranks).train(loss_of, steps, BACKWARDS)


def bytes_sent(report: Any) -> int:
    """Of gradients, and of updated parameters, which are gathered at the end of the step: all are persistent."""
    return sum(traffic.bytes for kind, traffic in report.collectives.items() if not kind.startswith("all_reduce"))


@pytest.mark.extended(but=("1", "3"))
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_gradient_budget(stage: int) -> None:
    """The peak of unreduced gradients stays within the budget plus one parameter; the less memory, the more bytes."""

    budgets = (None, 4 * LAYER, 2 * LAYER, 0)

    def run() -> Any:
        results = []
        for budget in budgets:
            engine = make_engine(stage)
            zerosync = attach(engine, grad_memory_budget=budget)
            train(engine, zerosync, 2)
            results.append((distance(full_parameters(engine.module), oracle(2)), zerosync.report))
            engine.destroy()
        return results

    reports, sent, kept = {}, [], KEPT_ON_DEVICES * LAYER if SIMULATED in os.environ else 0
    for budget, *results in zip(budgets, *run_ranks(run), strict=True):
        error, report = results[0]
        assert error == 0.0
        assert budget is None or report.peak_unreduced_bytes <= budget + LAYER + kept
        reports[budget] = report
        of_rank = {bytes_sent(report) for _, report in results}
        assert len(of_rank) == 1
        sent += of_rank
    gradients = LAYERS * LAYER // 2  # bytes to send to reduce all of them once
    sent = [size - gradients for size in sent]  # the updated parameters are sent in the same way
    assert sent == [gradients, gradients + 3 * 3 * LAYER // 2, gradients + 3 * 5 * LAYER // 2, BACKWARDS * gradients]
    assert [report.reductions for report in reports.values()] == [1, BACKWARDS, BACKWARDS, BACKWARDS]
    if not kept:
        peaks = [report.peak_unreduced_bytes for report in reports.values()]
        assert peaks == [6 * LAYER, 4 * LAYER, 2 * LAYER, LAYER]


@pytest.mark.extended(but=("2", "3"))
@pytest.mark.parametrize("stage", STAGES)
def test_the_last_backward_reduces_as_it_goes(stage: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "WITHIN_HOST", nodes.MessageSizes(2 * LAYER, 2))

    def run(overlap: bool) -> Any:
        events = []
        finish = Window.gradient_ready

        def ready(window: Window, gradient: Any) -> None:
            finish(window, gradient)
            events.append(window._reducer.pipeline.sent_floor.nbytes)

        monkeypatch.setattr(Window, "gradient_ready", ready)
        engine = make_engine(stage, zero={"reduce_bucket_size": 2 * WIDTH * WIDTH})
        zerosync = attach(engine, overlap_last=overlap)
        train(engine, zerosync, 2, promise=True)
        during = max(events[-LAYERS:])
        return distance(full_parameters(engine.module), oracle(2)), zerosync.report.reductions, during

    # In buckets of two layers, each of which is spread evenly over the ranks. On stage 3 when the backward comes to the
    # module before them: before the first there is none.
    layers = LAYERS if stage < 3 else LAYERS - 2
    assert run_ranks(run, True)[0] == (0.0, 1, layers * LAYER // 2)
    assert run_ranks(run, False)[0] == (0.0, 1, 0)


@pytest.mark.extended
@pytest.mark.off_device("collectives of NCCL are as large as buckets, on one host and between hosts")
@pytest.mark.parametrize("stage", [2, 3])
def test_between_hosts_messages_are_smaller(stage: int) -> None:
    def run(one_host: bool) -> Any:
        nodes.loopback = lambda: [0 if one_host else rank()]
        nodes.BETWEEN_HOSTS = nodes.MessageSizes(2 * LAYER, 4)
        engine = make_engine(stage)
        zerosync = attach(engine)
        train(engine, zerosync, 2)
        return distance(full_parameters(engine.module), oracle(2)), len(attached_of(zerosync).parts.reducer.buckets)

    assert run_ranks(run, True) == [(0.0, 1)] * 2
    assert run_ranks(run, False) == [(0.0, LAYERS // 2)] * 2


class Weighted(nn.Module):
    """Has the gradients that it is given, to the bit: of a sum of products, they are the factors."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(WIDTH, WIDTH)) for _ in range(LAYERS))

    def forward(self, factors: list[torch.Tensor]) -> torch.Tensor:
        return sum((weight * factor).sum() for weight, factor in zip(self.weights, factors, strict=True))


EVERY_WAY: list[dict[str, Any]] = [
    {}, {"reduction": "ordered"}, {"coalesce": False}, {"overlap_last": False}, {"grad_memory_budget": 0},
    {"grad_memory_budget": 3 * LAYER},
]  # fmt: skip


@pytest.mark.extended(but=("1-2", "3-2"))
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_whole_numbers_are_exact(stage: int, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the bit, on any processor: sums of whole numbers, their halves and quarters are exact in every order.

    What is lost, counted twice, rounded on the way or gathered from elsewhere is a whole number away.
    """
    monkeypatch.setattr(nodes, "WITHIN_HOST", nodes.MessageSizes(3 * LAYER // 2, 2))

    def factors(k: int, of_rank: int) -> list[torch.Tensor]:
        draw = torch.Generator().manual_seed(10 * k + of_rank)
        return [torch.randint(-1000, 1000, (WIDTH, WIDTH), generator=draw).float() for _ in range(LAYERS)]

    def run() -> None:
        held: list[dict[str, Any]] = [{"param_memory_budget": "all"}] if stage == 3 else []
        for options in EVERY_WAY + held:
            module, zero = Weighted(), {"reduce_bucket_size": WIDTH * WIDTH}
            engine = engines.make_engine(module, torch.optim.SGD(module.parameters(), lr=0.5), stage, zero)
            zerosync = attach(engine, **options)
            expected = [torch.zeros(WIDTH, WIDTH) for _ in range(LAYERS)]
            for k in range(3 * BACKWARDS):
                last = (k + 1) % BACKWARDS == 0
                if last:
                    zerosync.window.expect_last()
                engine.backward(engine(factors(k, rank())))
                for of_rank in range(ranks):
                    for each, factor in zip(expected, factors(k, of_rank), strict=True):
                        each -= 0.5 * factor / ranks
                if last:
                    engine.step()
            assert distance(full_parameters(module), full_parameters_of(expected)) == 0.0, options
            engine.destroy()

    run_ranks(run, world_size=ranks)


def full_parameters_of(weights: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"weights.{index}": weight for index, weight in enumerate(weights)}


@pytest.mark.extended
@pytest.mark.parametrize("stage", [2, 3])
def test_ordered_sums_are_the_same_whatever_the_chunks(stage: int) -> None:
    """To the bit, on any processor: each element is the sum of the same three, by the same order of additions."""

    def factors(of_rank: int) -> list[torch.Tensor]:
        draw = torch.Generator().manual_seed(of_rank)
        return [torch.randn(WIDTH, WIDTH, generator=draw) for _ in range(LAYERS)]

    def run() -> None:
        found = []
        for chunk, bucket in ((100, 10), (2**20, 10**6), (3000, 500)):
            nodes.WITHIN_HOST = nodes.MessageSizes(chunk, 2)
            module, zero = Weighted(), {"reduce_bucket_size": bucket, "reduce_scatter": False}
            engine = engines.make_engine(module, torch.optim.SGD(module.parameters(), lr=0.5), stage, zero)
            zerosync = attach(engine, reduction="ordered")
            engine.backward(engine(factors(rank())))
            with zerosync.full_gradients():
                found.append([param.grad.clone() for param in module.parameters()])
            engine.step()
            engine.destroy()
        sums = list(zip(*(factors(of_rank) for of_rank in range(3)), strict=True))
        means = bounded(lambda: [torch.stack(of_ranks).mean(0) for of_ranks in sums])
        for first, second, third, mean in zip(*found, means, strict=True):
            assert torch.equal(first, second) and torch.equal(first, third) and excess(first, mean) == 0.0

    run_ranks(run, world_size=3)


@pytest.mark.extended(but=("3",))
@pytest.mark.parametrize("stage", STAGES)
def test_a_step_whose_gradients_were_all_dropped_is_one_with_zeros(stage: int) -> None:
    """Not with those of the step before, which are still in the memory of the shards."""

    def run() -> float:
        engine = make_engine(stage, torch.optim.SGD)
        train(engine, attach(engine), 1)
        before = full_parameters(engine.module)
        engine.backward(loss_of(engine, 9, rank()))
        engine.zero_grad()
        engine.step()
        return distance(full_parameters(engine.module), before)

    assert run_ranks(run) == [0.0, 0.0]


@pytest.mark.extended(
    but=(
        "1-2",
        "3-2",
    )
)
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_bytes_are_at_the_floor(stage: int, ranks: int) -> None:
    """R1, on a model large enough for the few bytes of the gradient norm not to count."""

    def run() -> Any:
        engine = make_engine(stage)
        train(engine, zerosync := attach(engine, **({"param_memory_budget": "all"} if stage == 3 else {})), 2)
        return zerosync.report

    for report in run_ranks(run, world_size=ranks):
        assert report.floor_bytes == 2 * LAYERS * LAYER * (ranks - 1) // ranks
        assert 1.0 <= report.ratio < 1.02


@pytest.mark.extended(but=("2.0-3",))
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("factor", [1.0, 2.0, 4.0])
def test_gradient_predivide_factor(stage: int, factor: float) -> None:
    """Powers of two round nothing. With DeepSpeed's own reducer, stage 3 loses the factor when it equals the ranks."""

    def run() -> float:
        engine = make_engine(stage, optimizer=torch.optim.SGD, gradient_predivide_factor=factor)
        train(engine, attach(engine), 1)
        return distance(full_parameters(engine.module), oracle(1, optimizer=torch.optim.SGD))

    assert run_ranks(run) == [0.0, 0.0]


@pytest.mark.extended(but=("3",))
@pytest.mark.parametrize("stage", STAGES)
def test_communication_in_bf16(stage: int) -> None:
    """Half the bytes for the gradients; the sum itself is fp32, so only what is sent is rounded."""

    def run() -> Any:
        def sgd(params: Any, lr: float) -> torch.optim.Optimizer:
            return torch.optim.SGD(params, lr=100 * lr)

        engine = make_engine(stage, optimizer=sgd, communication_data_type="bf16")
        train(engine, zerosync := attach(engine), 2)
        found = full_parameters(engine.module)
        return distance(found, oracle(2, optimizer=sgd)), distance(found, full_parameters(model())), zerosync.report

    error, moved, report = run_ranks(run)[0]
    assert 0 < error < moved / 2**8  # bf16 has 8 bits
    assert bytes_sent(report) == LAYERS * LAYER // 4 + LAYERS * LAYER // 2


@pytest.mark.extended
@pytest.mark.parametrize("stage", [2, 3])
def test_fp32_accumulation_of_bf16_gradients(stage: int) -> None:
    """Local gradients accumulate in the configured type: ten small ones are not lost beside a large one."""

    def run(accumulation: str) -> float:
        types = {"data_types": {"grad_accum_dtype": accumulation}}
        engine = make_engine(stage, optimizer=torch.optim.SGD, bf16={"enabled": True}, **types)
        zerosync = attach(engine)

        def total(*scales: float) -> float:
            zerosync.window.expect_last(False)
            zerosync.window.expect_last(False)
            for scale in scales:
                engine.backward(engine(torch.ones(1, WIDTH, dtype=torch.bfloat16)).float().sum() * scale)
            zerosync.reduce()
            averaged = [p for group in engine.optimizer.averaged_gradients.values() for p in group]
            result = sum(part.double().abs().sum().item() for part in averaged)
            engine.optimizer.zero_grad()
            return result

        return total(256.0, *[1.0] * 8) / total(1.0)

    assert abs(run_ranks(run, "fp32")[0] - 264) < 0.5
    assert abs(run_ranks(run, "bf16")[0] - 264) > 0.5  # 8 bits of mantissa: 256 + 1 is rounded away, or up to 258


@pytest.mark.parametrize("stage", [2, 3])
def test_what_is_accumulated_in_fp32_is_reduced_in_fp32(stage: int) -> None:
    """Unless the configuration says otherwise: 256 + 63 x 1 is 319, and 320 where the sum is rounded to bf16."""

    def run(zero: dict[str, Any], ours: dict[str, Any], config: dict[str, Any]) -> tuple[float, int]:
        net = nn.Linear(4, 4, bias=False).bfloat16()
        with torch.no_grad():
            net.weight.zero_()
        types = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
        optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
        engine = engines.make_engine(net, optimizer, stage, zero, **types, **config)
        zerosync = attach(engine, **ours)
        zerosync.window.expect_last(False)
        for scale in (256.0, *[1.0] * 63):
            engine.backward(engine(torch.eye(4).bfloat16() * scale).float().sum())
        engine.step()
        return float(safe_get_full_fp32_param(net.weight).min()), bytes_sent(zerosync.report)

    sharded = {"stage3_param_persistence_threshold": 0} if stage == 3 else {}
    numel = 16 // 2  # that one of two ranks sends
    held = {"param_memory_budget": "all"} if stage == 3 else {}
    for found in run_ranks(run, sharded, held, {}):
        assert found == (-319.0, numel * (4 + 2))
    for found in run_ranks(run, sharded, held, {"communication_data_type": "bf16"}):
        assert found == (-320.0, numel * (2 + 2))


@pytest.mark.extended(but=("3",))
@since("0.19.7", "gradients that are not finite are stepped with in fp32, as in plain torch")
@pytest.mark.parametrize("stage", [2, 3])
def test_an_overflow_skips_the_step_and_closes_the_window(stage: int) -> None:
    def run() -> Any:
        engine = make_engine(stage, optimizer=torch.optim.SGD)
        zerosync = attach(engine)
        before = full_parameters(engine.module)
        engine.backward(loss_of(engine, 0, 0))
        engine.backward(loss_of(engine, 0, 0) * float("inf"))
        assert zerosync.gradient_norm() == float("inf")
        engine.step()
        skipped = engine.skipped_steps, distance(full_parameters(engine.module), before)
        train(engine, zerosync, 1)
        return *skipped, distance(full_parameters(engine.module), oracle(1, optimizer=torch.optim.SGD))

    assert run_ranks(run) == [(1, 0.0, 0.0)] * 2


@pytest.mark.extended(but=("2",))
@pytest.mark.parametrize("stage", [1, 2])
def test_deepspeed_mixture_of_experts(stage: int) -> None:
    """Experts are averaged over their own group, as by DeepSpeed's own reducer."""

    def run() -> Any:
        from deepspeed.moe.layer import MoE
        from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

        class Experts(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                torch.manual_seed(1)
                self.first = nn.Linear(WIDTH, WIDTH)
                expert = nn.Linear(WIDTH, WIDTH)
                self.moe = MoE(WIDTH, expert, num_experts=4, ep_size=2, k=1, capacity_factor=4.0, use_rts=False)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.moe(torch.tanh(self.first(x)))[0]

        def trained(attached: bool) -> Any:
            module = Experts()
            groups = split_params_into_different_moe_groups_for_optimizer(
                {"params": list(module.parameters()), "name": "all"}
            )
            engine = engines.make_engine(module, torch.optim.SGD(groups, lr=0.5), stage)
            if attached:
                attach(engine)
            for k in range(4):
                engine.backward(loss_of(engine, k, rank()))
                engine.step()
            return full_parameters(module), len(engine.optimizer.bit16_groups)

        engines.start()
        (ours, groups), (stock, _) = trained(True), trained(False)
        assert groups == 2
        return distance(ours, stock), distance(ours, full_parameters(Experts()))

    for error, moved in run_ranks(run, world_size=4):
        assert error < 1e-3 * moved and moved > 1e-3  # rounding makes 1e-6 of what has moved; no average is that near


@pytest.mark.off_device("its communicator completes what somebody waits for, and nobody waits for this")
def test_what_an_abort_has_abandoned_is_freed_once_it_is_complete() -> None:
    """On the way that NCCL takes, by all-to-alls: of those gloo says whether they are complete."""

    def run() -> tuple[bool, bool]:
        with simulate():
            engine = make_engine(2, zero={"reduce_bucket_size": WIDTH * WIDTH})
            zerosync = attach(engine, coalesce=False, reduction="ordered")
            first = next(engine.module.parameters())
            handle = first.register_hook(lambda gradient: 1 / 0)
            with pytest.warns(UserWarning, match="ZeroDivisionError"), pytest.raises(ZeroDivisionError):
                engine.backward(loss_of(engine, 0, rank()))
            handle.remove()
            abandoned = bool(attached_of(zerosync).parts.reducer.pipeline.abandoned)
            engine.backward(loss_of(engine, 0, rank()))
            engine.step()
            return abandoned, bool(attached_of(zerosync).parts.reducer.pipeline.abandoned)

    assert run_ranks(run) == [(True, False)] * 2


@pytest.mark.extended(but=VALUES)
@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("stage", [2, 3])
def test_chunks_in_flight_are_bounded(stage: int, native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """R2: two at a time, however many there are."""
    for module in (collectives, layout) if native else ():
        monkeypatch.setattr(module, "is_native", lambda process_group, device: True)
    monkeypatch.setattr(nodes, "WITHIN_HOST", nodes.MessageSizes(LAYER // 3, 2))
    monkeypatch.setattr(reducer, "SMALL_BYTES", LAYER // 3)

    def run() -> tuple[int, int]:
        begun: list[Any] = []
        most = 0
        stock = layout.reduce_scatter

        def reduce_scatter(*args: Any) -> Any:
            nonlocal most
            begun.append(flight := stock(*args))
            most = max(most, sum(not each.is_done for each in begun))
            return flight

        with monkeypatch.context() as patch:
            patch.setattr(layout, "reduce_scatter", reduce_scatter)
            engine = make_engine(stage, zero={"reduce_bucket_size": LAYER // 12})
            train(engine, attach(engine), 2)
        return most, len(begun)

    for most, launched in run_ranks(run):
        assert most == 2 and launched > 8, (most, launched)


@pytest.mark.extended(but=("3-2",))
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("stage", [2, 3])
def test_the_way_of_nccl(stage: int, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is sent where the backend has a reduce-scatter, here over gloo's: each gradient once, into its shard."""
    monkeypatch.setattr(collectives, "is_native", lambda process_group, device: True)
    monkeypatch.setattr(layout, "is_native", lambda process_group, device: True)

    def run() -> Any:
        found = {}
        for options in ({}, {"coalesce": False}, {"grad_memory_budget": 3 * LAYER}, {"reduction": "ordered"}):
            for bucket in (LAYER // 3, 10**6):
                engine = make_engine(stage, zero={"reduce_bucket_size": bucket})
                train(engine, zerosync := attach(engine, **options), 2, promise=True)
                error = distance(full_parameters(engine.module), oracle(2, ranks))
                found["".join(options), bucket] = error, set(zerosync.report.collectives)
                zerosync.detach()
        return found

    for (option, bucket), (error, kinds) in run_ranks(run, world_size=ranks)[0].items():
        assert error == 0.0, (option, bucket)
        assert "isend" not in kinds
        if option != "reduction":
            assert "reduce_scatter_tensor" in kinds and "reduce" not in kinds, (option, bucket, kinds)


@pytest.mark.parametrize("nbytes", [8_000, 10**6])
def test_rows_that_nccl_reduces_are_aligned(nbytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here no shard has a multiple of 16 bytes. Chunks of one parameter, and several parameters in one row."""
    send_natively(monkeypatch)
    monkeypatch.setattr(nodes, "LEAST", 0)
    monkeypatch.setattr(nodes, "NATIVE", nodes.MessageSizes(nbytes, 2))

    def network() -> nn.Module:
        torch.manual_seed(4)
        return nn.Sequential(nn.Linear(61, 61, bias=False), nn.Tanh(), nn.Linear(61, 61, bias=False))

    def loss(module: Any, k: int, rank: int) -> torch.Tensor:
        return (module(torch.full((2, 61), 0.1 * (k + 1) * (rank - 0.5))) - 0.1).square().mean()

    def run() -> tuple[float, list[int], int]:
        rows: list[torch.Size] = []
        stock = layout.reduce_scatter

        def reduce_scatter(*args: Any) -> Any:
            rows.append(args[0].shape)
            return stock(*args)

        net = network()
        zero = {"stage3_param_persistence_threshold": 0, "reduce_bucket_size": 10**6}
        engine = engines.make_engine(net, torch.optim.AdamW(net.parameters(), lr=0.01), 3, zero)
        zerosync = attach(engine, grad_memory_budget=0)
        with monkeypatch.context() as patch:
            patch.setattr(layout, "reduce_scatter", reduce_scatter)
            for k in range(6):
                engine.backward(loss(engine, k, rank()) / 2)
                if k % 2:
                    engine.step()
        found = full_parameters(engine.module)
        zerosync.detach()
        net = network()
        plain = Oracle(net, torch.optim.AdamW(net.parameters(), lr=0.01), 2)
        return (
            distance(found, plain.train(lambda *args: loss(*args) / 2, 3, 2)),
            [row[1] % 8 for row in rows],
            len(rows),
        )

    for error, unaligned, count in run_ranks(run):
        assert error == 0.0 and not any(unaligned) and count >= 6, (error, unaligned)
