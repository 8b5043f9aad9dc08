"""What the environment lets go wrong is said at the start: once, on the first rank, with the remedy."""

import logging
import resource
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.harness.copying import network
from tests.harness.engines import make_engine, start
from tests.harness.extended import STAGES
from tests.harness.ranks import run_ranks
from tests.harness.strict import strict
from zerosync_strategy import attach
from zerosync_strategy.core import environment
from zerosync_strategy.core.environment import Surroundings, problems

FINE = Surroundings(
    variables={}, on_nccl=True, ranks=64, everyone=64, communicators=1, dtype=torch.bfloat16, files=1024
)  # fmt: skip


@pytest.mark.parametrize(
    ("change", "found", "remedy"),
    [
        ({"variables": {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}}, "CUDA_DEVICE_MAX_CONNECTIONS=1", "unset it"),
        ({"communicators": 3}, "3 NCCL communicators", "set NCCL_LAUNCH_ORDER_IMPLICIT=1"),
        ({"ranks": 65}, "bfloat16 over 65 ranks", "reduction='ordered'"),
        ({"ranks": 513, "dtype": torch.float16}, "float16 over 513 ranks", "'communication_data_type': 'fp32'"),
        ({"everyone": 1024}, "may open 1024 files", "ulimit -n 2304"),
    ],
)  # fmt: skip
def test_each_problem_is_a_sentence_with_its_remedy(change: dict[str, Any], found: str, remedy: str) -> None:
    assert list(problems(FINE)) == []
    (said,) = problems(replace(FINE, **change))
    assert found in said and remedy in said and said.endswith(".")


@pytest.mark.parametrize(
    "change",
    [
        {"variables": {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}},
        {"communicators": 3, "variables": {"NCCL_LAUNCH_ORDER_IMPLICIT": "1"}},
        {"ranks": 1024, "dtype": torch.float32},
        {"ranks": 512, "dtype": torch.float16},
        {"everyone": 1024, "files": None},
        # gloo sums in fp32, from the host.
        {"on_nccl": False, "ranks": 1024, "communicators": 3, "variables": {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}},
    ],
)
def test_nothing_is_said_where_nothing_is_wrong(change: dict[str, Any]) -> None:
    assert list(problems(replace(FINE, **change))) == []


def ring(count: int, dtype: torch.dtype) -> float:
    """The error of NCCL's ring in a dtype, where the ranks' gradients are alike: each of its additions rounds."""
    generator = torch.Generator().manual_seed(0)
    mean, exact = 10 * torch.randn(20_000, generator=generator), torch.zeros(20_000, dtype=torch.float64)
    total = torch.zeros(20_000, dtype=dtype)
    for _ in range(count):
        gradient = (mean + torch.randn(20_000, generator=generator)).to(dtype)
        exact += gradient.double() / count
        total += gradient * torch.tensor(1 / count, dtype=dtype)
    return float((total.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("dtype", environment.MOST_RANKS)
def test_the_stated_number_of_ranks_is_where_sums_are_within_two_percent(dtype: torch.dtype) -> None:
    most = environment.MOST_RANKS[dtype]
    assert ring(most, dtype) < 0.02 < ring(4 * most, dtype)


class Said(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@pytest.mark.extended(but=("False-3",))
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("native", [pytest.param(False, marks=pytest.mark.off_device("gloo's rules")), True])
def test_an_engine_says_it_once_on_the_first_rank(stage: int, native: bool) -> None:
    options = {"unshard_streams": "own_communicator"} if stage == 3 else {}

    def run() -> list[str]:
        start()
        environment.MOST_RANKS[torch.bfloat16] = 1
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (200, hard))
        logging.getLogger("zerosync_strategy").addHandler(said := Said())
        with ExitStack() as stack:
            if native:
                stack.enter_context(strict())
            for _ in range(2):
                module = network()
                sgd = torch.optim.SGD(module.parameters(), lr=0.1)
                attach(make_engine(module, sgd, stage, bf16={"enabled": True}), **options)
            dist.barrier()
        return [line for line in said.lines if "attached to" not in line and "unit" not in line]

    first, second = run_ranks(run, env={"CUDA_DEVICE_MAX_CONNECTIONS": "1"})
    words = ["may open 200 files"]
    if native:
        words += ["CUDA_DEVICE_MAX_CONNECTIONS=1", *(["2 NCCL communicators"] if stage == 3 else []), "over 2 ranks"]
    assert second == [] and len(first) == len(words), first
    assert all(word in line for word, line in zip(words, first, strict=True)), first
