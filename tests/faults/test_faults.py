"""A rank that fails, however and wherever: every rank ends with a sentence, and the last checkpoint carries on."""

import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from examples import elastic
from tests.faults import fewer
from tests.faults.jobs import FAULT_AT, JOBS, plain
from tests.faults.soak import error_of, soak
from tests.faults.trials import DAMAGES, FAULTS, Trial, try_damaged, try_fault
from tests.harness.engines import rank
from tests.harness.oracle import Oracle, distance, full_parameters
from tests.harness.ranks import DIED, run_ranks

ERRORS = {"exception": "Injected", "SIGKILL": DIED, "SIGTERM": DIED, "out of memory": "OutOfMemoryError"}
# Most of what can happen, once each; the slow test has all of it.
SOME = [
    ("plain DeepSpeed", 2, "exception", "backward"),
    ("plain DeepSpeed", 3, "SIGKILL", "step"),
    ("plain DeepSpeed", 1, "NaN", "backward"),
    ("plain DeepSpeed", 3, "full disk", "checkpoint"),
    ("Lightning", 2, "SIGTERM", "forward"),
    ("Lightning", 3, "out of memory", "reduction"),
]
ALL = [(framework, stage, *fault) for framework in JOBS for stage in (1, 2, 3) for fault in FAULTS]


def check(trial: Trial, framework: str, kind: str, victim: int = 1) -> None:
    for outcome in trial.outcomes:
        if kind == "NaN":  # in fp32 goes on, as plain torch does
            assert outcome.error is None, str(outcome)
        elif kind == "full disk":
            assert outcome.error == "CheckpointError", str(outcome)
            assert "Is the disk full?" in outcome.message
        elif outcome.rank == victim:
            own = "SIGTERMException" if (framework, kind) == ("Lightning", "SIGTERM") else ERRORS[kind]
            assert outcome.error == own, str(outcome)
        else:
            assert outcome.error == "RankError", str(outcome)
            word = "gave no answer" if outcome.error == DIED else f"rank {victim}: "
            assert word in outcome.message and f"{FAULT_AT} optimizer step(s) done" in outcome.message
    assert trial.resumes


@pytest.mark.extended(but=("plain DeepSpeed-3-full disk-checkpoint",))
@pytest.mark.parametrize(("framework", "stage", "kind", "place"), SOME)
def test_a_fault_ends_every_rank_with_a_sentence(framework: str, stage: int, kind: str, place: str) -> None:
    if kind == "full disk" and os.geteuid():
        pytest.skip("mounting a small file system needs root")
    check(try_fault(framework, stage, kind, place), framework, kind)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize(("framework", "stage", "kind", "place"), ALL)
def test_every_fault(framework: str, stage: int, kind: str, place: str, world_size: int) -> None:
    if kind == "full disk" and os.geteuid():
        pytest.skip("mounting a small file system needs root")
    check(try_fault(framework, stage, kind, place, world_size), framework, kind)


@pytest.mark.extended(but=("plain DeepSpeed-2-truncated",))
@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize(("framework", "stage"), [("plain DeepSpeed", 2), ("Lightning", 3)])
def test_damaged_checkpoint(framework: str, stage: int, damage: str) -> None:
    trial = try_damaged(framework, stage, damage)
    for outcome in trial.outcomes:
        assert outcome.error == "CheckpointError", str(outcome)
        assert "Cannot read the checkpoint in " in outcome.message
    assert trial.resumes


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_torchrun_restarts_a_job_that_lost_a_rank(stage: int, tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(Path.cwd()), *sys.path]),
        "OMP_NUM_THREADS": "1",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # else gloo finds the addresses of the ranks' first lives
    }
    subprocess.run(
        [*torchrun, "-m", "tests.faults.elastic", str(stage), str(tmp_path)], env=environment, check=True, timeout=240
    )
    assert (tmp_path / "died_at").exists()
    parameters = torch.load(tmp_path / "parameters.pt")
    shutil.rmtree(tmp_path / "run")
    (undisturbed, _) = run_ranks(plain, stage, tmp_path / "run")
    # To the bit: both make the same operations, from the same bits on the same layout.
    assert distance(parameters, undisturbed) == 0.0


