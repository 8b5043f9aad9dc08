"""`zerosync doctor --gpus`, on processes of the CPU that stand in for GPUs, by NCCL's rules."""

import json
import sys
from pathlib import Path

import pytest

from tests.harness.command import command
from tests.harness.forked import fork_instead
from zerosync_strategy.tools.doctor import ranks as doctor_ranks
from zerosync_strategy.tools.doctor.findings import Severity
from zerosync_strategy.tools.doctor.ranks import Ranks


@pytest.mark.timeout(900)
def test_all_that_two_gpus_would_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # of the communicator, which a killed rank leaves
    fork_instead(monkeypatch, doctor_ranks)
    for limit in ("TRAIN_SECONDS", "START_SECONDS", "FAULT_SECONDS"):  # slower here, by far
        monkeypatch.setattr(doctor_ranks, limit, 200.0)
    found = list(doctor_ranks.check_gpus(2, "cpu", "tests.doctor.strict_ranks"))
    assert all(each.level in (Severity.OK, Severity.NOTE) for each in found), found
    words = (
        "2 ranks, stages 1, 2 and 3: parameters equal plain torch's", "all-gather", "reduce-scatter", "step on stage 2",
        "step on stage 3", "a stuck rank: each other rank named rank 1", "a killed rank: each other rank named rank 1",
    )  # fmt: skip
    assert len(found) == len(words)
    assert [word for word, each in zip(words, found, strict=True) if word not in each.found] == []


def test_ranks_that_fail_are_an_error() -> None:
    (found,) = doctor_ranks.check_gpus(2, "cpu", "tests.doctor.which_does_not_exist")
    assert found.level is Severity.ERROR and "ended with status 1" in found.found and found.remedy


def test_a_verdict_that_does_not_come_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three ranks, rank 1 names nobody."""
    code = (
        "import os, sys, time; rank = os.environ['RANK']; print('doctor: stuck now' if rank == '2' else"
        " 'Verdict: rank 2 is outside' if rank == '0' else 'KeyError: x'); time.sleep(60 * (rank != '1'))"
    )
    monkeypatch.setattr(doctor_ranks, "Ranks", lambda *args: _running(code, 3))
    found = list(doctor_ranks._faults(3, "cpu", ""))
    assert [each.level for each in found] == [Severity.ERROR]
    assert "rank 1 ended with status 0, KeyError: x" in found[0].found and "named rank 2" in found[0].found


def test_ranks_are_waited_for_and_woken() -> None:
    code = "import os, signal; print('a'); input(); print('b'); os.kill(os.getpid(), signal.SIGKILL)"
    with _running(code, 2) as ranks:
        assert ranks.wait_until(lambda rank: "a" in ranks.said(rank), range(2), 60)[1] == ""
        assert "rank 0 said nothing for 0 s" in ranks.wait_until(lambda rank: "b" in ranks.said(rank), range(2), 0)[1]
        ranks.wake(1)
        problem = ranks.wait_until(lambda rank: "c" in ranks.said(rank), [1], 60)[1]
        assert problem == "rank 1 ended by SIGKILL"
        processes = ranks._processes
    assert all(process.returncode is not None for process in processes)


def _running(code: str, count: int) -> Ranks:
    ranks = Ranks("cpu", [], count)
    ranks._command = [sys.executable, "-u", "-c", code]
    return ranks


def test_slow_links_and_an_exposed_step_have_remedies() -> None:
    measured = [{"collective": "all-gather", "nbytes": n << 20, "rate": rate} for n, rate in ((16, 1e9), (256, 4e9))]
    (slow,) = doctor_ranks._bandwidths(measured, doctor_ranks.SLOW["cuda"])
    assert slow.level is Severity.WARNING and "4 GB/s at 256 MiB" in slow.found and "nvidia-smi topo" in slow.remedy
    (fine,) = doctor_ranks._bandwidths([measured[0], {**measured[1], "rate": 40e9}], doctor_ranks.SLOW["cuda"])
    assert fine.level is Severity.OK
    step = {"stage": 2, "seconds": 3e-3, "compute": 2e-3, "parameters": 1e6, "rows": 8}
    assert (
        doctor_ranks._step(step).level is Severity.OK
        and "1 ms more than plain torch's" in doctor_ranks._step(step).found
    )
    assert doctor_ranks._step({**step, "seconds": 5e-3}).level is Severity.NOTE


def test_without_a_gpu_it_says_so_and_tests_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_ranks, "visible_gpus", lambda: 0)
    monkeypatch.setattr(doctor_ranks, "self_test", lambda: doctor_ranks._passed("on the CPU"))
    for arguments in (["--gpus", "--json"], ["--gpus", "2", "--json"]):
        done = command("doctor", *arguments)
        found = {each["topic"]: each for each in json.loads(done.stdout)["findings"]}
        assert found["gpus"]["level"] == "warning" and "no GPU is visible" in found["gpus"]["found"]
        assert found["self-test"]["found"] == "on the CPU" and done.status == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--gpus", "0"], "takes a number of GPUs"),
        (["--gpus", "--no-self-test"], "--no-self-test leaves out"),
        (["--gpus", "3"], "3, and 2 are visible"),
    ],
)
def test_wrong_arguments(arguments: list[str], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_ranks, "visible_gpus", lambda: 2)
    done = command("doctor", *arguments)
    assert done.status == 2 and words in " ".join(done.stderr.replace("│", " ").split())


def test_all_gpus_are_tested_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_ranks, "visible_gpus", lambda: 8)
    monkeypatch.setattr(doctor_ranks, "check_gpus", lambda ranks: [doctor_ranks.ok(f"on {ranks}")])
    for arguments, ranks in ((["--gpus"], 8), (["--gpus", "all"], 8), (["--gpus", "2"], 2)):
        done = command("doctor", *arguments)
        assert f"on {ranks}" in done.stdout and "self-test" not in done.stdout
