"""A step's peak of memory, and where in it the host waits for the device, beside stock DeepSpeed's."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

from tests.gpu.device import DEVICE, GPUS, run, waits
from tests.harness.engines import make_engine
from zerosync_strategy import attach

LAYERS, BACKWARDS, STEPS = 4, 3, 4
WIDTH = 1024 if GPUS else 16
SYSTEMS: dict[str, dict[str, Any] | None] = {
    "stock": None, "zerosync": {}, "streamed": {"coalesce": False}, "held": {"param_memory_budget": "all"},
}  # fmt: skip


def costs(stage: int, system: str, layers: int) -> tuple[Counter[str], dict[str, float]]:
    """Of the last step: the lines that waited, and the peak in multiples of what the parameters take."""
    options = SYSTEMS[system]
    net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers))).to(DEVICE)
    taken = sum(2 * param.numel() for param in net.parameters())
    engine = make_engine(
        net, torch.optim.AdamW(net.parameters(), lr=1e-3), stage,
        {"overlap_comm": True, "stage3_param_persistence_threshold": 0}, bf16={"enabled": True},
        gradient_accumulation_steps=BACKWARDS if options is None else 1,
    )  # fmt: skip
    if options is not None:
        attach(engine, **options)
    x = torch.randn(8, WIDTH, device=DEVICE).bfloat16()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda.Event, "query", lambda event: False)  # so that the host waits whenever it may have to
        for _ in range(STEPS):
            peaks = _restart_peak()
            with waits() as found:
                for k in range(BACKWARDS):
                    engine.backward(engine(x).float().square().mean())
                    if options is None or k == BACKWARDS - 1:
                        engine.step()
    return Counter(found), {name: peak() / taken for name, peak in peaks.items()}


def _restart_peak() -> dict[str, Any]:
    if not GPUS:
        return {}  # the simulated device has no allocator
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    return {"peak allocated": torch.cuda.max_memory_allocated, "peak reserved": torch.cuda.max_memory_reserved}


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("stage", [2, 3])
def test_waits_do_not_grow_with_the_model(stage: int, system: str, record_property: Any) -> None:
    """H4, for ours: once a step, for the norm. Recorded: waits by line, and the peak over the parameters."""
    if system == "held" and stage == 2:
        pytest.skip("stage 2 holds its parameters anyway")
    if system == "stock" and not GPUS:
        pytest.skip("the simulated device finds stock's races")
    (found, peaks), (of_more, _) = (run(costs, stage, system, layers)[0] for layers in (LAYERS, 2 * LAYERS))
    record_property("waits", dict(found))
    record_property("waits of twice the layers", dict(of_more))
    record_property("bytes over those of the parameters", peaks)
    assert system == "stock" or (found.total(), of_more.total()) == (1, 1)
    assert len(peaks) == (2 if GPUS else 0) and all(peak > 0 for peak in peaks.values())
