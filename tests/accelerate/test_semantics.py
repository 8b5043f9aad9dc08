"""PyTorch's own meaning of backward, step and zero_grad under Accelerate, exact against the oracle (W1, W2, W5)."""

import math
import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from tests.accelerate.runs import DECAY, Run, start
from tests.harness.experts import gathered_anew, routed_network
from tests.harness.extended import STAGES
from tests.harness.optimizers import ScheduleFree
from tests.harness.oracle import NORM, Oracle, backward_all, distance, full_parameters, of_trained
from tests.harness.problem import WORLD, Data, adafactor, adamw, backward_of, loss_of, oracle, sgd
from tests.harness.ranks import run_ranks
from tests.harness.rounding import excess
from zerosync_strategy.core.comm import nodes


def step_reports(run: Run, reports: list[tuple[int, int]]) -> None:
    """Note the report of a step, once."""
    report = run.zerosync.report
    if report is not None and report.step == len(reports) + 1:
        reports.append((report.backwards, report.reductions))


@pytest.mark.extended
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("with_tail", [True, False])
def test_accumulate_steps_every_nth_batch_and_the_tail_of_the_data(stage: int, with_tail: bool) -> None:
    batches, every, epochs = 10, 4, 2

    def job() -> Any:
        run = start(stage, batches=batches, accumulate=every, sync_with_dataloader=with_tail, optimizer=adamw)
        reports: list[tuple[int, int]] = []
        for _ in range(epochs):
            for batch in run.loader:
                with run.accelerator.accumulate(run.model):
                    run.accelerator.backward(loss_of(run.model, batch))
                    run.optimizer.step()
                    run.scheduler.step()
                    run.optimizer.zero_grad()
                step_reports(run, reports)
        parameters = run.parameters()
        run.accelerator.backward(loss_of(run.model, run.batch(0)))
        with pytest.warns(UserWarning, match=r"dropped the gradients of 1 backward.*training ended"):
            run.accelerator.end_training()
        return parameters, reports, run.scheduler.get_last_lr()

    expected = oracle(adamw)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(expected.optimizer, DECAY)
    sizes, size = [], 0
    for index in range(batches * epochs):
        backward_of(expected, index % batches, every)
        size += 1
        micro_step = index % batches if with_tail else index
        if (micro_step + 1) % every == 0 or (with_tail and micro_step + 1 == batches):
            expected.step()
            for _ in range(WORLD):  # Accelerate steps a scheduler once per process
                scheduler.step()
            sizes.append(size)
            size = 0
    for parameters, reports, rate in run_ranks(job):
        assert distance(parameters, full_parameters(expected.module)) == 0.0
        assert reports == [(size, 1) for size in sizes]
        assert rate == scheduler.get_last_lr()


@pytest.mark.extended
@pytest.mark.parametrize("stage", STAGES)
def test_a_schedule_free_optimizer(stage: int) -> None:
    """`train()` and `eval()` of the prepared optimizer exchange the parameters."""

    def job() -> Any:
        run, seen = start(stage, batches=6, optimizer=ScheduleFree), []
        for batch in run.loader:
            run.optimizer.train()
            run.accelerator.backward(loss_of(run.model, batch))
            run.optimizer.step()
            run.optimizer.zero_grad()
            run.optimizer.eval()
            seen.append(run.parameters())
        run.accelerator.end_training()
        return seen

    expected, right = oracle(ScheduleFree), []
    for index in range(6):
        expected.switch("train")
        backward_of(expected, index)
        expected.step()
        expected.switch("eval")
        right.append(full_parameters(expected.module))
    for seen in run_ranks(job):
        assert [distance(*pair) for pair in zip(seen, right, strict=True)] == [0.0] * 6


