"""The last backward, expected: what programs see of it, on live ranks."""

from typing import Any

import pytest
import torch
from torch import nn

from tests.harness.engines import make_engine, rank
from tests.harness.oracle import Oracle, distance, full_parameters
from tests.harness.ranks import run_ranks
from zerosync_strategy import attach

WIDTH, LAYERS = 8, 6
SHARDED = {"stage3_param_persistence_threshold": 0}
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
STAGES = [(2, {}), (3, {}), (3, {"param_memory_budget": "all"})]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])


def batch(k: int, of_rank: int) -> torch.Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(10 * k + of_rank))


class Run:
    """An engine and plain torch on the same batches."""

    def __init__(self, stage: int, options: dict[str, Any], zero: dict[str, Any] | None = None, **config: Any) -> None:
        self.net, self.plain = net(), net()
        zero = {"reduce_bucket_size": WIDTH * WIDTH} | (SHARDED if stage == 3 else {}) | (zero or {})
        self.engine = make_engine(self.net, torch.optim.SGD(self.net.parameters(), lr=0.1), stage, zero, **config)
        self.oracle = Oracle(self.plain, torch.optim.SGD(self.plain.parameters(), lr=0.1))
        self.zerosync = attach(self.engine, **options)
        self._made = 0

    def backward(self, raw: bool = False) -> None:
        k, self._made = self._made, self._made + 1
        loss = self.engine(batch(k, rank())).square().mean()
        loss.backward() if raw else self.engine.backward(loss)
        self.oracle.backward(lambda of: self.plain(batch(k, of)).square().mean())

    def step(self) -> Any:
        self.engine.step()
        self.oracle.step()
        return self.zerosync.report

    def error(self) -> float:
        return distance(full_parameters(self.net), full_parameters(self.plain))


@pytest.mark.parametrize(("stage", "options"), STAGES)
@pytest.mark.parametrize("raw", [False, True])
def test_the_first_window_of_one_backward_reduces_while_it_runs(stage: int, options: dict[str, Any], raw: bool) -> None:
    def run() -> Any:
        both, found = Run(stage, options), []
        for backwards in (1, 1, 3, 3, 3):
            for _ in range(backwards):
                both.backward(raw)
            report = both.step()
            found.append((report.reductions, report.early_reductions, report.peak_unreduced_bytes < report.floor_bytes))
        return found, both.error()

    # By step: passes, those in a backward; with one backward never all gradients are unreduced at once.
    for found, error in run_ranks(run):
        assert [each[:2] for each in found] == [(1, 1), (1, 1), (2, 1), (1, 0), (1, 1)]
        assert found[0][2] and found[1][2] and error < 1e-6


def test_accumulation_by_deepspeed_is_expected_of_raw_backwards() -> None:
    def run() -> Any:
        both, found = Run(2, {}, gradient_accumulation_steps=3), []
        for _ in range(2):
            for _ in range(3):
                loss = both.engine(batch(0, rank())).square().mean()
                loss.backward()
                both.engine.step()
            found.append((both.zerosync.report.reductions, both.zerosync.report.early_reductions))
        return found

    assert run_ranks(run) == [[(1, 1), (1, 1)]] * 2


@pytest.mark.parametrize(("stage", "options"), STAGES)
def test_a_reduced_gradient_is_an_error_to_use_and_none_to_replace(stage: int, options: dict[str, Any]) -> None:
    """As programs for plain torch use it; and a later backward finds no trace of what stood for it."""

    def run() -> float:
        both = Run(stage, options)
        for step in range(2):
            for _ in range(step + 1):
                both.backward()
            first, *_ = both.net.parameters()
            assert isinstance(first, nn.Parameter) and first.grad is first.grad is not None
            for use in (
                lambda: nn.utils.clip_grad_norm_(both.net.parameters(), 1.0), lambda p=first: p.grad.norm(),
                lambda p=first: float(p.grad.sum()), lambda p=first: p.grad.mul_(0.5),
            ):  # fmt: skip
                with pytest.raises(RuntimeError, match=r"been reduced already.*full_gradients\(\).*overlap_last=False"):
                    use()
            with pytest.raises(RuntimeError, match=r"local_gradients\(\) was called after .*expect_last\(False\)"):
                both.zerosync.local_gradients().__enter__()
            if step == 0:
                both.backward()  # the window surprises; its gradients must not have gone to a stand-in
            both.step()
            assert all(param.grad is None for param in both.net.parameters())
            assert type(first) is type(next(net().parameters())) or stage == 3
        both.backward()
        for zero in (both.net.zero_grad, lambda: both.net.zero_grad(set_to_none=False), both.engine.zero_grad):
            zero()
            both.oracle.zero_grad()
        both.backward()
        both.step()
        return both.error()

    assert max(run_ranks(run)) < 1e-6


@pytest.mark.parametrize(
    ("stage", "options", "zero"),
    [(3, {}, OFFLOAD), (2, {}, OFFLOAD), (2, {}, {"compute_grad_norm": False}), (2, {"loss_reduction": "sum"}, {})],
)
def test_a_wrong_promise_where_ranks_say_nothing(stage: int, options: dict[str, Any], zero: dict[str, Any]) -> None:
    """Nothing goes with a norm: on the host, or not computed; or what is stepped is divided by items first."""

    def run() -> float:
        both = Run(stage, options, zero)
        for promises in (True, False, True):
            for k in range(3):
                if promises and k == 1:
                    both.zerosync.window.expect_last()
                if options:
                    both.zerosync.mean_over(3)
                both.backward()
            both.step()
        return both.error() if not options else 0.0

    assert max(run_ranks(run)) < 1e-6


def test_a_resumed_run_expects_what_the_saved_one_did(tmp_path: Any) -> None:
    def run() -> Any:
        both = Run(2, {})
        for _ in range(2):
            for _ in range(3):
                both.backward()
            both.step()
        both.engine.save_checkpoint(str(tmp_path))
        both.engine.destroy()
        again = Run(2, {})
        again.engine.load_checkpoint(str(tmp_path))
        for _ in range(3):
            again.backward()
        return again.engine.zerosync.window.last.expected, again.step().reductions

    assert run_ranks(run) == [(3, 1)] * 2
