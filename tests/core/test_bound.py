"""Gradients that the device cannot hold are reduced as they come, and errors for lack of memory say what is held."""

import logging
from typing import Any

import pytest
import torch
from torch import nn

from tests.harness.beside import Beside, square_of
from tests.harness.data import noise
from tests.harness.engines import make_engine, rank
from tests.harness.networks import matrices
from tests.harness.ranks import run_ranks
from zerosync_strategy import attach
from zerosync_strategy.core.attached import budgets

WIDTH, LAYERS, BYTES = 8, 8, 8 * 4 * 8 * 8  # on a device, four buckets at most are in flight or kept
SHARDED = {"stage3_param_persistence_threshold": 0}


data = noise(3, WIDTH)


def net() -> nn.Module:
    return matrices(WIDTH, LAYERS)


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.1)


def trained(stage: int, memory: tuple[int, int] | None, options: dict[str, Any]) -> tuple[Any, float]:
    """The last of two reports of a run on a device that has ``memory``, and its distance to the oracle."""
    zero = {"reduce_bucket_size": WIDTH * WIDTH} | (SHARDED if stage == 3 else {})
    budgets.device_memory = lambda _: memory
    both = Beside(net, sgd, square_of(data), stage, zero, options)
    for _ in range(2):
        both.backward()
        both.backward()
        report = both.step()
    return report, both.error()


@pytest.mark.extended(but=("2-memory1-options1-1", "2-memory2-options2-2", "3-memory3-options3-2"))
@pytest.mark.parametrize(
    ("stage", "memory", "options", "reductions"),
    [
        (2, None, {}, 1),  # a device whose memory is not known
        (2, (10 * BYTES, 10 * BYTES), {}, 1),
        (2, (BYTES // 2, 10 * BYTES), {}, 2),  # they do not fit
        (3, (10 * BYTES, BYTES), {}, 2),  # half of them, beyond stock's half, is more than a quarter of the device
        (1, (10 * BYTES, BYTES), {}, 1),  # stock holds them, too
        (3, (0, BYTES), {"grad_memory_budget": 10 * BYTES}, 1),  # as the program says
        (2, (0, BYTES), {"grad_memory_budget": {"device": "all"}}, 1),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_reduced_as_it_comes(
    stage: int, memory: tuple[int, int] | None, options: dict[str, Any], reductions: int
) -> None:
    def run() -> Any:
        report, error = trained(stage, memory, options)
        return report.reductions, report.peak_unreduced_bytes, error

    for made, peak, error in run_ranks(run):
        assert (made, error < 1e-6) == (reductions, True)
        assert peak <= BYTES // 2 if reductions > 1 else peak == BYTES


def test_all_ranks_do_what_the_smallest_device_needs_and_the_first_says_so() -> None:
    def run() -> Any:
        said: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("zerosync_strategy").addHandler(handler)
        report, _ = trained(2, (BYTES // 2 if rank() else 10 * BYTES, 10 * BYTES), {})
        return report.reductions, [text for text in said if "coalesce=False" in text and "free on" in text]

    (one, text), (other, nothing) = run_ranks(run)
    assert (one, other, len(text), nothing) == (2, 2, 1, [])
    assert "take 2.048 kB until they are reduced, of 20.48 kB that are free on 20.48 kB" in text[0]


@pytest.mark.extended(but=("forward-3",))
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("where", ["forward", "backward", "step"])
def test_an_error_for_lack_of_memory_says_what_is_held(stage: int, where: str) -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            if where == "forward":
                raise torch.OutOfMemoryError("CUDA out of memory")
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            raise torch.OutOfMemoryError("CUDA out of memory")

    class Full(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory")

    def run() -> str:
        module = net()
        optimizer = Full(module.parameters(), lr=0.1) if where == "step" else torch.optim.SGD(module.parameters())
        engine = make_engine(module, optimizer, stage, SHARDED if stage == 3 else {})
        zerosync = attach(engine, elementwise_optimizer=True)
        zerosync.window.expect_last(False)
        engine.backward(engine(data(0, rank())).square().mean())
        if where != "step":
            module[1].register_forward_hook(lambda *args: Fails.apply(args[2]))
        with pytest.raises(torch.OutOfMemoryError) as error:
            if where != "step":
                engine.backward(engine(data(0, rank())).square().mean())
            engine.step()
        return str(error.value)

    for text in run_ranks(run):
        assert text.startswith("CUDA out of memory\nSince the last step, ZeroSync has held up to ")
        assert text.count("of unreduced gradients (coalesce=False, or a grad_memory_budget, lets less stay)") == 1
        assert ("of gathered parameters (param_memory_budget holds less)" in text) == (stage == 3)
        if where != "step":
            assert "up to 2.048 kB of unreduced" in text