def test_a_parameter_that_one_rank_does_not_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inside a module that all ranks run, by default options: as experts without tokens (W4)."""
    monkeypatch.setattr(nodes, "WITHIN_HOST", nodes.MessageSizes(400, 1))

    def job() -> Any:
        zero = {"stage": 3, **gathered_anew(), "reduce_bucket_size": 300}  # several buckets, as of a large model
        config = {"zero_optimization": zero}
        run = start(3, batches=8, accumulate=2, make=routed_network, hf_ds_config=config)
        reports: list[tuple[int, int]] = []
        for batch in run.loader:
            with run.accelerator.accumulate(run.model):
                run.accelerator.backward(loss_of(run.model, batch))
                run.optimizer.step()
                run.optimizer.zero_grad()
            step_reports(run, reports)
        return run.parameters(), reports

    net = routed_network()
    expected = Oracle(net, sgd(net.parameters()))
    for index in range(8):
        backward_of(expected, index, 2)
        if index % 2:
            expected.step()
    for parameters, reports in run_ranks(job):
        assert distance(parameters, full_parameters(net)) == 0.0
        assert reports == [(2, 1)] * 4


@pytest.mark.extended(but=("closure-2",))
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("how", ["accelerator", "raw", "no_sync", "closure"])
def test_any_number_of_backwards_make_one_step(stage: int, how: str) -> None:
    counts = [4, 1, 3]

    def job() -> Any:
        run = start(stage, optimizer=adamw)
        reports: list[tuple[int, int]] = []
        index = 0
        for count in counts:
            losses = [lambda index=index + k: loss_of(run.model, run.batch(index)) for k in range(count)]
            index += count
            if count > 1:
                run.zerosync.window.expect_last(False)
            if how == "closure":
                run.optimizer.step(lambda losses=losses: sum(run.accelerator.backward(loss()) or 0 for loss in losses))
            else:
                for loss in losses[:-1]:
                    if how == "no_sync":
                        with run.accelerator.no_sync(run.model):
                            run.accelerator.backward(loss())
                    else:
                        run.accelerator.backward(loss()) if how == "accelerator" else loss().backward()
                run.accelerator.backward(losses[-1]()) if how != "raw" else losses[-1]().backward()
                run.optimizer.step()
            run.optimizer.zero_grad()
            run.optimizer.step()  # nothing to step
            step_reports(run, reports)
        return run.parameters(), reports

    expected, index = oracle(adamw), 0
    for count in counts:
        for _ in range(count):
            backward_of(expected, index)
            index += 1
        expected.step()
    for parameters, reports in run_ranks(job):
        assert distance(parameters, full_parameters(expected.module)) == 0.0
        assert reports == [(count, 1) for count in counts]


@pytest.mark.extended(but=("2",))
@pytest.mark.parametrize("stage", STAGES)
def test_clip_grad_norm_returns_the_norm_and_clips_the_coming_step(stage: int) -> None:
    """The last step is not clipped: a generator that the optimizer has used up gives no parameters."""

    def job() -> Any:
        run = start(stage, accumulate=2)
        norms = []
        for index in range(6):
            run.accelerator._do_sync()
            run.accelerator.backward(loss_of(run.model, run.batch(index)))
            is_last = index >= 4
            with pytest.warns(UserWarning, match="was given no parameters") if is_last else nullcontext():
                norm = run.accelerator.clip_grad_norm_(iter(()) if is_last else run.model.parameters(), 0.05)
            run.optimizer.step()
            run.optimizer.zero_grad()
            norms.append(None if norm is None else norm.item())
        return run.parameters(), norms

    expected, norms = oracle(), []
    for index in range(6):
        backward_of(expected, index, 2)
        norms.append(None)
        if index % 2:
            norms[-1] = pytest.approx(expected.step(0.05 if index < 4 else math.inf), rel=NORM)
    assert norms[1].expected > 0.05
    for parameters, found in run_ranks(job):
        assert found == norms
        assert distance(parameters, full_parameters(expected.module)) == 0.0


@pytest.mark.extended(but=("2",))
@pytest.mark.parametrize("stage", STAGES)
def test_no_clipping_unless_asked_for(stage: int) -> None:
    def job(**options: Any) -> Any:
        run = start(stage, **options)
        run.accelerator.backward(100 * loss_of(run.model, run.batch(0)))
        run.optimizer.step()
        return run.parameters()

    data = Data(12)
    for clip, options in ((0.0, {}), (0.5, {"gradient_clipping": 0.5})):
        expected = oracle()
        expected.backward(lambda rank, expected=expected: 100 * loss_of(expected.module, data.batch(0, rank)))
        expected.step(clip)
        for parameters in run_ranks(job, **options):
            assert distance(parameters, full_parameters(expected.module)) == 0.0


def test_a_step_without_zero_grad_is_refused() -> None:
    """PyTorch would step the sum of its gradients and those of the last step."""

    def job() -> None:
        run = start(2)
        run.accelerator.backward(loss_of(run.model, run.batch(0)))
        run.optimizer.step()
        run.accelerator.backward(loss_of(run.model, run.batch(1)))
        with pytest.raises(RuntimeError, match=r"no optimizer.zero_grad\(\) since the last"):
            run.optimizer.step()
        run.optimizer.zero_grad()
        run.accelerator.backward(loss_of(run.model, run.batch(2)))
        run.optimizer.step()

    run_ranks(job)


@pytest.mark.extended(but=("3",))
@pytest.mark.parametrize("stage", STAGES)
def test_zero_grad_and_evaluation_in_mid_window(stage: int) -> None:
    def job() -> Any:
        run = start(stage)
        run.accelerator.backward(loss_of(run.model, run.batch(0)))
        run.optimizer.zero_grad()
        run.accelerator.backward(loss_of(run.model, run.batch(1)))
        run.model.eval()
        with torch.no_grad():
            gathered = run.accelerator.gather_for_metrics(run.model(run.batch(2)[0]))
        run.model.train()
        run.accelerator.backward(loss_of(run.model, run.batch(3)))
        run.optimizer.step()
        return run.parameters(), gathered

    expected, data = oracle(), Data(12)
    outputs = of_trained(
        expected.module, lambda: torch.cat([expected.module(data.batch(2, rank)[0]) for rank in range(WORLD)]).detach()
    )
    for index in (1, 3):
        backward_of(expected, index)
    expected.step()
    for parameters, gathered in run_ranks(job):
        assert distance(parameters, full_parameters(expected.module)) == 0.0
        assert excess(gathered, outputs) == 0.0


@pytest.mark.parametrize("stage", STAGES)
def test_an_exception_in_the_window_leaves_a_state_to_go_on_from(stage: int) -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> Any:
            raise ArithmeticError("in backward")

    def job() -> Any:
        run = start(stage)
        run.accelerator.backward(loss_of(run.model, run.batch(0)))
        with pytest.raises(RuntimeError):  # in forward: the gradients so far stay, as in PyTorch
            run.model(torch.zeros(2, 3))
        run.optimizer.step()
        run.accelerator.backward(loss_of(run.model, run.batch(1)))
        x, y = run.batch(2)
        # In backward: gradients are incomplete, so they are dropped, with a warning and without a collective (W3).
        with pytest.warns(UserWarning, match=r"dropped the gradients of 2 backward"), pytest.raises(ArithmeticError):
            run.accelerator.backward(loss_of(torch.nn.Sequential(run.model, _Apply(Fails)), (x, y)))
        run.optimizer.zero_grad()
        run.accelerator.backward(loss_of(run.model, run.batch(3)))
        run.optimizer.step()
        return run.parameters()

    expected = oracle()
    for index in (0, 3):
        backward_of(expected, index)
        expected.step()
    for parameters in run_ranks(job):
        assert distance(parameters, full_parameters(expected.module)) == 0.0


class _Apply(torch.nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function.apply(x)


@pytest.mark.extended(but=("2",))
@pytest.mark.parametrize("stage", STAGES)
def test_step_on_backward_keeps_the_timing_of_stock(stage: int) -> None:
    def job() -> Any:
        run = start(stage, accumulate=2, step_on="backward", gradient_clipping=0.05)
        norms = []
        for index in range(5):
            run.accelerator._do_sync()
            run.accelerator.backward(loss_of(run.model, run.batch(index)))
            before = run.model.global_steps
            norms.append(run.accelerator.clip_grad_norm_(run.model.parameters(), 0.05))
            run.optimizer.zero_grad()
            run.optimizer.step()
            assert run.model.global_steps == before == (index + 1) // 2
        with pytest.raises(ValueError, match=r"max_norm=1.*step_on='backward'.*gradient_clipping=0.05"):
            run.accelerator.clip_grad_norm_(run.model.parameters(), 1)
        run.zerosync.abort()
        return run.parameters(), norms[1], norms[3]

    expected, norms = oracle(), []
    for index in range(4):
        backward_of(expected, index, 2)
        if index % 2:
            norms.append(expected.step(0.05))
    for parameters, *found in run_ranks(job):
        assert distance(parameters, full_parameters(expected.module)) == 0.0
        assert found == pytest.approx(norms, rel=NORM)


@pytest.mark.extended(but=("3",))
@pytest.mark.parametrize("stage", STAGES)
def test_deferred_steps_are_right_without_coalescing_too(stage: int) -> None:
    def job() -> Any:
        run = start(stage, coalesce=False)
        for index in range(6):
            run.accelerator.backward(loss_of(run.model, run.batch(index)))
            if index % 3 == 2:
                run.optimizer.step()
                run.optimizer.zero_grad()
        return run.parameters(), run.zerosync.report.reductions

    expected = oracle()
    for index in range(6):
        backward_of(expected, index)
        if index % 3 == 2:
            expected.step()
    for parameters, reductions in run_ranks(job):
        assert distance(parameters, full_parameters(expected.module)) == 0.0
        assert reductions == 3


@pytest.mark.extended(but=("3",))
@pytest.mark.parametrize("stage", STAGES)
def test_checkpoints_continue_bit_for_bit_and_warn_in_mid_window(stage: int, tmp_path: Any) -> None:
    def steps(run: Run, first: int, last: int) -> None:
        for index in range(first, last):
            run.accelerator.backward(loss_of(run.model, run.batch(index)))
            run.accelerator.clip_grad_norm_(run.model.parameters(), 0.1)
            run.optimizer.step()
            run.scheduler.step()
            run.optimizer.zero_grad()

    def job(resume: bool) -> Any:
        run = start(stage, optimizer=adamw, zero3_save_16bit_model=True)
        if resume:
            run.accelerator.backward(loss_of(run.model, run.batch(9)))
            with pytest.warns(UserWarning, match=r"load_checkpoint\(\) was called"):
                run.accelerator.load_state(tmp_path / "between")
        else:
            steps(run, 0, 3)
            with warnings.catch_warnings():
                warnings.filterwarnings("error", message=".*since the last optimizer step.*")
                run.accelerator.save_state(tmp_path / "between")
        steps(run, 3, 6)
        rate = run.scheduler.get_last_lr()

        run.accelerator.backward(loss_of(run.model, run.batch(6)))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run.accelerator.save_state(tmp_path / "mid")
        said = [str(w.message) for w in caught if "save_checkpoint" in str(w.message)]
        assert len(said) == (run.accelerator.process_index == 0), said
        run.optimizer.step()  # the window that was open is still there

        state = run.accelerator.get_state_dict(run.model)
        run.accelerator.save_model(run.model, tmp_path / "model")
        assert run.accelerator.unwrap_model(run.model) is run.model.module
        return run.parameters(), rate, state

    first = run_ranks(job, False)
    again = run_ranks(job, True)
    for rank, ((parameters, rate, state), (resumed, resumed_rate, _)) in enumerate(zip(first, again, strict=True)):
        # To the bit: both make the same operations, from the same bits on the same layout; and what is saved is a copy.
        assert distance(parameters, resumed) == 0.0
        assert rate == resumed_rate
        if stage != 3 or rank == 0:
            assert distance(parameters, state) == 0.0
    from safetensors.torch import load_file

    assert distance(first[0][0], load_file(tmp_path / "model" / "model.safetensors")) == 0.0


@pytest.mark.extended(but=("2",))
@pytest.mark.parametrize("stage", STAGES)
def test_two_models_have_a_window_each(stage: int) -> None:
    """Accelerate's support for several models: one plugin and one Accelerator per model."""
    from accelerate import Accelerator

    from tests.harness.problem import network
    from zerosync_strategy import ZeroSyncPlugin

    def job() -> Any:
        plugins = {"first": ZeroSyncPlugin(stage=stage), "second": ZeroSyncPlugin(stage=2, reduction="ordered")}
        accelerators = [Accelerator(deepspeed_plugins=plugins), Accelerator()]
        runs = []
        for name, accelerator in zip(plugins, accelerators, strict=True):
            accelerator.state.select_deepspeed_plugin(name)
            model = network()
            model, optimizer = accelerator.prepare(model, sgd(model.parameters()))
            runs.append(Run(accelerator, model, optimizer, None, None, Data(12)))
        first, second = runs
        assert (first.zerosync.config.reduction, second.zerosync.config.reduction) == ("native", "ordered")
        for index in range(6):
            first.accelerator.backward(loss_of(first.model, first.batch(index)))
            if index % 2 == 0:
                target = (first.batch(index)[0], first.model(first.batch(index)[0]).detach())
                second.accelerator.backward(loss_of(second.model, target))
                second.accelerator.backward(loss_of(second.model, second.batch(index)))
                second.optimizer.step()
                second.optimizer.zero_grad()
            else:
                first.optimizer.step()
                first.optimizer.zero_grad()
        reports = [(run.zerosync.report.backwards, run.zerosync.report.reductions) for run in runs]
        return first.parameters(), second.parameters(), reports

    data, first, second = Data(12), oracle(), oracle()
    for index in range(6):
        backward_of(first, index)
        if index % 2 == 0:
            targets = [first.module(data.batch(index, rank)[0]).detach() for rank in range(WORLD)]
            second.backward(lambda rank, i=index, t=targets: loss_of(second.module, (data.batch(i, rank)[0], t[rank])))
            backward_of(second, index)
            second.step()
        else:
            first.step()
    for parameters, others, reports in run_ranks(job):
        assert distance(parameters, full_parameters(first.module)) == 0.0
        assert distance(others, full_parameters(second.module)) == 0.0
        assert reports == [(2, 1), (2, 1)]


