"""Which of torch's flight recorders sees the collectives of which backend. Without a GPU: those of gloo."""

import pickle
from typing import Any

import deepspeed
import torch
import torch.distributed as dist

from tests.gpu.device import DEVICE, GPUS
from tests.harness.engines import start
from tests.harness.ranks import ON_CPU, run_ranks
from zerosync_strategy.core.failures.flight_recorder import _RECORDERS, recorded


def test_collectives_are_in_what_a_rank_tells(record_property: Any) -> None:
    def job() -> tuple[dict[str, list[str]], list[str]]:
        if GPUS:
            torch.cuda.set_device(0)
            deepspeed.init_distributed("cpu:gloo,cuda:nccl", verbose=False)
        else:
            start()
        for device in {"cpu", DEVICE}:
            dist.all_reduce(torch.ones(3, device=device))
        if GPUS:
            torch.cuda.synchronize()
        bindings, sees = torch._C._distributed_c10d, {}
        for recorder in _RECORDERS:
            entries = pickle.loads(getattr(bindings, recorder)())["entries"] if hasattr(bindings, recorder) else []
            sees[recorder] = sorted({entry["profiling_name"] for entry in entries})
        return sees, [each.name for each in recorded()]

    ((sees, told),) = run_ranks(job, world_size=1, env=ON_CPU)
    record_property("recorders", sees)
    assert any(name.startswith("nccl:" if GPUS else "gloo:") for name in told), (sees, told)
