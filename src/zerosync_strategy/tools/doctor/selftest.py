"""A two-rank training run on this machine's CPU against plain torch.

``python -m zerosync_strategy.tools.doctor.selftest FOLDER`` is one rank of torchrun's, with a file in FOLDER.
"""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from zerosync_strategy.tools.doctor.findings import Finding, of_topic

ok, _, _, error = of_topic("self-test")
RANKS = 2
ROUNDING = 1e-5
"""W2: 84 units in the last place of 1. Another order of a sum makes a few; a gradient that is lost, far more."""
STEPS, BACKWARDS, BATCH, WIDTH = 3, 2, 4, 16
REMEDY = "If the versions above are right, report it with `zerosync doctor --json`."


def check(timeout: float = 180.0) -> list[Finding]:
    """Train on two ranks in processes of their own, on stages 1, 2 and 3, for ``timeout`` seconds at most."""
    with tempfile.TemporaryDirectory(prefix="zerosync-") as folder:
        files = [Path(folder) / f"rank{rank}" for rank in range(RANKS)]
        problem = _run(Path(folder), timeout)
        found = [json.loads(file.read_text()) if file.exists() else {} for file in files]
    return [_training(stage, [each.get(stage, {}) for each in found], problem) for stage in "123"]


def _run(folder: Path, timeout: float) -> str:
    """Run the ranks to their ends; return what went wrong, empty if nothing."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(RANKS)]
    variables = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen([*launch, "-m", __name__, str(folder)], stdout=log, stderr=log, env=variables)
        try:
            status = process.wait(timeout)
        except subprocess.TimeoutExpired:
            process.terminate()  # and with it the ranks
            process.wait()
            return f"the ranks had not ended after {timeout:g} s"
        log.seek(0)
        lines = [line for line in log.read().splitlines() if "Error" in line] or ["no output"]
    return f"the ranks ended with status {status}: {lines[0][:300]}" if status else ""


def _training(stage: str, ranks: list[Mapping[str, Any]], problem: str) -> Finding:
    if failed := next((each["error"] for each in ranks if "error" in each), ""):
        return error(f"stage {stage}: {failed}", REMEDY)
    if not all("difference" in each for each in ranks):
        return error(f"stage {stage} was not finished: {problem or 'an earlier stage failed'}", REMEDY)
    difference, reductions = (max(each[name] for each in ranks) for name in ("difference", "reductions"))
    found = (
        f"stage {stage}, two ranks: parameters differ from plain torch's by {difference:g}, {reductions} reduction(s)"
    )
    right = difference <= ROUNDING and reductions == 1
    return ok(f"{found} per step") if right else error(f"{found} per step, expected 0 and 1", REMEDY)


# ---- a rank ----------------------------------------------------------------------------------------------------------


def train(stage: int, found: dict[str, Any]) -> None:
    """Train a small model with ZeroSync on this rank, and the same by plain torch on the batches of all ranks.

    Args:
        stage: of ZeRO.
        found: gets ``difference``, the largest of any parameter, and ``reductions`` of the last step.
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
        found["difference"] = max(float((ours - theirs).abs().max()) for ours, theirs in pairs)
    assert zerosync.report is not None
    found["reductions"] = zerosync.report.reductions
    zerosync.detach()
    engine.destroy()


def main(file: Path) -> None:
    """Run every stage, and write ``file`` after each."""
    import deepspeed

    from zerosync_strategy import prepare_cpu

    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    prepare_cpu()
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False, timeout=timedelta(seconds=60))
    found: dict[str, Any] = {}
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
    main(Path(sys.argv[1]) / f"rank{os.environ['RANK']}")
