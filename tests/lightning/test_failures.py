"""What is dropped says so, sends nothing (W3), and leaves a process in which training goes on exactly."""

import os
import warnings
from datetime import timedelta
from typing import Any

import pytest
import torch

from tests.harness.extended import STAGES
from tests.harness.oracle import distance, full_parameters
from tests.harness.problem import adamw, oracle
from tests.harness.ranks import KILLED, run_ranks
from tests.lightning.runs import Data, Module, Recorder, accumulate, fit, make_trainer, strategy
from zerosync_strategy.core.failures.rank_state import Advice
from zerosync_strategy.core.failures.words import ADVICE
from zerosync_strategy.core.gradients.window import WindowState


class Failing(Module):
    """Raises on the sixth batch: the second of its window, after one optimizer step of four."""

    def __init__(self, where: str, rank: int | None = None) -> None:
        super().__init__(adamw)
        self.where, self.rank, self.armed = where, rank, True

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx != 5 or not self.armed or self.rank not in (None, self.global_rank):
            return super().training_step(batch, batch_idx)
        if self.where == "forward":
            self.net[0](batch[0])  # the first layer has run, and under stage 3 the others are being fetched
            raise ValueError("boom")
        if self.where == "backward":

            def boom(_: torch.Tensor) -> None:
                raise ValueError("boom")

            # Ranks keep the same order of modules, and so of collectives, up to the exception.
            handle = self.net[2].register_forward_hook(lambda *call: call[-1].register_hook(boom) and None)
            loss = super().training_step(batch, batch_idx)
            handle.remove()
            return loss
        return super().training_step(batch, batch_idx)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.where == "step" and self.armed and self.trainer.global_step == 1:
            raise ValueError("boom")


@pytest.mark.extended(but=("3-step",))
@pytest.mark.parametrize("where", ["forward", "backward", "step"])
@pytest.mark.parametrize("stage", STAGES)
def test_exception_on_all_ranks_leaves_an_exact_process(stage: int, where: str) -> None:
    def run() -> Any:
        module = Failing(where)
        with warnings.catch_warnings(record=True) as caught, pytest.raises(ValueError, match="boom"):
            warnings.simplefilter("always")
            fit(module, strategy(stage), accumulate_grad_batches=4)
        dropped = [str(w.message) for w in caught if "ZeroSync dropped" in str(w.message)]
        assert len(dropped) == 1 and ("ValueError" in dropped[0]), dropped

        # A new Trainer on a new module, and one that goes on with the module that failed.
        fresh, _ = fit(Module(adamw), strategy(stage), accumulate_grad_batches=4)
        module.armed = False
        again, _ = fit(module, strategy(stage), accumulate_grad_batches=4)
        plain = oracle(adamw)
        accumulate(plain, 4, 4)
        plain.optimizer = adamw(plain.module.parameters())
        return (
            distance(fresh.parameters, accumulate(oracle(adamw), 12, 4)),
            distance(again.parameters, accumulate(plain, 12, 4)),
        )

    assert run_ranks(run) == [(0.0, 0.0)] * 2


@pytest.mark.extended(
    but=(
        "2-step",
        "3-backward",
    )
)
@pytest.mark.off_device("gloo's closed connections tell the other rank of the failure; NCCL's would end at a timeout")
@pytest.mark.parametrize("where", ["forward", "backward", "step"])
@pytest.mark.parametrize("stage", STAGES)
def test_exception_on_one_rank_ends_the_others(stage: int, where: str) -> None:
    def run() -> None:
        recorder, module = Recorder(), Failing(where, rank=0)
        module.armed = where != "step" or os.environ["RANK"] == "0"
        limited = strategy(stage, timeout=timedelta(seconds=20))
        trainer = make_trainer(limited, [recorder], accumulate_grad_batches=4)
        try:
            trainer.fit(module, Data(12).loader())
        except ValueError:
            zerosync = trainer.strategy.zerosync
            assert zerosync.window.state is WindowState.CLOSED
            sent = zerosync.counter.take().keys() & {"isend", "all_reduce", "reduce_scatter_tensor"}
            raise ValueError(f"boom, having sent {sorted(sent)} since the last step") from None

    failed, other = run_ranks(run, expect="any", timeout=60)
    assert failed.error == "ValueError"
    # In mid-window nothing was reduced. At the step, the reduction was over before the hook raised.
    assert ("having sent []" in failed.message) == (where != "step"), failed.message
    assert other.error not in (None, KILLED), str(other)


@pytest.mark.extended(but=("3",))
@pytest.mark.parametrize("stage", [1, 3])
def test_window_open_at_the_end_of_fit(stage: int) -> None:
    class Unfinished(Module):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.manual_backward(super().training_step(batch, batch_idx))
            if batch_idx == 3:
                self.optimizers().step()

    def run() -> Any:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            recorder, _ = fit(Unfinished(), strategy(stage), 6, limit_val_batches=0)  # it would call zero_grad()
        dropped = [str(w.message) for w in caught if "ZeroSync dropped" in str(w.message)]
        plain, data = oracle(), Data(6)
        for batch in range(4):
            plain.backward(
                lambda rank, batch=batch: torch.nn.functional.mse_loss(
                    plain.module(data.batch(batch, rank)[0]), data.batch(batch, rank)[1]
                )
            )
        plain.step()
        return dropped, distance(recorder.parameters, full_parameters(plain.module))

    for dropped, error in run_ranks(run):
        assert error == 0.0
        assert len(dropped) == 1 and "2 backward(s)" in dropped[0] and "training ended" in dropped[0]


@pytest.mark.off_device("gloo's timeout ends a wait with an error; NCCL's ends the process")
@pytest.mark.extended(but=("2",))
@pytest.mark.parametrize("stage", [2, 3])
def test_a_rank_with_fewer_batches_is_an_error_on_all_that_says_so(stage: int) -> None:
    def run() -> None:
        options = {"accumulate_grad_batches": 2, "limit_val_batches": 0}
        fit(Module(), strategy(stage, timeout=timedelta(seconds=4)), 8 - 2 * int(os.environ["RANK"]), **options)

    for outcome in run_ranks(run, expect="any"):
        assert outcome.error == "RankError", outcome
        assert "3 optimizer step(s) done" in outcome.message and ADVICE[Advice.FEWER_BATCHES] in outcome.message, (
            outcome
        )
