"""The patches for other projects (``upstream/``): they are what ``docs/upstream.md`` says, and apply."""

import importlib
import importlib.util
import re
import shutil
import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent
FOLDER, PAGE = ROOT / "upstream", (ROOT / "docs" / "upstream.md").read_text()
PATCHES = sorted(FOLDER.glob("*.patch"))
HUNK = re.compile(r"^@@ -\d+(?:,(\d+))? \+\d+(?:,(\d+))? @@")
# By project: the package that is installed, the distribution, and the folders of its tree above the package.
TREES = {
    "deepspeed": ("deepspeed", "deepspeed", 0),
    "lightning": ("lightning", "lightning", 1),
    "accelerate": ("accelerate", "accelerate", 1),
}


@pytest.fixture(scope="module")
def replaced() -> ModuleType:
    spec = importlib.util.spec_from_file_location("replaced", FOLDER / "replaced.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["replaced"] = module
    spec.loader.exec_module(module)
    return module


def changes(patch: Path) -> dict[str, tuple[int, int]]:
    """By file, how many lines a patch adds and removes; its hunks are as long as they say."""
    found: dict[str, tuple[int, int]] = {}
    name, left = "", [0, 0]
    for line in patch.read_text().splitlines():
        if any(left):
            assert line[:1] in (" ", "+", "-"), line
            left[0] -= line[:1] != "+"
            left[1] -= line[:1] != "-"
            added, removed = found[name]
            found[name] = added + (line[:1] == "+"), removed + (line[:1] == "-")
        elif line.startswith("+++ b/"):
            name = line.removeprefix("+++ b/")
            found[name] = (0, 0)
        elif hunk := HUNK.match(line):
            left = [int(count or 1) for count in hunk.groups()]
        else:
            assert line.startswith(("diff --git", "index ", "--- a/")), line
    assert not any(left)
    return found


def rows_of_page() -> dict[str, list[str]]:
    """The tables of the page, by the patch in the first column."""
    rows = re.findall(r"^\| `([\w-]+)\.patch` \|(.*)\|$", PAGE, re.MULTILINE)
    return {name: [cell.strip() for cell in rest.split("|")] for name, rest in rows}


def test_the_page_has_every_patch_and_no_other() -> None:
    assert rows_of_page().keys() == {patch.stem for patch in PATCHES} and len(PATCHES) > 5


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.stem)
def test_a_patch_touches_what_the_page_says(patch: Path) -> None:
    touched = changes(patch)
    files, lines = rows_of_page()[patch.stem][:2]
    assert re.findall(r"`(\w+\.py)`", files) == [Path(name).name for name in touched]
    added, removed = (sum(column) for column in zip(*touched.values(), strict=True))
    assert lines == f"+{added} -{removed}"
    assert added < 100


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.stem)
def test_a_patch_applies_to_the_release_that_is_pinned(patch: Path) -> None:
    package, name, above = TREES[patch.stem.partition("-")[0]]
    pinned = re.search(rf"^{name}==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned is not None and f"{pinned[1]}" in PAGE
    installed = distribution(name).version
    if installed.partition("+")[0] != pinned[1]:
        pytest.skip(f"{name} {installed} is installed, {pinned[1]} is pinned")
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.submodule_search_locations is not None
    root = Path(next(iter(spec.submodule_search_locations))).parent
    check = subprocess.run(
        ["git", "apply", "--check", f"-p{1 + above}", str(patch)],
        cwd=root, env={"GIT_CEILING_DIRECTORIES": "/", "GIT_DIR": "/nonexistent", "PATH": "/usr/bin:/bin"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert check.returncode == 0, check.stderr


def test_what_a_hook_replaces_is_there(replaced: ModuleType) -> None:
    places = {place for of_patch in replaced.REPLACED.values() for place in of_patch}
    assert places - replaced.declared() == set()
    assert replaced.REPLACED.keys() == {patch.stem for patch in PATCHES if "muon" not in patch.stem}


def test_the_rows_that_go_are_those_of_the_page(replaced: ModuleType) -> None:
    page = rows_of_page()
    for name in replaced.REPLACED:
        gone = replaced.rows_that_go([name])
        assert gone, name
        assert page[name][2:4] == [str(len(gone)), str(len(replaced.overrides([name])))], name
    for project in replaced.TABLES:
        names = [name for name in replaced.REPLACED if replaced.project_of(name) == project]
        assert f"{project}: {len(replaced.rows_that_go(names))} rows go" in PAGE


def test_a_name_that_is_used_elsewhere_stays(replaced: ModuleType) -> None:
    """The count is of names that nothing else in the package uses: an override alone does not free its row."""
    gone = {row.name for row in replaced.rows_that_go(["deepspeed-reduction-hook"])}
    assert "process_gradients" in gone and "_get_norm_groups" not in gone  # DeepSpeed's own norm is asked for, too
    every = {row.name for row in replaced.rows("DeepSpeed")}
    assert gone < every and "step" not in gone
