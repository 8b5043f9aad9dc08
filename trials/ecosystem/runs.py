"""One program, run without DeepSpeed and on ZeroSync, and how far its saved weights are apart."""

import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file

STAGES = (2, 3)
NOT_ATTACHED = "there was nothing to attach to"  # by zerosync run
SECONDS = 900
# Weights of two runs are the same if they differ by less than this part of what training changed.
SAME = 0.01
# What a step sends, over the minimum: within these, from the second step on.
LEAST, MOST = 0.9995, 1.02
REPORT = "ZEROSYNC_REPORT"


@dataclass(frozen=True)
class Case:
    """One run of a program.

    Attributes:
        material: the folder with the model and the data, see material.py.
        folder: for its configuration, its log and, under ``out``, its weights.
        stage: of ZeRO; 0: without DeepSpeed, which is what the others are compared with.
    """

    material: Path
    folder: Path
    stage: int

    @property
    def out(self) -> Path:
        return self.folder / "out"

    def source(self, path: str) -> str:
        """Where a file of the row's repository lies."""
        return str(self.material.parent / "repository" / path)

    @property
    def report(self) -> Path:
        """Where the report of each optimizer step goes, a line each."""
        return self.folder / "steps.log"

    def write(self, name: str, content: object) -> str:
        """Write a configuration file, as JSON, which YAML can read too; its path."""
        file = self.folder / name
        file.write_text(content if isinstance(content, str) else json.dumps(content, indent=2))
        return str(file)


@dataclass(frozen=True)
class Program:
    """What is run for each stage.

    ``command`` writes the configuration of a case and gives its command line. Variables may precede it, as in a shell.
    Weights are the same if they differ by less than the part ``same`` of what training changed.
    """

    name: str
    command: Callable[[Case], list[str]]
    same: float = SAME


@dataclass(frozen=True)
class Outcome:
    """What came of a program.

    Attributes:
        moved: how far training moved the weights without DeepSpeed, as the largest absolute change.
        stages: by stage, the largest absolute difference of its weights from those, or the error.
        ratios: of what each step sent, over the minimum, from the second step on; of all stages.
        same: weights differ by less than this part of ``moved``.
    """

    moved: float
    stages: Mapping[int, float | str]
    ratios: Sequence[float] = ()
    same: float = SAME

    def good(self, stage: int) -> bool:
        found = self.stages[stage]
        return isinstance(found, float) and found < self.same * self.moved

    @property
    def problems(self) -> bool:
        return not all(map(self.good, self.stages)) or not self.sends_the_minimum

    @property
    def sends_the_minimum(self) -> bool:
        return bool(self.ratios) and min(self.ratios) >= LEAST and max(self.ratios) <= MOST

    @property
    def cells(self) -> list[str]:
        texts = [
            f"{found:.0e}" if self.good(stage) else f"**{found:.0e}**" if isinstance(found, float) else found
            for stage, found in self.stages.items()
        ]
        sent = " to ".join(dict.fromkeys(f"{found(self.ratios):.3f}" for found in (min, max) if self.ratios))
        sent = sent if self.sends_the_minimum else f"**{sent or 'none'}**"
        return [f"{self.moved:.0e}", *(re.sub(r"/\S*/", "", text.replace("|", ",")) for text in texts), sent]


def run(
    program: Program, material: Path, folder: Path, variables: Mapping[str, str], stages: Sequence[int] = (0, *STAGES)
) -> Outcome:
    """Run a program without DeepSpeed and with each stage on ZeroSync; compare what it saved.

    Of ``stages`` alone; of the others, what they left in ``folder`` before is used again.
    """
    reference = Case(material, folder / "plain", 0)
    if error := start(program, reference, variables) if 0 in stages else "":
        return Outcome(float("nan"), dict.fromkeys(STAGES, f"does not run without DeepSpeed: {error}"))
    wanted = weights(reference.out)
    found: dict[int, float | str] = {}
    sent: list[float] = []
    for stage in STAGES:
        case = Case(material, folder / f"stage{stage}", stage)
        error = start(program, case, variables) if stage in stages else ""
        found[stage] = error or distance(wanted, weights(case.out))
        sent += [] if error else ratios(case.report)
    return Outcome(distance(wanted, beginning(wanted, material)), found, sent, program.same)


