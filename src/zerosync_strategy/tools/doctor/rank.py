"""One rank of the self-test, as a process: ``python -m zerosync_strategy.tools.doctor.rank FILE``.

Needs the variables that torchrun sets. Writes to FILE, as JSON, the contract's verdicts and what training differed by.
"""

from __future__ import annotations

import copy
import json
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

STEPS, BACKWARDS, BATCH, WIDTH = 3, 2, 4, 16
TIMEOUT = timedelta(seconds=60)


def train(stage: int, found: dict[str, Any]) -> None:
    """Train a small model with ZeroSync on this rank, and the same by plain torch on the batches of all ranks.

    Args:
        stage: of ZeRO.
        found: gets ``verdicts`` by feature, each as a mapping; ``difference``, the largest of any parameter; and
            ``reductions`` of the last step.
    """
    import deepspeed
    import torch
    import torch.distributed as dist

    from zerosync_strategy import attach
    from zerosync_strategy.core.engine.supported import verdicts

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, 1))
    plain = copy.deepcopy(model)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        config={
            "train_micro_batch_size_per_gpu": BATCH,
            "gradient_clipping": 0.0,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        },
        dist_init_required=False,
    )
    found["verdicts"] = {name: vars(verdict) for name, verdict in verdicts(engine).items()}
    zerosync = attach(engine)
    oracle = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    batches = torch.randn(STEPS, BACKWARDS, world_size, BATCH, WIDTH, generator=torch.Generator().manual_seed(1))
    for of_step in batches:
        totals = [torch.zeros_like(param) for param in plain.parameters()]
        for of_backward in of_step:
            engine.backward(engine(of_backward[rank]).square().mean() / BACKWARDS)
        engine.step()
        for each in range(world_size):
            oracle.zero_grad()
            for of_backward in of_step:
                (plain(of_backward[each]).square().mean() / BACKWARDS).backward()
            for total, param in zip(totals, plain.parameters(), strict=True):
                assert param.grad is not None
                total += param.grad
        for total, param in zip(totals, plain.parameters(), strict=True):
            param.grad = total / world_size
        oracle.step()
    with zerosync.full_parameters(), torch.no_grad():
        pairs = zip(engine.module.parameters(), plain.parameters(), strict=True)
        found["difference"] = max(float((ours - theirs).abs().max()) for ours, theirs in pairs)
    assert zerosync.report is not None
    found["reductions"] = zerosync.report.reductions
    zerosync.detach()
    engine.destroy()


def accelerate_verdict() -> dict[str, Any]:
    """Return the verdict on the installed Accelerate as that on DeepSpeed's features; nothing where there is none."""
    from importlib.util import find_spec

    if find_spec("accelerate") is None:
        return {}
    try:
        from zerosync_strategy.accelerate.contract import INTERNALS
        from zerosync_strategy.core.engine.contract import require

        require(INTERNALS)
    except Exception as problem:
        return {"Accelerate": {"problem": f"{type(problem).__name__}: {problem}", "needs_newer": False}}
    return {"Accelerate": {"problem": "", "needs_newer": False}}


def main(file: Path) -> None:
    """Run every stage, and write ``file`` after each."""
    import deepspeed

    from zerosync_strategy import prepare_cpu

    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    prepare_cpu()
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False, timeout=TIMEOUT)
    found: dict[str, Any] = {"accelerate": {"verdicts": accelerate_verdict()}}
    for stage in (1, 2, 3):
        of_stage = found[str(stage)] = {}
        try:
            train(stage, of_stage)
        except Exception as problem:
            of_stage["error"] = f"{type(problem).__name__}: {problem}"
            break
        finally:
            file.write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
