"""``accelerate launch`` with the example configurations, as a user types it."""

import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from accelerate.commands.config.config_args import load_config_from_file

from tests.harness.ranks import run_ranks
from zerosync_strategy import ZeroSyncPlugin

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "accelerate"
CPU = EXAMPLES / "zerosync_cpu.yaml"
SCRIPT = """
from accelerate import PartialState
first = PartialState()
import sys
import torch
from accelerate import Accelerator
accelerator = Accelerator(gradient_accumulation_steps=2)
model = torch.nn.Linear(4, 4)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
for _ in range(4):
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.ones(1, 4)).sum())
        optimizer.step()
        optimizer.zero_grad()
report = accelerator.deepspeed_engine_wrapped.zerosync.report
print(f"rank {first.process_index}/{first.num_processes} {__name__} {sys.argv[1:]}"
      f" steps {model.global_steps} backwards {report.backwards} reductions {report.reductions}", flush=True)
"""


def launch(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """``accelerate launch``, from a folder of the test's own; whatever it starts ends with it."""
    return subprocess.run(
        [sys.executable, "-m", "accelerate.commands.launch", "--main_process_port", "0", *arguments],
        cwd=cwd, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip


@pytest.mark.extended
@pytest.mark.parametrize("how", ["import", pytest.param("run", marks=pytest.mark.slow)])
def test_a_script_is_launched_from_the_yaml_alone(how: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(("import zerosync_strategy.accelerate\n" if how == "import" else "") + SCRIPT)
    by = ["-m", "zerosync_strategy.accelerate.run"] if how == "run" else []
    done = launch("--config_file", str(CPU), *by, str(script), "--epochs", "3", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        assert expected(rank) in done.stdout, done.stdout + done.stderr


def expected(rank: int) -> str:
    return f"rank {rank}/2 __main__ ['--epochs', '3'] steps 2 backwards 2 reductions 1"


def run(folder: Path, *what: str, more: str = "") -> Any:
    """The outcomes of ``-m zerosync_strategy.accelerate.run`` on forked ranks, which start faster."""
    (folder / "train.py").write_text(SCRIPT)

    def job() -> None:
        os.chdir(folder)
        sys.path.insert(0, str(folder))  # as Python does where -m is given
        sys.argv = ["run", *what, "--epochs", "3"]
        runpy.run_module("zerosync_strategy.accelerate.run", run_name="__main__")

    config = f'{{"zero_optimization": {{"stage": 2}}{more}}}'
    env = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": config}
    return run_ranks(job, expect="any", env=env)


@pytest.mark.parametrize("what", [["-m", "train"], ["train.py"]], ids=" ".join)
def test_a_module_or_a_script_is_run(what: list[str], tmp_path: Path) -> None:
    """Also where the configuration has no block of ours."""
    for rank, outcome in enumerate(run(tmp_path, *what)):
        assert outcome.error is None and expected(rank) in outcome.output, str(outcome)


def test_a_wrong_option_is_said_on_every_rank(tmp_path: Path) -> None:
    for outcome in run(tmp_path, "-m", "train", more=', "zerosync": {"param_memory_bugdet": "all"}'):
        assert outcome.error == "ValueError", str(outcome)
        assert "Unknown ZeroSync option 'param_memory_bugdet' in the 'zerosync' block" in outcome.message


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.name)
def test_every_example_configuration_is_legal_and_carries_options(path: Path) -> None:
    config = load_config_from_file(str(path))
    assert config.distributed_type == "DEEPSPEED"
    plugin = ZeroSyncPlugin(hf_ds_config=config.deepspeed_config["deepspeed_config_file"])
    assert plugin.zerosync_config is not None
    assert "zerosync" in plugin.deepspeed_config
