"""The parts of `make gpu` are run one by one, whatever one of them does."""

import importlib
import json
import os
from pathlib import Path

import pytest

from tests.gpu.__main__ import line, run
from tests.gpu.parts import MEASURED, PARTS, Part

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
    record = {"part": part.name, **run(part, False, dict(os.environ), log)}
    assert record["ended"] == ended and record.get("measured") == measured
    assert log.read_text() == {"passed": "", "failed": "no\n", "out of time": "before\n"}[ended]
    assert ended in line(json.loads(json.dumps(record)))
    assert run(part, True, dict(os.environ), log)["why"] == "no meaning without a GPU: a reason"


def test_all_parts_take_ten_minutes() -> None:
    assert sum(part.seconds for part in PARTS) <= 600


def test_what_parts_measure_can_be_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a GPU is there, since an unknown system would end its part at once."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    known = importlib.import_module("exposed").SYSTEMS
    commands = [list(part.command) for part in PARTS if "--systems" in part.command]
    named = [word for each in commands for word in each[each.index("--systems") + 1 :]]
    assert len(commands) == 3 and set(named) <= set(known)
