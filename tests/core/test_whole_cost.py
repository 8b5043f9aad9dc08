"""What whole parameters cost, as one rank of W on torch's fake process group: bytes, buffers, balance. Never times."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.harness import engines
from tests.harness.optimizers import muon
from tests.harness.ranks import run_ranks
from zerosync_strategy import attach, prepare_cpu
from zerosync_strategy.core.engine import zero

pytestmark = pytest.mark.off_device("counts what one rank asks for")

MATRICES, WIDTH = 32, 16
COLLECTIVES = ("reduce", "broadcast", "reduce_scatter_tensor", "all_gather_into_tensor", "all_to_all_single")


def measure(stage: int, world_size: int, rank: int) -> tuple[float, float, float, int, int]:
    """Of the second step: bytes over AdamW's, and over the report's own; the largest tensor of a collective, matrices
    stepped, and collectives."""
    prepare_cpu()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(MATRICES)])
    optimizer = muon(model)
    bucket = 4 * WIDTH**2
    zero_options = {"reduce_bucket_size": bucket, "stage3_prefetch_bucket_size": bucket}
    zero_options |= {"stage3_param_persistence_threshold": 0}
    engine = engines.make_engine(model, optimizer, stage, zero_options)
    zerosync = attach(engine, **({"param_memory_budget": "all"} if stage == 3 else {}))
    sizes: list[int] = []
    backend = zero.comm_backend()

    def noted(stock: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            sizes.append(max(each.numel() for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor)))
            return stock(*args, **kwargs)

        return call

    for name in COLLECTIVES:
        setattr(backend, name, noted(getattr(backend, name)))
    for _ in range(2):
        sizes.clear()
        engine.backward(engine(torch.ones(1, WIDTH)).square().mean())
        engine.step()
    report = zerosync.report
    sent = sum(traffic.bytes for kind, traffic in report.collectives.items() if kind in COLLECTIVES)
    of_adamw = 2 * (world_size - 1) / world_size * MATRICES * WIDTH**2 * 4
    return sent / of_adamw, sent / report.floor_bytes, max(sizes) / WIDTH**2, len(optimizer.state), len(sizes)


@pytest.mark.extended(but=("3",))
@pytest.mark.parametrize("stage", [2, 3])
def test_bytes_buffers_and_balance(stage: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zerosync_strategy.core.gradients.reducer.SMALL_BYTES", 4 * WIDTH**2 * 4)

    def measured(world_size: int, rank: int) -> tuple[float, float, float, int, int]:
        return run_ranks(measure, stage, world_size, rank, world_size=1, env={"WORLD_SIZE": str(world_size)})[0]

    few, many = measured(8, 0), measured(64, 0)
    for world_size, (of_adamw, of_report, largest, stepped, _) in ((8, few), (64, many)):
        assert of_adamw == pytest.approx(1 if stage == 2 else 1 + 1 / (2 * world_size), rel=0.01)
        assert of_report == pytest.approx(1.0, rel=0.02)
        assert largest <= 4
        assert stepped == -(-MATRICES // world_size)
    of_adamw, *_, stepped, _ = measured(64, 63)
    assert of_adamw == pytest.approx(1 if stage == 2 else 1 + 1 / 128, rel=0.01)  # as of a rank that owns a matrix
    assert stepped == 0
    assert many[-1] <= few[-1] + MATRICES  # a matrix at most for each reduction and broadcast
