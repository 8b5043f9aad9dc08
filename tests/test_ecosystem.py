"""What the comparison with programs of others says, and the environments that it makes; no such program is run here."""

import math
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from trials.ecosystem import environment, runs, trainers
from trials.ecosystem.__main__ import PROJECTS, TRAINERS
from trials.ecosystem.projects import rows as projects
from trials.matrix.table import FILE


def program(*values: float, ratio: float = 1.01) -> runs.Program:
    """One that saves these weights: without DeepSpeed, on stage 2, on stage 3; NaN: it fails.

    Its second step sends ``ratio`` times the minimum.
    """

    def command(case: runs.Case) -> list[str]:
        value = values[(0, 2, 3).index(case.stage)]
        lines = [
            "import os, sys, numpy", "from safetensors.numpy import save_file", "from pathlib import Path",  # not torch
            "if sys.argv[2] == 'nan': raise ValueError('not this one')",
            "Path(sys.argv[1]).mkdir()",
            "report = Path(os.environ.get('ZEROSYNC_REPORT', '1:/dev/null').partition(':')[2])",
            "said = 'step {}: 2 backwards, 1 reduction; sent 1 kB, {:.3f} x the minimum; beside it 1 kB for others'",
            f"report.write_text('\\n'.join([said.format(1, 9.0), said.format(2, {ratio})]))",
            "save_file({'w': numpy.full(2, float(sys.argv[2]), 'float32')}, sys.argv[1] + '/w.safetensors')",
        ]  # fmt: skip
        script = case.write("program.py", "\n".join(lines))
        return ["SOME=1", "python", script, str(case.out), str(value)]

    return runs.Program("program", command)


@pytest.fixture
def variables(tmp_path: Path) -> dict[str, str]:
    """Of an environment with a ``zerosync run`` that runs its command and attaches to nothing."""
    (tmp_path / "bin").mkdir()
    stand_in = tmp_path / "bin" / "zerosync"
    stand_in.write_text('#!/bin/sh\nshift; exec "$@"\n')
    stand_in.chmod(0o755)
    (tmp_path / "model").mkdir()
    save_file({"w": torch.zeros(2)}, tmp_path / "model" / "model.safetensors")
    return {**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}


def test_weights_are_compared_with_those_of_the_program_by_itself(tmp_path: Path, variables: dict[str, str]) -> None:
    outcome = runs.run(program(1.0, 1.001, 1.5), tmp_path, tmp_path / "runs", variables)
    assert outcome.moved == 1.0
    assert outcome.stages == {2: pytest.approx(1e-3, rel=1e-3), 3: 0.5}
    assert (outcome.good(2), outcome.good(3), outcome.problems) == (True, False, True)
    assert outcome.cells == ["1e+00", "1e-03", "**5e-01**", "1.010"]


def test_a_program_that_fails_is_named_by_its_error(tmp_path: Path, variables: dict[str, str]) -> None:
    outcome = runs.run(program(1.0, math.nan, 1.0), tmp_path, tmp_path / "runs", variables)
    assert outcome.stages == {2: "ValueError: not this one", 3: 0.0}
    outcome = runs.run(program(math.nan, 1.0, 1.0), tmp_path, tmp_path / "runs", variables)
    assert outcome.problems and "does not run without DeepSpeed: ValueError" in outcome.cells[1]


def test_what_steps_send_is_a_problem_where_it_is_not_the_minimum(tmp_path: Path, variables: dict[str, str]) -> None:
    for ratio, problem, cell in ((1.0, False, "1.000"), (1.03, True, "**1.030**"), (0.9, True, "**0.900**")):
        outcome = runs.run(program(1.0, 1.0, 1.0, ratio=ratio), tmp_path, tmp_path / "runs", variables)
        assert (outcome.problems, outcome.cells[-1]) == (problem, cell)
        assert outcome.ratios == [ratio, ratio]  # of both stages, but for the first step


def test_weights_that_did_not_move_prove_nothing(tmp_path: Path, variables: dict[str, str]) -> None:
    assert runs.run(program(0.0, 0.0, 0.0), tmp_path, tmp_path / "runs", variables).problems


def test_an_environment_is_a_layer_over_the_present_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "FOLDER", tmp_path)
    made = environment.Environment("row", [])
    assert made.versions(["torch"]) == [torch.__version__.partition("+")[0]]
    command = (tmp_path / "row" / "bin" / "torchrun").read_text()
    assert command.startswith(f"#!{made.python}\n")
    (tmp_path / "row" / "kept").touch()
    environment.Environment("row", [])
    assert (tmp_path / "row" / "kept").exists()  # made once
    with pytest.raises(environment.InstallError):
        environment.Environment("row", ["/no/such/package"])


def test_the_tables_have_rows_of_these_programs_alone() -> None:
    commands = {f"`{program.name}`" for row in trainers.ROWS for program in row.programs}
    text = FILE.read_text()
    assert commands.issuperset(TRAINERS.read(text))
    assert {row.name for row in projects.ROWS}.issuperset(PROJECTS.read(text))
    folder = Path(projects.__file__).parent
    assert all((folder / f"{row.module}.py").is_file() for row in projects.ROWS)
