"""A two-rank training run on this machine's CPU against plain torch, and the contract on its live engines.

``python -m zerosync_strategy.tools.doctor.selftest FILE`` is one rank. It needs the variables that torchrun sets, and
writes to FILE, as JSON, the contract's verdicts and what training differed by.
"""

from __future__ import annotations

import copy
import json
import os
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from zerosync_strategy.tools.doctor.findings import Finding, Topic
from zerosync_strategy.tools.doctor.processes import run_together

CONTRACT, TRAINING = Topic("contract"), Topic("self-test")
RANKS = 2
ROUNDING = 1e-5
"""W2: 84 units in the last place of 1. Another order of a sum makes a few; a gradient that is lost, far more."""
STEPS, BACKWARDS, BATCH, WIDTH = 3, 2, 4, 16
TIMEOUT = timedelta(seconds=60)


def check(timeout: float = 180.0, environment: Mapping[str, str] | None = None) -> list[Finding]:
    """Train on two ranks in processes of their own, on stages 1, 2 and 3, for ``timeout`` seconds at most."""
    with tempfile.TemporaryDirectory(prefix="zerosync-") as folder:
        files = [Path(folder) / f"rank{rank}" for rank in range(RANKS)]
        problem = _run(files, timeout, environment or {})
        found = [json.loads(file.read_text()) if file.exists() else {} for file in files]
    return [*_contract(found[0]), *_training(found, problem)]


def _run(files: list[Path], timeout: float, environment: Mapping[str, str]) -> str:
    """Run the ranks to their ends; return what went wrong, empty if nothing."""
    common = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **environment}
    common |= {"WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    common |= {"LOCAL_WORLD_SIZE": str(RANKS)}
    ended = run_together(
        [[sys.executable, "-m", "zerosync_strategy.tools.doctor.selftest", str(file)] for file in files], timeout,
        [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(RANKS)],
    )  # fmt: skip
    failed = [f"rank {rank} {each.how}: {each.last_line}" for rank, each in enumerate(ended) if each.status]
    if failed:
        return failed[0]
    return f"the ranks had not ended after {timeout:g} s" if any(each.status is None for each in ended) else ""


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _contract(found: Mapping[str, Any]) -> Iterator[Finding]:
    verdicts = [item for of_stage in found.values() for item in of_stage.get("verdicts", {}).items()]
    wrong = {feature: verdict for feature, verdict in reversed(verdicts) if verdict["problem"]}  # of several, the first
    for feature, verdict in sorted(wrong.items()):
        if verdict["needs_newer"]:
            yield CONTRACT.note(f"{feature} {verdict['problem']}", "Nothing, unless you use it.")
        else:
            remedy = "Install tested versions (docs/compatibility.md)."
            yield CONTRACT.error(f"{feature}: {verdict['problem']}", remedy)
    if fine := sorted(dict(verdicts).keys() - wrong.keys()):
        yield CONTRACT.ok(f"internals are as ZeroSync knows them, for: {', '.join(fine)}")


def _training(found: list[Mapping[str, Any]], problem: str) -> Iterator[Finding]:
    remedy = "If the versions and the contract above are right, report it with `zerosync doctor --json`."
    for stage in ("1", "2", "3"):
        of_ranks = [of_rank.get(stage, {}) for of_rank in found]
        if failed := next((of_rank["error"] for of_rank in of_ranks if "error" in of_rank), ""):
            yield TRAINING.error(f"stage {stage}: {failed}", remedy)
        elif not all("difference" in of_rank for of_rank in of_ranks):
            problem = problem or "an earlier stage failed"
            yield TRAINING.error(f"stage {stage} was not finished: {problem}", remedy)
        else:
            difference, reductions = (max(of[name] for of in of_ranks) for name in ("difference", "reductions"))
            text = f"stage {stage}, two ranks: parameters differ from plain torch's by {difference:g}"
            if difference > ROUNDING:
                yield TRAINING.error(text, remedy)
            elif reductions != 1:
                yield TRAINING.error(f"stage {stage}: {reductions} reductions in a step, expected 1", remedy)
            else:
                yield TRAINING.ok(f"{text}, one reduction per step")


# ---- a rank ----------------------------------------------------------------------------------------------------------


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
    from zerosync_strategy.core.engine.inspection import verdicts

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
