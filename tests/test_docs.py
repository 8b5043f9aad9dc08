"""The documentation: its links, its code, and that the code runs."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from zerosync_strategy import ZeroSyncConfig

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
TORCHRUN = ("-m", "torch.distributed.run", "--nproc_per_node")
ACCELERATE = ("-m", "accelerate.commands.launch", "--config_file", "examples/accelerate/zerosync_cpu.yaml")
PROGRAMS = {
    "train_deepspeed.py": (*TORCHRUN, "2"),
    "train_lightning.py": (),
    "train_lightning_manual.py": (),
    "train_fabric.py": (),
    "train_fabric_several.py": (),
    "train_accelerate.py": ACCELERATE,
    "experts.py": (*TORCHRUN, "4"),
    "migrate_coalesce.py": (*TORCHRUN, "2"),
    "migrate_fsdp2.py": (*TORCHRUN, "2"),
}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text)
    assert [link for link in links if "://" not in link and not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_show_the_code_of_its_files(page: Path) -> None:
    spec = importlib.util.spec_from_file_location("docs_code", ROOT / "docs" / "_site" / "code.py")
    assert spec is not None and spec.loader is not None
    code = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(code)
    assert code.filled(page.read_text()) == page.read_text(), "python docs/_site/code.py"


def test_every_option_is_in_the_table() -> None:
    table = re.findall(r"^\| `(\w+)` \|", (ROOT / "docs" / "options.md").read_text(), flags=re.MULTILINE)
    assert set(table) == {*ZeroSyncConfig.option_names(), "step_on"}


def test_every_program_is_run() -> None:
    assert {path.name for path in (ROOT / "docs" / "code").glob("*.py")} == PROGRAMS.keys()


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_run(name: str) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, *PROGRAMS[name], f"docs/code/{name}"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
