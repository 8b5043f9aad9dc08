"""``zerosync run``, as a user types it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import zerosync_strategy

SOURCE = Path(zerosync_strategy.__file__).parent.parent
ZEROSYNC = [sys.executable, "-m", "zerosync_strategy"]
NOTHING = "zerosync run: there was nothing to attach to"
TRAIN = """
import os
import deepspeed, torch
torch.manual_seed(0)
model = torch.nn.Linear(4, 4)
engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters()), config={
    "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2, "zero_optimization": {"stage": 2},
})
for _ in range(4):
    engine.backward(engine(torch.ones(1, 4)).sum())
    engine.step()
handle = getattr(engine, "_zerosync", None)
report = handle and handle.report
done = report and f"{report.backwards} backwards, {report.reductions} reduction"
print(f"rank {os.environ['RANK']} {done}")  # by one write, which another rank's does not divide
"""
ACCELERATE = """
import torch
from accelerate import Accelerator
accelerator = Accelerator()
model = torch.nn.Linear(4, 4)
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
for _ in range(2):
    accelerator.backward(model(torch.ones(1, 4)).sum() / 2)
optimizer.step()
report = model._zerosync.report
print(f"rank {accelerator.process_index} {report.backwards} backwards, {report.reductions} reduction")
accelerator.end_training()
"""


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1", **more}


def call(*command: object, **more: str) -> subprocess.CompletedProcess[str]:
    words = list(map(str, command))
    return subprocess.run(words, env=environment(**more), capture_output=True, text=True, timeout=200)


def run(*command: object, **more: str) -> subprocess.CompletedProcess[str]:
    return call(*ZEROSYNC, "run", *command, **more)


def test_the_command_and_its_end_are_as_without_us(tmp_path: Path) -> None:
    """Output, exit status, a signal that ends it, what is not there; and that nothing trained is said at the end."""
    done = run("sh", "-c", "cat; exit 7")
    assert (done.returncode, done.stdout) == (7, "") and done.stderr.startswith(NOTHING)
    assert run("sh", "-c", "kill -KILL $$").returncode == -signal.SIGKILL
    assert run("no-such-command").returncode == 127
    (tmp_path / "plain").write_text("")
    assert run(tmp_path / "plain").returncode == 126
    done = call(*ZEROSYNC, "run")
    assert done.returncode == 2 and "a command is missing" in done.stderr


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGKILL], ids=lambda s: s.name
)
def test_signals_reach_the_command_once(number: signal.Signals, tmp_path: Path) -> None:
    """One to the process alone is passed on, and the command may end as it likes; with SIGKILL it ends, too."""
    script = tmp_path / "wait.py"
    script.write_text(
        "import os, signal, sys, time\ncame = []\n"
        f"signal.signal(signal.{'SIGTERM' if number is signal.SIGKILL else number.name}, lambda n, _: came.append(n))\n"
        "print(os.getpid(), flush=True)\nwhile not came: time.sleep(0.05)\n"
        "time.sleep(0.3)\nprint('came', *map(int, came), flush=True)\nsys.exit(3)\n"
    )
    command = [*ZEROSYNC, "run", sys.executable, str(script)]
    with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        process.send_signal(number)
        said = process.stdout.read()  # until both have closed it
    if number is signal.SIGKILL:
        assert (process.returncode, said) == (-number, "")
        deadline = time.monotonic() + 20
        while Path(f"/proc/{child}/cmdline").exists() and Path(f"/proc/{child}/cmdline").read_bytes():
            assert time.monotonic() < deadline, "the command outlives what ran it"
            time.sleep(0.05)
    else:
        assert (process.returncode, said) == (3, f"came {int(number)}\n")


def test_python_starts_as_without_us(tmp_path: Path) -> None:
    """With the environment's own sitecustomize, no module of ours, and nothing imported that was not."""
    loaded = "import sys; print(*sorted(sys.modules), *sys.path)"
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.own_sitecustomize = __file__\n")
    places = os.pathsep.join([str(tmp_path), str(SOURCE)])
    stock = call(sys.executable, "-c", loaded, PYTHONPATH=places).stdout.split()
    ours = run(sys.executable, "-c", loaded, PYTHONPATH=places).stdout.split()
    assert "sitecustomize" in stock
    assert set(ours) - set(stock) == {"zerosync_hook"} and not set(stock) - set(ours)
    own = run(sys.executable, "-c", "import sys; print(sys.own_sitecustomize)", PYTHONPATH=places).stdout
    assert own.strip() == str(tmp_path / "sitecustomize.py")
    missing = run(sys.executable, "-c", "import sys; print('sitecustomize' in sys.modules)").stdout
    assert missing == call(sys.executable, "-c", "import sys; print('sitecustomize' in sys.modules)").stdout


# As a launcher does: it sets what makes its child a rank.
LAUNCHER = """
import os, subprocess, sys
rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
sys.exit(subprocess.call([sys.executable, *sys.argv[1:]], env=os.environ | rank))
"""
# As `fabric run --strategy zerosync_stage_2` does, which leaves out names that offload.
NAMES = "from lightning.fabric.cli import _get_supported_strategies as names; print(*names())"


def test_a_rank_is_attached_to_and_lightning_finds_the_strategies_by_name(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN + NAMES)
    done = run(sys.executable, "-c", LAUNCHER, tmp_path / "train.py")
    assert done.returncode == 0, done.stdout + done.stderr
    trained, names = done.stdout.splitlines()[-2:]
    assert trained == "rank 0 2 backwards, 1 reduction", done.stdout + done.stderr
    assert done.stderr.count("attached to Linear, ZeRO-2 on 1 rank:") == 1 and NOTHING not in done.stderr
    assert {"zerosync", "zerosync_stage_1", "zerosync_stage_2", "zerosync_stage_3"} <= set(names.split())


LAUNCHERS = {
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"],
    "accelerate": [
        sys.executable, "-m", "accelerate.commands.launch", "--main_process_port", "0", "--num_processes", "2",
        "--use_deepspeed", "--zero_stage", "2",
    ],
    "deepspeed": ["deepspeed", "--num_gpus", "2"],
}  # fmt: skip


@pytest.mark.extended
@pytest.mark.parametrize(
    "launcher",
    ["torchrun", pytest.param("accelerate", marks=pytest.mark.slow), pytest.param("deepspeed", marks=pytest.mark.slow)],
)
def test_what_a_launcher_starts_is_attached_to(launcher: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(ACCELERATE if launcher == "accelerate" else TRAIN)
    done = run(*LAUNCHERS[launcher], script)
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in (0, 1):
        assert f"rank {rank} 2 backwards, 1 reduction" in done.stdout, done.stdout + done.stderr
    assert done.stderr.count("attached to Linear, ZeRO-2 on 2 ranks") == 1 and NOTHING not in done.stderr