@pytest.mark.extended(but=("2-True",))
@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("stage", STAGES)
def test_a_loss_through_two_engines(stage: int, frozen: bool) -> None:
    """A GAN: the generator's loss goes through the discriminator, and leaves what plain torch would leave there."""
    from accelerate import Accelerator
    from torch import nn

    from zerosync_strategy import ZeroSyncPlugin

    def networks() -> tuple[nn.Module, nn.Module]:
        torch.manual_seed(3)
        return tuple(nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, out)) for out in (16, 1))  # type: ignore

    def job() -> Any:
        plugins = {"g": ZeroSyncPlugin(stage=stage), "d": ZeroSyncPlugin(stage=stage)}
        accelerators = [Accelerator(deepspeed_plugins=plugins), Accelerator()]
        runs = []
        for name, accelerator, model in zip(plugins, accelerators, networks(), strict=True):
            accelerator.state.select_deepspeed_plugin(name)
            runs.append(Run(accelerator, *accelerator.prepare(model, sgd(model.parameters())), None, None, Data(12)))
        g, d = runs
        for index in range(6):
            x = g.batch(index)[0]
            d.model.requires_grad_(not frozen)
            g.accelerator.backward(-d.model(g.model(x)).mean())
            d.model.requires_grad_(True)
            d.accelerator.backward(d.model(g.model(x).detach()).mean() - d.model(x).tanh().mean())
            d.optimizer.step()
            d.optimizer.zero_grad()
            if index % 2:
                g.optimizer.step()
                g.optimizer.zero_grad()
        return g.parameters(), d.parameters(), [run.zerosync.report for run in runs]

    data, (g, d) = Data(12), networks()
    oracles = [Oracle(model, sgd(model.parameters())) for model in (g, d)]
    for index in range(6):
        d.requires_grad_(not frozen)
        backward_all(oracles, lambda rank, i=index: -d(g(data.batch(i, rank)[0])).mean())
        d.requires_grad_(True)

        def d_loss(rank: int, i: int = index) -> Any:
            x = data.batch(i, rank)[0]
            return d(g(x).detach()).mean() - d(x).tanh().mean()

        backward_all(oracles, d_loss)
        oracles[1].step()
        if index % 2:
            oracles[0].step()
    for of_g, of_d, reports in run_ranks(job):
        assert distance(of_g, full_parameters(g)) == distance(of_d, full_parameters(d)) == 0.0
        assert [report.reductions for report in reports] == [1, 1]
        # Two backwards of its own, or one and, unless it is frozen, that of the generator.
        assert [(report.step, report.backwards) for report in reports] == [(3, 2), (6, 1 if frozen else 2)]