def start(program: Program, case: Case, variables: Mapping[str, str]) -> str:
    """Run one case to its end; the error that its log ends with, or nothing."""
    shutil.rmtree(case.folder, ignore_errors=True)
    case.folder.mkdir(parents=True)
    command = program.command(case)
    given = {}
    while "=" in command[0]:
        name, _, given[name] = command.pop(0).partition("=")
    if case.stage:
        command = ["zerosync", "run", *command]
        given[REPORT] = f"1:{case.report}"
    print("$", *(f"{name}={value}" for name, value in given.items()), *command, flush=True)
    begun = time.monotonic()
    log = case.folder / "log.txt"
    with log.open("w") as file:
        process = subprocess.Popen(
            command, cwd=case.folder, env={**variables, **quiet(case.folder), **given}, stdout=file, stderr=file,
            start_new_session=True,
        )  # fmt: skip
        try:
            code = process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    print(f"  {time.monotonic() - begun:.0f} s, exit code {code}, log in {log}", flush=True)
    if code is None:
        return f"did not end in {SECONDS} s"
    if code:
        return last_error(log.read_text())
    if case.stage and NOT_ATTACHED in log.read_text():
        return "ZeroSync was not attached"
    return "" if weight_files(case.out) else "saved no weights"


def ratios(report: Path) -> list[float]:
    """What each step sent, over the minimum, from the second step on; of a file of reports, a line each."""
    text = report.read_text() if report.exists() else ""
    lines = re.findall(r"step (\d+):.* sent [^;]*?, ([\d.]+) x the minimum", text)
    return [float(ratio) for step, ratio in lines if step != "1"]


def quiet(folder: Path) -> dict[str, str]:
    """Variables for runs on a CPU without a network, which leave nothing outside of their folder."""
    return {
        "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(folder / "cache"), "TOKENIZERS_PARALLELISM": "false", "WANDB_MODE": "disabled",
        "DO_NOT_TRACK": "1", "TORCH_EXTENSIONS_DIR": str(folder / "cache"),
    }  # fmt: skip


def last_error(text: str) -> str:
    """The line that says what was raised first, without the name of the rank."""
    lines = [re.sub(r"^\[\w+\]: ?", "", line).strip() for line in text.splitlines()]
    named = [
        line for line in lines if re.match(r"[\w.]*(Error|Exception|Interrupt)\b", line) and "ChildFailed" not in line
    ]
    return (named or lines or ["nothing was printed"])[0][:200]


def weight_files(folder: Path) -> list[Path]:
    """The files of the weights that a program saved: of adapters alone, where there are such."""
    found = sorted(folder.rglob("*.safetensors"))
    found = [file for file in found if "checkpoint-" not in str(file)] or found
    return [file for file in found if file.name == "adapter_model.safetensors"] or found


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """The saved weights of a folder in double precision, by name."""
    return {name: value.double() for file in weight_files(folder) for name, value in load_file(file).items()}


def beginning(like: Mapping[str, torch.Tensor], material: Path) -> dict[str, torch.Tensor]:
    """What weights of these names were before training; adapters begin with nothing added, B of the product at zero."""
    if any("lora" in name for name in like):
        return {name: value * ("lora_A" in name or "lora.down" in name) for name, value in like.items()}
    for model in (folder.name for folder in material.iterdir() if weight_files(folder)):
        # the base of one is saved without the prefix
        found = {name.removeprefix("model."): value for name, value in weights(material / model).items()}
        if all(name.removeprefix("model.") in found for name in like):
            return {name: found[name.removeprefix("model.")] for name in like}
    raise ValueError(f"no model begins with {sorted(like)[:3]}")


def distance(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> float:
    """The largest absolute difference of two sets of weights, infinite where their names differ."""
    if one.keys() != other.keys():
        return float("inf")
    return max(float((value - other[name]).abs().max()) for name, value in one.items())
