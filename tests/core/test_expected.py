"""The last backward, expected: what programs see of it, on live ranks."""

from typing import Any

import pytest
import torch
from torch import nn

from tests.harness.beside import Beside, square_of
from tests.harness.data import noise
from tests.harness.engines import rank
from tests.harness.networks import matrices
from tests.harness.ranks import run_ranks

WIDTH, LAYERS = 8, 6
SHARDED = {"stage3_param_persistence_threshold": 0}
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
STAGES = [(2, {}), (3, {}), (3, {"param_memory_budget": "all"})]


data = noise(3, WIDTH)


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.1)


def trained(stage: int, options: dict[str, Any], zero: dict[str, Any] | None = None, **config: Any) -> Beside:
    zero = {"reduce_bucket_size": WIDTH * WIDTH} | (SHARDED if stage == 3 else {}) | (zero or {})
    return Beside(lambda: matrices(WIDTH, LAYERS), sgd, square_of(data), stage, zero, options, **config)


@pytest.mark.extended(but=("False-3-options2",))
@pytest.mark.parametrize(("stage", "options"), STAGES)
@pytest.mark.parametrize("raw", [False, True])
def test_the_first_window_of_one_backward_reduces_while_it_runs(stage: int, options: dict[str, Any], raw: bool) -> None:
    def run() -> Any:
        both, found = trained(stage, options), []
        for backwards in (1, 1, 3, 3, 3):
            for _ in range(backwards):
                both.backward(raw=raw)
            report = both.step()
            found.append((report.reductions, report.early_reductions, report.peak_unreduced_bytes < report.floor_bytes))
        return found, both.error()

    # By step: passes, those in a backward; with one backward never all gradients are unreduced at once.
    for found, error in run_ranks(run):
        assert [each[:2] for each in found] == [(1, 1), (1, 1), (2, 1), (1, 0), (1, 1)]
        assert found[0][2] and found[1][2] and error < 1e-6


def test_accumulation_by_deepspeed_is_expected_of_raw_backwards() -> None:
    def run() -> Any:
        both, found = trained(2, {}, gradient_accumulation_steps=3), []
        for _ in range(2):
            for _ in range(3):
                loss = both.engine(data(0, rank())).square().mean()
                loss.backward()
                both.engine.step()
            found.append((both.zerosync.report.reductions, both.zerosync.report.early_reductions))
        return found

    assert run_ranks(run) == [[(1, 1), (1, 1)]] * 2


@pytest.mark.extended(but=("3-options2",))
@pytest.mark.parametrize(("stage", "options"), STAGES)
def test_a_reduced_gradient_is_an_error_to_use_and_none_to_replace(stage: int, options: dict[str, Any]) -> None:
    """As programs for plain torch use it; and a later backward finds no trace of what stood for it."""

    def run() -> float:
        both = trained(stage, options)
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
            assert type(first) is type(next(both.plain.parameters())) or stage == 3
        both.backward()
        for zero in (both.net.zero_grad, lambda: both.net.zero_grad(set_to_none=False), both.engine.zero_grad):
            zero()
            both.oracle.zero_grad()
        both.backward()
        both.step()
        return both.error()

    assert max(run_ranks(run)) < 1e-6


@pytest.mark.extended(but=("3-options0-zero0",))
@pytest.mark.parametrize(
    ("stage", "options", "zero"),
    [(3, {}, OFFLOAD), (2, {}, OFFLOAD), (2, {}, {"compute_grad_norm": False}), (2, {"loss_reduction": "sum"}, {})],
)
def test_a_wrong_promise_where_ranks_say_nothing(stage: int, options: dict[str, Any], zero: dict[str, Any]) -> None:
    """Nothing goes with a norm: on the host, or not computed; or what is stepped is divided by items first."""

    def run() -> float:
        both = trained(stage, options, zero)
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
        both = trained(2, {})
        for _ in range(2):
            for _ in range(3):
                both.backward()
            both.step()
        both.engine.save_checkpoint(str(tmp_path))
        both.engine.destroy()
        again = trained(2, {})
        again.engine.load_checkpoint(str(tmp_path))
        for _ in range(3):
            again.backward()
        return again.engine.zerosync.window.last.expected, again.step().reductions

    assert run_ranks(run) == [(3, 1)] * 2
