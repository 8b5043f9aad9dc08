"""A two-rank training run on this machine's CPU against plain torch, and the contract on its live engines."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from zerosync_strategy.tools.doctor.findings import Finding, error, note, ok

CONTRACT, TRAINING = "contract", "self-test"
RANKS = 2
ROUNDING = 1e-5
"""W2: 84 units in the last place of 1. Another order of a sum makes a few; a gradient that is lost, far more."""


def check(timeout: float = 180.0, environment: Mapping[str, str] | None = None) -> list[Finding]:
    """Train on two ranks in processes of their own, on stages 1, 2 and 3.

    Args:
        timeout: seconds after which the ranks are ended.
        environment: more variables for the ranks.
    """
    with tempfile.TemporaryDirectory(prefix="zerosync-") as folder:
        files = [Path(folder) / f"rank{rank}" for rank in range(RANKS)]
        problem = _run(files, timeout, environment or {})
        found = [json.loads(file.read_text()) if file.exists() else {} for file in files]
    return [*_contract(found[0]), *_training(found, problem)]


def _run(files: list[Path], timeout: float, environment: Mapping[str, str]) -> str:
    """Run the ranks to their ends; return what went wrong, empty if nothing."""
    common = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **environment}
    common |= {"WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    ranks = []
    for rank, file in enumerate(files):
        log = file.with_suffix(".log").open("w")
        command = [sys.executable, "-m", "zerosync_strategy.tools.doctor.rank", str(file)]
        own = common | {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(RANKS)}
        ranks.append(subprocess.Popen(command, env=own, stdout=log, stderr=log))
        log.close()
    deadline = time.monotonic() + timeout
    try:
        for process in ranks:
            process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        return f"the ranks had not ended after {timeout:g} s"
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    for rank, process in enumerate(ranks):
        if process.returncode:
            lines = files[rank].with_suffix(".log").read_text().strip().splitlines()
            return f"rank {rank} ended with status {process.returncode}: {lines[-1] if lines else 'no output'}"
    return ""


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _contract(found: Mapping[str, Any]) -> Iterator[Finding]:
    features: set[str] = set()
    wrong: dict[str, Mapping[str, Any]] = {}
    for of_stage in found.values():
        for feature, verdict in of_stage.get("verdicts", {}).items():
            features.add(feature)
            if verdict["problem"]:
                wrong.setdefault(feature, verdict)
    for feature, verdict in sorted(wrong.items()):
        if verdict["needs_newer"]:
            yield note(CONTRACT, f"{feature} {verdict['problem']}", "Nothing, unless you use it.")
        else:
            yield error(
                CONTRACT, f"{feature}: {verdict['problem']}", "Install tested versions (docs/compatibility.md)."
            )
    if fine := sorted(features - wrong.keys()):
        yield ok(CONTRACT, f"internals are as ZeroSync knows them, for: {', '.join(fine)}")


def _training(found: list[Mapping[str, Any]], problem: str) -> Iterator[Finding]:
    remedy = "If the versions and the contract above are right, report it with `zerosync doctor --json`."
    for stage in ("1", "2", "3"):
        of_ranks = [of_rank.get(stage, {}) for of_rank in found]
        if failed := next((of_rank["error"] for of_rank in of_ranks if "error" in of_rank), ""):
            yield error(TRAINING, f"stage {stage}: {failed}", remedy)
        elif not all("difference" in of_rank for of_rank in of_ranks):
            if not problem:
                problem = "an earlier stage failed"
            yield error(TRAINING, f"stage {stage} was not finished: {problem}", remedy)
        else:
            difference = max(of_rank["difference"] for of_rank in of_ranks)
            reductions = max(of_rank["reductions"] for of_rank in of_ranks)
            text = f"stage {stage}, two ranks: parameters differ from plain torch's by {difference:g}"
            if difference > ROUNDING:
                yield error(TRAINING, text, remedy)
            elif reductions != 1:
                yield error(TRAINING, f"stage {stage}: {reductions} reductions in a step, expected 1", remedy)
            else:
                yield ok(TRAINING, f"{text}, one reduction per step")
