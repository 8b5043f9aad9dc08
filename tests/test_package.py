"""What importing loads, and which way imports run."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import zerosync_strategy

SOURCE = Path(zerosync_strategy.__file__).parent


def loaded_after(*statements: str) -> list[set[str]]:
    """The packages that a new interpreter has loaded after each of the statements."""
    code = "import sys\n"
    for statement in statements:
        code += f"{statement}\nprint(*{{name.split('.')[0] for name in sys.modules}})\n"
    lines = subprocess.check_output([sys.executable, "-c", code], text=True).splitlines()
    return [set(line.split()) for line in lines]


LOADED = "import sys; print('>', *{name.split('.')[0] for name in sys.modules})"


def printed_after(*statements: str) -> list[list[str]]:
    """The words of what each prints after a ``>``, in forks of a new interpreter that has what most of them load."""
    code = f"""import os, sys, torch._dynamo, torchmetrics
for statement in {statements!r}:
    if not (fork := os.fork()):
        exec(statement)
        sys.exit()
    if os.waitpid(fork, 0)[1]:
        sys.exit(f"failed: {{statement}}")
"""
    lines = subprocess.check_output([sys.executable, "-c", code], text=True).splitlines()
    return [line.split()[1:] for line in lines if line.startswith(">")]


def import_graph(folder: Path, root: Path = SOURCE.parent) -> dict[str, set[str]]:
    """The modules under `folder`, each with those of them that it imports, anywhere in its file.

    `root` is the folder from which module names start. That a module loads the packages that it is in does not count.
    """
    files = {}
    for path in folder.rglob("*.py"):
        parts = path.relative_to(root).with_suffix("").parts
        files[".".join(parts[:-1] if path.name == "__init__.py" else parts)] = path
    graph: dict[str, set[str]] = {}
    for module, path in files.items():
        package = module if path.name == "__init__.py" else module.rpartition(".")[0]
        names = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
                source = ".".join([*above, *([node.module] if node.module else [])])
                inside = {f"{source}.{alias.name}" for alias in node.names}
                names |= {name if name in files else source for name in inside}
        graph[module] = names & files.keys()
    return graph


def cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Groups of modules that import one another, directly or through others."""

    def reachable(module: str) -> set[str]:
        seen: set[str] = set()
        pending = [module]
        while pending:
            new = graph[pending.pop()] - seen
            seen |= new
            pending += new
        return seen

    reach = {module: reachable(module) for module in graph}
    groups = {frozenset(other for other in reach[module] if module in reach[other]) for module in graph}
    return sorted(sorted(group) for group in groups if group)


def test_importing_the_package_loads_no_framework() -> None:
    heavy = {"torch", "deepspeed", "lightning", "accelerate", "pytorch_lightning", "lightning_fabric"}
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
                above = ("zerosync_strategy.lightning", "zerosync_strategy.accelerate")
                assert not name.startswith(above), f"{path.name} imports {name}"


def test_no_modules_import_one_another() -> None:
    assert cycles(import_graph(SOURCE)) == []


ROOMS = {  # each with those that it may import; any of them may import the options, which import nothing
    "engine": set(),
    "comm": {"engine"},
    "failures": {"engine", "comm"},
    "gradients": {"engine", "comm", "failures"},
    "params": {"engine", "comm", "failures"},
    "checkpoints": {"engine", "comm", "failures"},
    "optimizer": {"engine", "comm", "failures", "gradients"},
}
ABOVE_THE_ROOMS = {"attached"}  # imports all of them


def test_rooms_of_the_core_import_one_way() -> None:
    core = "zerosync_strategy.core."
    graph = import_graph(SOURCE / "core")
    assert {
        room.name for room in (SOURCE / "core").iterdir() if (room / "__init__.py").exists()
    } == ROOMS.keys() | ABOVE_THE_ROOMS
    for room, below in ROOMS.items():
        for module, imported in graph.items():
            if module.startswith(f"{core}{room}."):
                allowed = tuple(f"{core}{name}" for name in (f"{room}.", "options", *(f"{other}." for other in below)))
                assert [name for name in imported if not name.startswith(allowed)] == [], module
    assert graph[f"{core}options"] == set()


def test_the_import_graph_has_every_import(tmp_path: Path) -> None:
    files = {
        "__init__.py": "from p.a import name",
        "a.py": "import torch\nfrom typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from p import b, name",
        "b.py": "def f():\n    import p.sub.c",
        "sub/__init__.py": "",
        "sub/c.py": "from .. import b\nfrom . import d\nfrom ..sub.d import name",
        "sub/d.py": "",
    }
    for name, text in files.items():
        path = tmp_path / "p" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    graph = import_graph(tmp_path / "p", tmp_path)
    assert graph == {
        "p": {"p.a"}, "p.a": {"p", "p.b"}, "p.b": {"p.sub.c"},
        "p.sub": set(), "p.sub.c": {"p.b", "p.sub.d"}, "p.sub.d": set(),
    }  # fmt: skip
    assert cycles(graph) == [["p", "p.a"], ["p.b", "p.sub.c"]]
    assert cycles(import_graph(tmp_path / "p" / "sub", tmp_path)) == []


