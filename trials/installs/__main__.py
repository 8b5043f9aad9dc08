"""Installs what `make dist` has built, with each extra and Python in an environment of its own, and trains there.

python -m trials.installs [WORD ...]   all, or those that are of these words: 3.12, wheel, sdist, accelerate ...

A program is one of docs/code, in a folder without the repository, so that nothing but what is installed is found. Each
writes its line in docs/compatibility.md. Exits 1 if something cannot be installed, or does not train.
"""

import datetime
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from trials.matrix.environment import ROOT, InstallError, interpreter
from trials.matrix.table import Table

KINDS = {"wheel": "*.whl", "sdist": "*.tar.gz"}
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
TWO_RANKS = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")


class Program(NamedTuple):
    """What trains with an extra: a file of docs/code, with other names of packages in it, behind some arguments."""

    file: str
    names: Mapping[str, str] = {}
    before: tuple[str, ...] = ()


PROGRAMS = {
    "": Program("train_deepspeed.py", before=TWO_RANKS),
    "lightning": Program("train_lightning.py"),
    "pytorch-lightning": Program(
        "train_lightning.py",
        {"lightning.pytorch": "pytorch_lightning", "zerosync_strategy": "zerosync_strategy.pytorch_lightning"},
    ),
    "lightning-fabric": Program(
        "train_fabric.py",
        {"lightning.fabric": "lightning_fabric", "zerosync_strategy.fabric": "zerosync_strategy.lightning_fabric"},
    ),
    "accelerate": Program("train_accelerate.py", before=TWO_RANKS),
    "cli": Program("", before=("-m", "zerosync_strategy", "doctor", "--self-test")),
}


TABLE = Table(
    "<!-- installs: made by `make installs` -->",
    "<!-- end of the installs -->",
    ["installed", "trained", "releases", "date"],
    [":---"] * 4,
)


class Case(NamedTuple):
    """What is installed where. A wheel is what a source distribution makes: one extra shows that it does."""

    python: str
    kind: str
    extra: str

    @property
    def name(self) -> str:
        return f"Python {self.python}, {self.kind}{f'[{self.extra}]' if self.extra else ''}"


CASES = [
    Case(python, kind, extra)
    for python in PYTHONS
    for kind, extra in [*(("wheel", extra) for extra in PROGRAMS), ("sdist", "accelerate")]
]


def main() -> int:
    words = sys.argv[1:]
    if unknown := [word for word in words if all(word not in case for case in CASES)]:
        sys.exit(
            f"Nothing is of {unknown[0]!r}. There are: {', '.join(sorted({word for case in CASES for word in case}))}"
        )
    files = {kind: next((ROOT / "dist").glob(pattern), None) for kind, pattern in KINDS.items()}
    if None in files.values():
        sys.exit("dist/ lacks a wheel or a source distribution: make dist builds them.")
    failed = 0
    for case in CASES:
        if any(word not in case for word in words):
            continue
        requirement = f"{files[case.kind]}{f'[{case.extra}]' if case.extra else ''}"
        with tempfile.TemporaryDirectory(prefix="installs-") as folder:
            problem, releases = tried(case.python, requirement, PROGRAMS[case.extra], Path(folder))
        failed += bool(problem)
        print(f"{case.name}: {problem or 'yes'}", flush=True)
        row = [problem or "yes", releases, datetime.date.today().isoformat()]
        TABLE.update({case.name: row}, [case.name for case in CASES])
    return int(failed > 0)


def tried(python: str, requirement: str, program: Program, folder: Path) -> tuple[str, str]:
    """What went wrong, and the releases that were installed."""
    try:
        base = interpreter(python)
    except InstallError as error:
        return f"not installed: {error}", ""
    uv, environment = [sys.executable, "-m", "uv", "-q"], folder / "environment"
    own = str(environment / "bin" / "python")
    for step in (
        [*uv, "venv", "--python", base, str(environment)],
        [*uv, "pip", "install", "--python", own, requirement],
    ):
        done = subprocess.run(step, capture_output=True, text=True)
        if done.returncode:
            return f"not installed: {_last_line(done.stderr)}", ""
    listed = subprocess.check_output([*uv, "pip", "list", "--python", own, "--format", "freeze"], text=True)
    wanted = r"^((?:torch|deepspeed|lightning|pytorch-lightning|lightning-fabric|accelerate)==[\d.]+)"
    releases = ", ".join(re.findall(wanted, listed, re.MULTILINE)).replace("==", " ")
    command = [own, *program.before]
    if program.file:
        text = (ROOT / "docs" / "code" / program.file).read_text()
        for name, other in program.names.items():
            text = re.sub(rf"^from {re.escape(name)} import", f"from {other} import", text, flags=re.MULTILINE)
        (folder / program.file).write_text(text)
        command.append(program.file)
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    variables["PATH"] = os.pathsep.join([str(environment / "bin"), variables["PATH"]])
    try:
        done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=300)
    except subprocess.TimeoutExpired:
        return "no: not within 300 s", releases
    return (f"no: {_last_line(done.stderr or done.stdout)}" if done.returncode else ""), releases


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["nothing was printed"])[-1][:200]


if __name__ == "__main__":
    sys.exit(main())
