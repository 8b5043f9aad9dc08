"""``accelerate launch`` with the example configurations, as a user types it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file

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


@pytest.mark.parametrize("how", ["import", "run", "run -m"])
def test_a_script_is_launched_from_the_yaml_alone(how: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(("import zerosync_strategy.accelerate\n" if how == "import" else "") + SCRIPT)
    run = ["-m", "zerosync_strategy.accelerate.run"]
    target = {"import": [str(script)], "run": [*run, str(script)], "run -m": [*run, "-m", "train"]}[how]
    done = launch("--config_file", str(CPU), *target, "--epochs", "3", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        expected = f"rank {rank}/2 __main__ ['--epochs', '3'] steps 2 backwards 2 reductions 1"
        assert expected in done.stdout, done.stdout + done.stderr


def test_a_wrong_option_in_the_yaml_is_said_on_every_rank(tmp_path: Path) -> None:
    config = yaml.safe_load(CPU.read_text())
    config["deepspeed_config"]["deepspeed_config_file"] = '{"zerosync": {"param_memory_bugdet": "all"}}'
    (tmp_path / "wrong.yaml").write_text(yaml.safe_dump(config))
    (tmp_path / "train.py").write_text(SCRIPT)
    run = ["-m", "zerosync_strategy.accelerate.run"]
    done = launch("--config_file", str(tmp_path / "wrong.yaml"), *run, "train.py", cwd=tmp_path)
    assert done.returncode != 0
    for rank in (0, 1):
        message = f"[rank{rank}]: ValueError: Unknown ZeroSync option 'param_memory_bugdet' in the 'zerosync' block"
        assert message in done.stderr, done.stderr


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.name)
def test_every_example_configuration_is_legal_and_carries_options(path: Path) -> None:
    config = load_config_from_file(str(path))
    assert config.distributed_type == "DEEPSPEED"
    plugin = ZeroSyncPlugin(hf_ds_config=config.deepspeed_config["deepspeed_config_file"])
    assert plugin.zerosync_config is not None
    assert "zerosync" in plugin.deepspeed_config
