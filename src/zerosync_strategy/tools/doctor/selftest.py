"""A two-rank training run on this machine's CPU against plain torch.

``python -m zerosync_strategy.tools.doctor.selftest`` is one rank of torchrun's.
"""

from __future__ import annotations

import copy
import os
import re
import subprocess
import sys
import tempfile
from datetime import timedelta

from zerosync_strategy.tools.doctor.findings import Finding, of_topic

ok, _, _, error = of_topic("self-test")
ROUNDING = 1e-5
"""W2: 84 units in the last place of 1. Another order of a sum changes a few of them; a lost gradient far more."""
STEPS, BACKWARDS, BATCH, WIDTH = 3, 2, 4, 16


def check(timeout: float = 180.0) -> Finding:
    """Train on two ranks in separate processes, on stages 1, 2 and 3, for at most ``timeout`` seconds."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", __name__]
    variables = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(launch, stdout=log, stderr=log, env=variables)
        try:
            problem = f"ended with status {status}" if (status := process.wait(timeout)) else ""
        except subprocess.TimeoutExpired:
            process.terminate()  # ends the ranks, too
            process.wait()
            problem = f"not ended after {timeout:g} s"
        log.seek(0)
        said = re.search(r"\w+Error: .*", log.read())
    if not problem:
        return ok("two ranks, stages 1, 2 and 3: parameters equal plain torch's, one reduction per step")
    found = f"two ranks: {problem}" + (f", {said[0][:300]}" if said else "")
    return error(found, "If the versions above are right, report it with `zerosync doctor --json`.")


def train(stage: int) -> None:
    """Train a small model with ZeroSync on this rank, and the same model with plain torch on the batches of all ranks.

    Raises:
        ArithmeticError: parameters differ by more than rounding, or a step had not exactly one reduction.
    """
    import deepspeed
    import torch
    import torch.distributed as dist

    from zerosync_strategy import attach

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, 1))
    plain = copy.deepcopy(model)
    config = {
        "train_micro_batch_size_per_gpu": BATCH, "gradient_clipping": 0.0, "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)
    zerosync = attach(engine)
    oracle = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    batches = torch.randn(STEPS, BACKWARDS, world_size, BATCH, WIDTH, generator=torch.Generator().manual_seed(1))
    for of_step in batches:
        oracle.zero_grad()
        for of_backward in of_step:
            engine.backward(engine(of_backward[rank]).square().mean() / BACKWARDS)
            for of_rank in of_backward:
                (plain(of_rank).square().mean() / (BACKWARDS * world_size)).backward()
        engine.step()
        oracle.step()
    with zerosync.full_parameters(), torch.no_grad():
        pairs = zip(engine.module.parameters(), plain.parameters(), strict=True)
        difference = max(float((ours - theirs).abs().max()) for ours, theirs in pairs)
    assert zerosync.report is not None
    reductions = zerosync.report.reductions
    if difference > ROUNDING or reductions != 1:
        raise ArithmeticError(f"stage {stage}: parameters differ by {difference:g}, {reductions} reduction(s) per step")
    zerosync.detach()
    engine.destroy()


def main() -> None:
    """Train on every stage."""
    import deepspeed

    from zerosync_strategy import prepare_cpu

    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    prepare_cpu()
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False, timeout=timedelta(seconds=60))
    for stage in (1, 2, 3):
        train(stage)


if __name__ == "__main__":
    main()
