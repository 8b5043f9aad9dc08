"""Manual optimization: any number of manual_backward anywhere is one reduction per step, and equals plain torch."""

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule

from tests.harness.extended import STAGES
from tests.harness.oracle import distance, full_parameters
from tests.harness.problem import adamw, backward_of, loss_of, oracle, sgd
from tests.harness.ranks import run_ranks
from tests.lightning.runs import Data, Module, assert_one_reduction_per_step, fit, strategy

N = 4


class Manual(Module):
    def __init__(self, optimizer: Any = sgd) -> None:
        super().__init__(optimizer)
        self.automatic_optimization = False


class AcrossBatches(Manual):
    """One backward per batch, a step every N batches."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        self.backward_of(loss_of(self.net, batch) / N, optimizer)
        if (batch_idx + 1) % N == 0:
            optimizer.step()
            optimizer.zero_grad()

    def backward_of(self, loss: torch.Tensor, optimizer: Any) -> None:
        self.manual_backward(loss)


def across_batches(optimizer: Any = sgd) -> dict[str, torch.Tensor]:
    plain = oracle(optimizer)
    for batch in range(12):
        backward_of(plain, batch, N)
        if (batch + 1) % N == 0:
            plain.step()
    return full_parameters(plain.module)


@pytest.mark.extended
@pytest.mark.parametrize("stage", STAGES)
def test_across_batches(stage: int) -> None:
    def run() -> float:
        recorder, trainer = fit(AcrossBatches(adamw), strategy(stage))
        assert_one_reduction_per_step(recorder, [N] * 3)
        assert trainer.global_step == 3
        return distance(recorder.parameters, across_batches(adamw))

    assert run_ranks(run) == [0.0, 0.0]


class Toggled(AcrossBatches):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def backward_of(self, loss: torch.Tensor, optimizer: Any) -> None:
        if self.how == "toggle_optimizer":
            self.toggle_optimizer(optimizer)
            self.manual_backward(loss)
            self.untoggle_optimizer(optimizer)
        elif self.how == "toggled_optimizer":
            with self.toggled_optimizer(optimizer):
                self.manual_backward(loss)
        elif self.how == "toggle_model":
            with optimizer.toggle_model(sync_grad=False):
                self.manual_backward(loss)


TOGGLED = pytest.param(
    "toggled_optimizer",
    marks=pytest.mark.skipif(not hasattr(LightningModule, "toggled_optimizer"), reason="this Lightning has none"),
)


@pytest.mark.extended(but=("3-toggle_optimizer",))
@pytest.mark.parametrize("how", ["toggle_optimizer", TOGGLED, "toggle_model"])
@pytest.mark.parametrize("stage", STAGES)
def test_toggling_the_only_optimizer(stage: int, how: str) -> None:
    def run() -> float:
        recorder, _ = fit(Toggled(how), strategy(stage))
        return distance(recorder.parameters, across_batches())

    assert run_ranks(run) == [0.0, 0.0]


class InOneStep(Manual):
    """N different losses of one batch, each with its own backward, in one training_step."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        for k in range(N):
            self.manual_backward((1 + k) * loss_of(self.net, batch) / 10)
            self.after_backward(k, optimizer)
        self.before_step(optimizer)
        optimizer.step()
        optimizer.zero_grad()

    def after_backward(self, k: int, optimizer: Any) -> None: ...

    def before_step(self, optimizer: Any) -> None: ...


def in_one_step(optimizer: Any = sgd, zero_after: int | None = None, clip: float = 0.0) -> dict[str, torch.Tensor]:
    plain, data = oracle(optimizer), Data(12)
    for batch in range(12):
        for k in range(N):
            plain.backward(lambda r, batch=batch, k=k: (1 + k) * loss_of(plain.module, data.batch(batch, r)) / 10)
            if k == zero_after:
                plain.zero_grad()
        plain.step(clip)
    return full_parameters(plain.module)


@pytest.mark.extended(but=("2",))
@pytest.mark.parametrize("stage", STAGES)
def test_many_backwards_in_one_training_step(stage: int) -> None:
    def run() -> float:
        recorder, _ = fit(InOneStep(), strategy(stage))
        assert_one_reduction_per_step(recorder, [N] * 12)
        return distance(recorder.parameters, in_one_step())

    assert run_ranks(run) == [0.0, 0.0]


@pytest.mark.extended(but=("3",))
@pytest.mark.parametrize("stage", STAGES)
def test_zero_grad_in_mid_window(stage: int) -> None:
    class Zeroing(InOneStep):
        def after_backward(self, k: int, optimizer: Any) -> None:
            if k == 1:
                optimizer.zero_grad()

    def run() -> float:
        recorder, _ = fit(Zeroing(adamw), strategy(stage))
        return distance(recorder.parameters, in_one_step(adamw, zero_after=1))

    assert run_ranks(run) == [0.0, 0.0]


def test_a_step_without_zero_grad_is_refused() -> None:
    """PyTorch would step the sum of its gradients and those of the last step."""

    class Forgetful(Manual):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.manual_backward(loss_of(self.net, batch))
            if batch_idx == 1:
                with pytest.raises(RuntimeError, match=r"no optimizer.zero_grad\(\) since the last"):
                    self.optimizers().step()
                self.optimizers().zero_grad()
            else:
                self.optimizers().step()

    def run() -> None:
        fit(Forgetful(), strategy(2), 2)

    run_ranks(run)


@pytest.mark.extended(but=("2",))
@pytest.mark.parametrize("stage", STAGES)
def test_clip_gradients(stage: int) -> None:
    class Clipping(InOneStep):
        def before_step(self, optimizer: Any) -> None:
            self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")

    def run() -> Any:
        recorder, _ = fit(Clipping(), strategy(stage))
        return distance(recorder.parameters, in_one_step(clip=0.05)), distance(recorder.parameters, in_one_step())

    clipped, unclipped = run_ranks(run)[0]
    assert clipped == 0.0 < 1e-3 < unclipped


@pytest.mark.extended(but=("2",))
@pytest.mark.parametrize("stage", STAGES)
def test_step_with_a_closure(stage: int) -> None:
    """Its loss is what ``step`` returns."""

    class Closure(Manual):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            def closure() -> torch.Tensor:
                self.optimizers().zero_grad()
                loss = loss_of(self.net, batch)
                self.manual_backward(loss)
                self.loss = loss.item()
                return loss

            assert self.optimizers().step(closure).item() == self.loss

    def run() -> float:
        recorder, _ = fit(Closure(), strategy(stage), 4)
        plain = oracle()
        for batch in range(4):
            backward_of(plain, batch)
            plain.step()
        return distance(recorder.parameters, full_parameters(plain.module))

    assert run_ranks(run) == [0.0, 0.0]


@pytest.mark.extended(but=("2",))
@pytest.mark.parametrize("stage", STAGES)
def test_without_coalescing_it_is_still_right(stage: int) -> None:
    """Reduced at every backward: right up to summation order, and N times the reductions."""

    def run() -> float:
        recorder, _ = fit(InOneStep(), strategy(stage, coalesce=False), callbacks=[])
        assert [(r.backwards, r.reductions) for r in recorder.reports] == [(N, N)] * 12
        return distance(recorder.parameters, in_one_step())

    assert run_ranks(run) == [0.0, 0.0]