@pytest.mark.extended(but=("step",))
@pytest.mark.parametrize("where", ["step", "write"])
def test_the_ranks_that_are_left_go_on(where: str, tmp_path: Path) -> None:
    """Started again by hand."""
    outcomes = run_ranks(lambda: fewer.train(where, tmp_path, rank()), world_size=3, expect="any")
    assert [outcome.error for outcome in outcomes] == ["RankError", "RankError", DIED], outcomes
    run_ranks(lambda: fewer.train(where, tmp_path, rank()))
    check_fewer(tmp_path)


@pytest.mark.extended
@pytest.mark.timeout(300)
@pytest.mark.parametrize("where", ["step", "write"])
def test_torchrun_goes_on_with_the_ranks_that_are_left(where: str, tmp_path: Path) -> None:
    """Three agents with a rank each, of which one is killed."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    conf = "last_call_timeout=5,keep_alive_interval=1,keep_alive_max_attempt=3"
    torchrun = [
        [
            sys.executable, "-m", "torch.distributed.run", "--nnodes=1:3", "--nproc-per-node=1", "--max-restarts=5",
            "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--local-addr=127.0.0.1", "--rdzv-id=fewer",
            f"--rdzv-conf={conf},is_host={agent == 0}", "--monitor-interval=0.5",
            "-m", "tests.faults.fewer", where, str(tmp_path), str(agent),
        ]
        for agent in range(3)
    ]  # fmt: skip
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(Path.cwd()), *sys.path]), "OMP_NUM_THREADS": "1",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }  # fmt: skip
    agents = [subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) for command in torchrun]
    said = [agent.communicate(timeout=240)[1][-3000:] for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0, -signal.SIGKILL], said
    check_fewer(tmp_path)


def check_fewer(folder: Path) -> None:
    """Ten steps were made on three ranks and ten on two, as plain torch makes them."""
    log = [tuple(map(int, line.split())) for line in (folder / "agent0").read_text().splitlines()]
    two = [step for step, ranks in log if ranks == 2]
    assert [step for step, ranks in log if ranks == 3][:10] == [*range(10)] and two == [*range(10, 20)], log
    net = elastic.network()
    optimizer = elastic.optimizer_of(net)
    for oracle, steps in ((Oracle(net, optimizer, 3), range(10)), (Oracle(net, optimizer, 2), range(10, 20))):
        for step in steps:
            ranks = len(oracle.ranks)
            for first in range(0, elastic.PIECES, ranks):
                oracle.backward(
                    lambda rank, step=step, first=first, ranks=ranks: (
                        elastic.loss_of(net, step, first + rank) * ranks / elastic.PIECES
                    )
                )
            oracle.step()
    assert distance(torch.load(folder / "parameters.pt"), full_parameters(net)) == 0.0


def _soak(stage: int, steps: int, directory: Path) -> None:
    for result in run_ranks(soak, stage, steps, directory, timeout=800):
        assert error_of(result, steps) == 0.0
        early, late = result["usage"][len(result["usage"]) // 2 - 1], result["usage"][-1]
        assert late["files"] == early["files"] and late["threads"] == early["threads"], result["usage"]
        assert late["objects"] <= early["objects"] + 50, result["usage"]
        assert late["resident pages"] <= early["resident pages"] + 1024, result["usage"]  # 4 MiB


@pytest.mark.extended
@pytest.mark.parametrize("stage", [2, 3])
def test_nothing_grows(stage: int, tmp_path: Path) -> None:
    _soak(stage, 400, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_soak(stage: int, tmp_path: Path) -> None:
    _soak(stage, 2000, tmp_path)