@pytest.mark.extended(but=("3",))
@pytest.mark.parametrize("stage", STAGES)
def test_an_offloaded_optimizer_is_the_one_that_was_given(stage: int) -> None:
    """Accelerate makes DeepSpeed's CPU Adam of it, whatever it is."""

    def job() -> Any:
        run = start(stage, optimizer=sgd, offload_optimizer_device="cpu")
        for index in range(4):
            run.accelerator.backward(loss_of(run.model, run.batch(index)))
            run.optimizer.step()
            run.optimizer.zero_grad()
        return run.parameters()

    expected = oracle(sgd)
    for index in range(4):
        backward_of(expected, index)
        expected.step()
    for parameters in run_ranks(job):
        assert distance(parameters, full_parameters(expected.module)) == 0.0


def test_an_optimizer_that_would_become_another_is_refused() -> None:
    def job() -> None:
        zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
        config = {"zero_optimization": zero, "zero_force_ds_cpu_optimizer": True}
        with pytest.raises(ValueError, match=r"the optimizer SGD and 'zero_force_ds_cpu_optimizer' = true"):
            start(2, hf_ds_config=config)

    run_ranks(job)


@pytest.mark.extended(but=("2",))
@pytest.mark.parametrize("stage", [2, 3])
def test_a_mean_over_items(stage: int) -> None:
    """What Accelerate divides a loss by for accumulation is undone."""

    def length(batch: int, rank: int) -> int:
        return (batch + rank) % 3

    def summed(module: Any, batch: Any, items: int) -> torch.Tensor:
        x, y = (part[:items] for part in batch)
        return torch.nn.functional.mse_loss(module(x), y, reduction="sum")

    def job() -> dict[str, torch.Tensor]:
        run = start(stage, batches=8, accumulate=4, loss_reduction="sum")
        for index, batch in enumerate(run.loader):
            with run.accelerator.accumulate(run.model):
                items = length(index, run.accelerator.process_index)
                run.zerosync.mean_over(4 * items)
                run.accelerator.backward(summed(run.model, batch, items))
                run.optimizer.step()
                run.optimizer.zero_grad()
        return run.parameters()

    expected, data = oracle(sgd), Data(64)
    for first in (0, 4):
        items = sum(4 * length(batch, rank) for batch in range(first, first + 4) for rank in range(WORLD))
        for batch in range(first, first + 4):
            for rank in range(WORLD):
                loss = summed(expected.module, data.batch(batch, rank), length(batch, rank))
                expected.backward_on(rank, loss * WORLD / items)
        expected.step()
    for parameters in run_ranks(job):
        assert distance(parameters, full_parameters(expected.module)) == 0.0


@pytest.mark.extended
@pytest.mark.parametrize("stage", [2, 3])
def test_an_optimizer_that_needs_whole_parameters(stage: int) -> None:
    def job() -> float:
        run = start(stage, batches=6, accumulate=2, optimizer=adafactor)
        plain = oracle(adafactor)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(plain.optimizer, DECAY)
        for index, batch in enumerate(run.loader):
            with run.accelerator.accumulate(run.model):
                run.accelerator.backward(loss_of(run.model, batch))
                run.optimizer.step()
                run.scheduler.step()
                run.optimizer.zero_grad()
            backward_of(plain, index, 2)
            if index % 2:
                plain.step()
                for _ in range(WORLD):
                    scheduler.step()
        return distance(run.parameters(), full_parameters(plain.module))

    assert run_ranks(job, timeout=100) == [0.0, 0.0]