FRAMEWORKS = {  # each with what it may load of Lightning's and Accelerate's packages
    "lightning": {"lightning"},
    "fabric": {"lightning"},
    "pytorch_lightning": {"pytorch_lightning", "lightning_fabric"},
    "lightning_fabric": {"lightning_fabric"},
    "accelerate": {"accelerate"},
}


@pytest.mark.extended
def test_a_framework_needs_no_other() -> None:
    packages = {package for loaded in FRAMEWORKS.values() for package in loaded}
    none, *loaded = printed_after(LOADED, *(f"import zerosync_strategy.{name}; {LOADED}" for name in FRAMEWORKS))
    assert not packages.intersection(none)
    assert [packages.intersection(of_one) for of_one in loaded] == list(FRAMEWORKS.values())


def test_frameworks_do_not_import_each_other() -> None:
    for module, imported in import_graph(SOURCE).items():
        of_frameworks = {each.split(".")[1] for each in (module, *imported) if each.count(".")} & FRAMEWORKS.keys()
        assert len(of_frameworks) <= 1 or module == "zerosync_strategy", module


# What the frontends import of the core beside `frontend.py`: options, and what their own tables and files need.
FACADE = {"options", "engine.contract", "engine.patches"}


def test_frameworks_see_three_modules_of_the_core() -> None:
    core = "zerosync_strategy.core."
    seen = set()
    for module, imported in import_graph(SOURCE).items():
        if module.split(".")[1:2] and module.split(".")[1] in FRAMEWORKS:
            seen |= {name.removeprefix(core) for name in imported if name.startswith(core)}
    assert seen == FACADE


@pytest.mark.parametrize(("files", "binding"), [("lightning", "pytorch_lightning"), ("fabric", "lightning_fabric")])
def test_files_that_run_for_two_packages_name_neither(files: str, binding: str) -> None:
    """All but `library.py`, of which each has its own with the same names, and `__init__.py`."""
    names = []
    for folder in (files, binding):
        tree = ast.parse((SOURCE / folder / "library.py").read_text())
        names.append(
            {alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names}
        )
    assert names[0] == names[1]
    assert {path.name for path in (SOURCE / binding).glob("*.py")} == {"__init__.py", "library.py"}
    for path in (SOURCE / files).glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if path.name != "library.py" and isinstance(node, ast.ImportFrom) and not node.level:
                ours = f"zerosync_strategy.{files}"
                assert (node.module or "").split(".")[0] not in ("lightning", binding), path.name
                assert not (node.module or "").startswith(ours), f"{path.name}: import siblings relatively"


@pytest.mark.extended
def test_the_lightning_that_is_in_use_is_served() -> None:
    """By the names of the top package."""
    cases = {
        "import pytorch_lightning": "pytorch_lightning",
        "import lightning.pytorch": "lightning",
        "import sys; sys.modules['lightning'] = None": "pytorch_lightning",  # as if it were not installed
    }
    served = "import zerosync_strategy as z; print('>', z.ZeroSyncStrategy.__module__.split('.')[1])"
    assert printed_after(*(f"{first}; {served}" for first in cases)) == [[expected] for expected in cases.values()]


def test_the_command_says_the_version() -> None:
    said = subprocess.check_output(
        [sys.executable, "-c", "from zerosync_strategy.tools import cli; cli.main(['--version'])"]
    )
    assert said.decode() == f"zerosync {zerosync_strategy.__version__}\n"


TOOLS = "zerosync_strategy.tools"
DOORS = {f"zerosync_strategy.{name}" for name in ("__main__", "planning")}


def test_tools_use_core_and_nothing_uses_tools() -> None:
    """Neither by an import, nor by name. The doors are the user's."""
    for module, imported in import_graph(SOURCE).items():
        if not module.startswith(TOOLS) and module not in DOORS:
            assert [name for name in imported if name.startswith(TOOLS) or name in DOORS] == [], module
    named = set()
    for path in SOURCE.rglob("*.py"):
        if SOURCE / "tools" not in path.parents:
            texts = (node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant))
            named |= {text for text in texts if isinstance(text, str) and text.startswith(TOOLS)}
    assert named == set()


def test_the_command_loads_nothing_heavy() -> None:
    (loaded,) = loaded_after(f"import {TOOLS}.commands")
    assert not loaded & {"torch", "deepspeed", "lightning", "accelerate", "matplotlib"}


def test_every_public_name_can_be_had() -> None:
    names: dict[str, object] = {}
    exec("from zerosync_strategy import *", names)
    assert names.keys() >= set(zerosync_strategy.__all__) and zerosync_strategy.__version__
    assert not hasattr(zerosync_strategy, "nonsense")
