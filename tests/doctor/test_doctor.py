"""`zerosync doctor`: each trap is found where it is, and nothing is found where there is none."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from packaging.version import Version

from tests.harness.command import command
from tests.harness.ranks import run_ranks
from trials.matrix import table
from zerosync_strategy.tools.doctor import configurations, installation, on_rank, ranks
from zerosync_strategy.tools.doctor.findings import Finding, Severity

ROOT = Path(__file__).parent.parent.parent
FINE = {
    "train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0.0,
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "zerosync": {"param_memory_budget": "all"},
}  # fmt: skip


def with_zero(**zero: Any) -> dict[str, Any]:
    return {"zero_optimization": {**FINE["zero_optimization"], **zero}}  # type: ignore[dict-item]


# What is changed in FINE, and the level and a word of the one finding there is; None removes a key.
TRAPS: list[tuple[dict[str, Any], str, str]] = [
    ({"gradient_clipping": None}, "warning", "norm of 1.0"),
    (with_zero(stage3_param_persistence_threshold=5), "note", "stay whole"),
    (with_zero(offload_optimizer={"device": "cpu"}), "warning", "DeepSpeedCPUAdam"),
    ({"train_micro_batch_size_per_gpu": "auto"}, "error", "'auto'"),
    ({"zerosync": {"param_memory_budgets": 1}}, "error", "Did you mean 'param_memory_budget'"),
    ({"gradient_acumulation_steps": 4}, "error", "Did you mean 'gradient_accumulation_steps'?"),
    ({"of_another_program": {}}, "warning", "'of_another_program' is no key"),
]  # fmt: skip


def serious(findings: list[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.level in (Severity.WARNING, Severity.ERROR)]


def checked(tmp_path: Path, config: dict[str, Any]) -> list[Finding]:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return configurations.check(file)


@pytest.mark.parametrize(("change", "level", "word"), TRAPS, ids=lambda value: value if isinstance(value, str) else "")
def test_each_trap_is_found(tmp_path: Path, change: dict[str, Any], level: str, word: str) -> None:
    (fine,) = checked(tmp_path, FINE)
    assert fine.level is Severity.OK
    found = checked(tmp_path, {**FINE, **change})
    (trap,) = [each for each in found if word in each.found]
    assert trap.level.value == level and trap.remedy


def test_what_deepspeed_takes_is_no_finding(tmp_path: Path) -> None:
    """Aliases, nested blocks, numbers as texts write them, and blocks that are read as they are."""
    config: dict[str, Any] = {
        **FINE, **with_zero(stage3_max_live_parameters=1e9, sub_group_size=5e8, prefetch_bucket_size=1),
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, "scheduler": {"type": "WarmupLR", "params": {}},
        "activation_checkpointing": {"partition_activations": False}, "wandb": {"enabled": False},
        "flops_profiler": {"enabled": False}, "steps_per_print": 10, "train_batch_size": 64,
        "gradient_accumulation_steps": 4, "fp16": {"enabled": False}, "sequence_parallel_size": 2,
    }  # fmt: skip
    assert serious(checked(tmp_path, config)) == []


def test_deepspeed_has_the_defaults_that_the_traps_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    stock = deepspeed.DeepSpeedConfig({"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}})
    assert stock.gradient_clipping == 1.0
    assert stock.zero_config.param_persistence_threshold == 100_000


def test_traps_of_accelerate() -> None:
    inner = json.dumps({**FINE, "gradient_clipping": "auto", "train_micro_batch_size_per_gpu": "auto"})
    good = {"distributed_type": "DEEPSPEED", "deepspeed_config": {"deepspeed_config_file": inner}}
    assert list(configurations.accelerate(good, ROOT)) == []
    (alone,) = configurations.accelerate({**good, "use_cpu": True, "num_processes": 2}, ROOT)
    assert alone.level is Severity.NOTE and "without a backend" in alone.found
    (other,) = configurations.accelerate({**good, "distributed_type": "MULTI_GPU"}, ROOT)
    assert other.level is Severity.ERROR and "MULTI_GPU" in other.found


def test_traps_of_lightning() -> None:
    strategy = {"class_path": "zerosync_strategy.ZeroSyncStrategy", "init_args": {"config": FINE}}
    assert list(configurations.lightning({"trainer": {"strategy": strategy}})) == []
    (own,) = configurations.lightning({"trainer": {"strategy": "deepspeed_stage_2"}})
    assert own.level is Severity.ERROR and "silently wrong" in own.found


@pytest.mark.parametrize(
    "example", sorted((ROOT / "examples" / "accelerate").glob("*.yaml")), ids=lambda file: file.name
)
def test_our_own_configurations_have_no_trap(example: Path) -> None:
    assert serious(configurations.check(example)) == []


def test_a_file_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "list.yaml").write_text("- 1")
    (tmp_path / "broken.json").write_text("{")
    for name in ("list.yaml", "broken.json", "missing.json"):
        (found,) = configurations.check(tmp_path / name)
        assert found.level is Severity.ERROR and name in found.found


def test_the_tested_releases_are_those_of_the_table() -> None:
    header = table.MATRIX.header[1:]
    rows = list(table.MATRIX.read(table.FILE.read_text()).values())
    for column, package in enumerate(header):
        if package.lower() not in installation.TESTED:
            continue
        ran = sorted(Version(row[column]) for row in rows)
        oldest, newest = (Version(each).release for each in installation.TESTED[package.lower()])
        assert (ran[0].release[: len(oldest)], ran[-1].release[: len(oldest)]) == (oldest, newest), package
    assert installation.TESTED["lightning"] == installation.TESTED["pytorch-lightning"]


@pytest.mark.parametrize(
    ("package", "release", "level", "word"),
    [
        ("deepspeed", "0.17.6", Severity.ERROR, "older"),
        ("deepspeed", None, Severity.ERROR, "not installed"),
        ("deepspeed", "0.20.0+cu130", Severity.WARNING, "newer"),
        ("torch", "2.9.1+cpu", Severity.ERROR, "older"),
        ("accelerate", "1.3.0", Severity.WARNING, "older"),
        ("python", "3.14.1", Severity.WARNING, "newer"),
    ],
)
def test_releases_that_were_not_tested(package: str, release: str | None, level: Severity, word: str) -> None:
    newest = {name: last for name, (_, last) in installation.TESTED.items() if name != "pytorch-lightning"}
    assert serious(list(installation.check_releases(newest.get))) == []
    (found,) = serious(list(installation.check_releases({**newest, package: release}.get)))
    assert found.level is level and word in found.found and package in found.found and found.remedy


def test_what_is_wrong_with_the_machine(tmp_path: Path) -> None:
    lock = tmp_path / "py311_cpu" / "cpu_adam" / "lock"
    lock.parent.mkdir(parents=True)
    assert serious(list(installation.check_machine(Path("/dev/shm"), tmp_path))) == []
    lock.touch()
    (held,) = serious(list(installation.check_machine(Path("/dev/shm"), tmp_path)))
    assert str(lock) in held.found and str(lock) in held.remedy
    (missing,) = serious(list(installation.check_machine(tmp_path / "shm", tmp_path / "none")))
    assert str(tmp_path / "shm") in missing.found


def broken(how: Callable[[], None]) -> str:
    """What a rank of the self-test ends with where each is broken first; on forked ranks, which start faster."""
    outcomes = run_ranks(lambda: (how(), on_rank.main("cpu", ["correct"])), expect="any")
    return " ".join(f"{each.error} {each.message}" for each in outcomes)


@pytest.mark.extended  # test_gpus.py trains by the same program, on forked ranks
def test_the_self_test_passes() -> None:
    assert ranks.self_test(timeout=150).level is Severity.OK


def test_a_deepspeed_that_lacks_an_internal_fails() -> None:
    def lack() -> None:
        del deepspeed.DeepSpeedEngine.allreduce_gradients

    said = broken(lack)
    assert "ContractError" in said and "allreduce_gradients" in said


def test_ranks_that_receive_something_else_fail_the_self_test() -> None:
    def send_half() -> None:
        stock, kept = torch.distributed.isend, []

        def isend(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            kept.append(tensor * 0.5)
            return stock(kept[-1], *args, **kwargs)

        torch.distributed.isend = isend

    said = broken(send_half)
    assert "ArithmeticError" in said and "differ" in said


def test_ranks_that_do_not_end_are_ended() -> None:
    finding = ranks.self_test(timeout=0.5)
    assert finding.level is Severity.ERROR and "not ended" in finding.found


def test_the_command_has_an_exit_status_and_json(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({**FINE, "gradient_acumulation_steps": 4}))
    done = command("doctor", "--no-self-test", "--json", str(file))
    found = json.loads(done.stdout)
    assert done.status == found["exit_status"] == 1
    assert [each["topic"] for each in found["findings"] if each["level"] == "error"] == ["configuration"]
    plain = command("doctor", "--no-self-test", str(file))
    assert plain.status == 1 and "\x1b" not in plain.stdout and "-> Correct it." in plain.stdout


def test_findings_are_printed_as_they_are_made_in_a_pipe_too() -> None:
    code = "from zerosync_strategy.tools.doctor import ranks as t; import time; t.self_test = lambda: time.sleep(60)"
    call = f"{code}\nfrom zerosync_strategy.tools.cli import main\nmain(['doctor'])"
    with subprocess.Popen([sys.executable, "-c", call], stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        try:
            assert "versions" in running.stdout.readline()
            assert running.poll() is None  # it is still at its self-test
        finally:
            running.kill()


def test_without_its_packages_the_command_says_what_to_install() -> None:
    without = (
        "import sys; sys.modules['typer'] = None\nfrom zerosync_strategy.tools.cli import main\nmain(sys.argv[1:])"
    )
    done, version = (
        subprocess.run([sys.executable, "-c", without, argument], capture_output=True, text=True, timeout=120)
        for argument in ("doctor", "--version")
    )
    assert done.returncode == 1 and "'typer'" in done.stderr and "zerosync-strategy[cli]" in done.stderr
    assert version.returncode == 0
