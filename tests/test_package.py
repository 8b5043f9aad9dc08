"""What importing loads, and which way imports run."""

import ast
import subprocess
import sys
from pathlib import Path

import zerosync_strategy

SOURCE = Path(zerosync_strategy.__file__).parent


def loaded_after(*statements: str) -> list[set[str]]:
    """The packages that a new interpreter has loaded after each of the statements."""
    code = "import sys\n"
    for statement in statements:
        code += f"{statement}\nprint(*{{name.split('.')[0] for name in sys.modules}})\n"
    lines = subprocess.check_output([sys.executable, "-c", code], text=True).splitlines()
    return [set(line.split()) for line in lines]


def test_importing_the_package_loads_no_framework() -> None:
    heavy = {"torch", "deepspeed", "lightning", "accelerate", "pytorch_lightning"}
    package, core = loaded_after("import zerosync_strategy", "from zerosync_strategy import attach")
    assert not package & heavy
    assert core & heavy == {"torch"}


def test_the_core_imports_no_framework_and_deepspeed_only_inside_functions() -> None:
    for path in (SOURCE / "core").rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            names = [alias.name for alias in getattr(node, "names", [])] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                assert name.split(".")[0] not in ("deepspeed", "lightning", "accelerate"), f"{path.name} imports {name}"
                above = ("zerosync_strategy.lightning", "zerosync_strategy.accelerate", "zerosync_strategy.racecheck")
                assert not name.startswith(above), f"{path.name} imports {name}"


def test_the_race_checker_imports_nothing_of_the_rest() -> None:
    for path in (SOURCE / "racecheck").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            module = (node.module or "") if isinstance(node, ast.ImportFrom) else ""
            ours = module.startswith("zerosync_strategy")
            assert not ours or module.startswith("zerosync_strategy.racecheck"), f"{path.name} imports {module}"


def test_the_frameworks_do_not_need_each_other() -> None:
    assert "lightning" not in loaded_after("from zerosync_strategy import ZeroSyncPlugin")[0]
    assert "accelerate" not in loaded_after("from zerosync_strategy import ZeroSyncStrategy")[0]


def test_every_public_name_can_be_had() -> None:
    names: dict[str, object] = {}
    exec("from zerosync_strategy import *", names)
    assert names.keys() >= set(zerosync_strategy.__all__) and zerosync_strategy.__version__
    assert not hasattr(zerosync_strategy, "nonsense")
