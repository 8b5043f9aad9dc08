"""The parts of `make gpu` are run one by one, whatever one of them does."""

import importlib
import json
import os
from pathlib import Path

import pytest

from tests.gpu.__main__ import line, run
from tests.gpu.parts import GPUS, MEASURED, PARTS, Part

WRITES = "import json, sys; json.dump(sys.argv[2:], open(sys.argv[1], 'w'))"
STUCK = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); print('before'); time.sleep(60)"


@pytest.mark.parametrize(
    ("program", "ended", "measured"),
    [(WRITES, "passed", ["x"]), (f"{WRITES}; raise SystemExit('no')", "failed", ["x"]), (STUCK, "out of time", None)],
    ids=["passes", "fails", "does not end"],
)
def test_a_part(program: str, ended: str, measured: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.gpu.__main__.GRACE", 0.5)
    part = Part("name", "What?", 3, ("-u", "-c", program, MEASURED, "x"), "a reason")
    log = tmp_path / "name.log"
    record = {"part": part.name, **run(part, 1, dict(os.environ), log)}
    assert record["ended"] == ended and record.get("measured") == measured
    assert log.read_text() == {"passed": "", "failed": "no\n", "out of time": "before\n"}[ended]
    assert ended in line(json.loads(json.dumps(record)))
    assert run(part, 0, dict(os.environ), log)["why"] == "no meaning without a GPU: a reason"


def test_parts_for_several_gpus_are_skipped_with_a_reason_on_one(tmp_path: Path) -> None:
    several = [part for part in PARTS if part.needs > 1]
    assert [part.name for part in several] == ["between", "faults", "frameworks", "doctor", "nccl"]
    for part in several:
        record = {"part": part.name, **run(part, 1, dict(os.environ), tmp_path / "log")}
        assert line(record).split() == [part.name, "skipped", *["needs", "2", "GPUs,", "and", "here", "is", "1"]]


def test_the_number_of_gpus_is_in_commands_and_limits(tmp_path: Path) -> None:
    part = Part("name", "What?", 8, ("-c", WRITES, MEASURED, GPUS), "a reason")
    record = run(part, 8, dict(os.environ), tmp_path / "name.log")
    assert (record["measured"], record["limit"]) == (["8"], 22)


def test_all_parts_of_one_gpu_take_at_most_a_quarter_of_an_hour() -> None:
    """Ten minutes on an H200; a limit is somewhat longer."""
    assert sum(part.limit(1) for part in PARTS if part.needs == 1) <= 900
    assert sum(part.limit(8) for part in PARTS) <= 75 * 60


def test_what_parts_measure_can_be_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a GPU is there, since an unknown system would end its part at once."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    known = importlib.import_module("exposed").SYSTEMS
    commands = [list(part.command) for part in PARTS if "--systems" in part.command]
    named = [word for each in commands for word in each[each.index("--systems") + 1 :]]
    assert len(commands) == 4 and set(named) <= set(known)
