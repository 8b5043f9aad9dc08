"""The documentation: its links, its code, that the code runs, its figures, and that the reference is complete."""

import importlib.util
import inspect
import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

import pytest

import zerosync_strategy
from tests import promises
from zerosync_strategy import ZeroSync, ZeroSyncConfig

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
MAINTAINERS = (ROOT / "CONTRIBUTING.md", ROOT / "docs" / "map.md")
MADE = re.compile(r"<!-- (\w+): made by.*?<!-- end of the \1 -->", re.DOTALL)
"""A table in a page that a command makes."""
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


BESIDE = [page for folder in ("tests", "trials") for page in sorted((ROOT / folder).rglob("README.md"))]


@pytest.mark.parametrize("page", [*PAGES, *BESIDE], ids=lambda page: f"{page.parent.name}/{page.name}")
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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_is_in_a_list_is_indented_by_four(page: Path) -> None:
    """The site's Markdown takes two or three for the outer list, or for its end."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    assert re.findall(r"^ {1,3}[-*] .*|(?<=\n\n) {1,3}\S.*", text, flags=re.MULTILINE) == []
    assert re.findall(r"\n\n {4}[^\s-].*(?:\n {4}.*)*\n- .*", text) == []  # no blank line before the next item


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_name_tests_that_exist(page: Path) -> None:
    names = re.findall(r"`(?:tests/)?((?:\w+/)?test_\w+\.py)`", page.read_text())
    assert [name for name in names if not (ROOT / "tests" / name).exists()] == []


@pytest.mark.parametrize("page", MAINTAINERS, ids=lambda page: page.name)
def test_pages_for_maintainers_name_what_exists(page: Path) -> None:
    """In text and in pictures; of the package's files, the folder may be left out up to the room of core."""
    source = ROOT / "src" / "zerosync_strategy"
    text = MADE.sub("", page.read_text())
    pictures = [(page.parent / name).read_text() for name in re.findall(r"\(([\w/]+\.svg)\)", text)]
    names = set(re.findall(r"`([\w/]+(?:\.py|\.txt|\.toml|/))`", text)) | set(
        re.findall(r"[\w/]+\.py", "".join(pictures))
    )
    places = (ROOT, source, source / "core", source / "lightning")
    assert sorted(name for name in names if not any((place / name).exists() for place in places)) == []


def test_every_room_is_in_the_picture() -> None:
    core = ROOT / "src" / "zerosync_strategy" / "core"
    picture = (ROOT / "docs" / "pictures" / "rooms.svg").read_text()
    assert [path.parent.name for path in core.glob("*/__init__.py") if f">{path.parent.name}<" not in picture] == []


@pytest.mark.parametrize("name", ["rooms", "files"])
def test_rooms_and_files_are_those_of_the_package(name: str) -> None:
    made = runpy.run_path(str(ROOT / "docs" / "_site" / "rooms.py"))
    page = made["PAGES"][name].read_text()
    assert made["filled"](name, page) == page, "python docs/_site/rooms.py"
    rows = re.findall(r"^\| .*? \| (.*) \|$", made["tables"]()[name], flags=re.MULTILINE)
    assert [row for row in rows if not 2 <= len(row.split()) <= 25] == []  # a sentence that says something
    assert [test for tests in made["TESTS"].values() for test in tests if not (ROOT / "tests" / test).exists()] == []


def test_every_rule_has_a_test() -> None:
    """By the table at the end of docs/rules.md, whose tests exist."""
    page = promises.PAGE.read_text()
    assert promises.filled(page) == page, "python -m tests.promises"
    tests = promises.tests_of()
    assert [rule for rule, of_rule in tests.items() if not of_rule] == []
    for test in {test for of_rule in tests.values() for test in of_rule}:
        file, _, function = test.partition("::")
        text = (ROOT / "tests" / file).read_text()
        assert not function or re.search(rf"^def {function}\(", text, flags=re.MULTILINE), test
    written = "".join(path.read_text() for path in promises.PAGES)
    assert set(re.findall(r"\*\*([A-Z]\d)\*\* (?!\([\w ]*\) is gone)", written)) == tests.keys()


def test_every_option_is_in_the_table() -> None:
    table = re.findall(r"^\| `(\w+)` \|", (ROOT / "docs" / "options.md").read_text(), flags=re.MULTILINE)
    assert set(table) == {*ZeroSyncConfig.option_names(), "step_on"}


def test_what_is_public_is_said_in_one_place() -> None:
    """The modules in its list are there, and all that have names for programs; the commands are all of them."""
    page = (ROOT / "docs" / "compatibility.md").read_text()
    public = page.split("## What a new version may change", 1)[1].split("\n\nTexts of errors", 1)[0]
    of = dict(re.findall(r"^- \*(\w+)\*:? (.*?)[;.]$", public, flags=re.MULTILINE | re.DOTALL))
    package = ROOT / "src" / "zerosync_strategy"
    named = set(re.findall(r"`(?:zerosync_strategy)?\.([\w.]+)`", of["modules"]))
    paths = {name: package / name.replace(".", "/") for name in named}
    assert [name for name, path in paths.items() if not (path.is_dir() or path.with_suffix(".py").exists())] == []
    given = {path.parent.name for path in package.glob("*/__init__.py") if "__all__" in path.read_text()}
    assert given <= named
    commands = (package / "tools" / "commands.py").read_text()
    found = {"run", *re.findall(r"@app\.command\(.*\)\ndef (\w+)", commands)}
    assert found == set(re.findall(r"`(?:zerosync )?(\w+)`", of["commands"]))


def described() -> dict[str, set[str] | None]:
    """By the dotted name of a directive of the reference, the members that it is limited to."""
    text = (ROOT / "docs" / "api.md").read_text()
    directives = re.findall(r"^::: ([\w.]+)\n(?:    options: \{(.*)\})?", text, flags=re.MULTILINE)
    limits = {name: re.search(r"members: \[(.*?)\]", options) for name, options in directives}
    return {name: found and set(re.findall(r"\w+", found[1])) for name, found in limits.items()}


def test_every_public_name_is_in_the_reference() -> None:
    found = described()
    names = {f"zerosync_strategy.{name}" for name in zerosync_strategy.__all__ if name != "__version__"}
    assert names - found.keys() == set()


def test_every_member_of_the_handle_is_in_the_reference() -> None:
    found = described()
    assert found["zerosync_strategy.ZeroSync"] is None  # all of them
    public = {name: member for name, member in vars(ZeroSync).items() if not name.startswith("_")}
    assert [name for name, member in public.items() if not inspect.getdoc(member)] == []  # else the site leaves it out


def test_what_pages_tell_to_call_is_in_the_reference() -> None:
    found = described()
    text = "".join(page.read_text() for page in PAGES)
    members = {name.rpartition(".")[2]: limit for name, limit in found.items()}
    of_window = members["Window"]
    assert of_window is not None
    assert set(re.findall(r"\.window\.(\w+)\(", text)) - of_window == set()
    imported = re.findall(r"^from (zerosync_strategy[\w.]*) import ([\w, ]+)", text, flags=re.MULTILINE)
    names = {name for _, line in imported for name in line.split(", ")}
    assert names - members.keys() - {"accelerate"} - set().union(*(limit or () for limit in found.values())) == set()


def test_the_description_on_an_index_has_no_link_that_leads_nowhere() -> None:
    """Without the address of a repository it has none; with it, each is to a file that there is."""
    describe = runpy.run_path(str(ROOT / "docs" / "_site" / "description.py"))["description"]
    readme = (ROOT / "README.md").read_text()
    bare = describe(readme, "", "1.2.3")
    assert [target for target in re.findall(r"\]\(([^)]*)\)", bare) if "://" not in target] == []
    assert "silently compute wrong gradients: parameters" in bare and "![" not in bare
    full = describe(readme, "https://example.org/it/", "1.2.3")
    targets = re.findall(r"(!?)\[[^\]]+\]\(([^)]*)\)", full)
    assert len(targets) == len(re.findall(r"\]\(", readme)) and any(picture for picture, _ in targets)
    for picture, target in targets:
        base = f"https://example.org/it/{'raw' if picture else 'blob'}/v1.2.3/"
        assert target.startswith(base) and (ROOT / target.removeprefix(base).partition("#")[0]).exists(), target


SYSTEMS = (
    ("ddp",), ("fsdp2-2", "fsdp2-3"), ("stock-1", "stock-2", "stock-3"), ("coalesced-2", "coalesced-3"),
    ("zerosync-1", "zerosync-2"), ("zerosync-3",), ("zerosync-3-held",),
)  # fmt: skip
"""Of the rows of the table of all systems in docs/results.md."""


IN_README = {
    "ZeroSync, stage 2": ("zerosync-2", "zerosync-2"),
    "ZeroSync, stage 3": ("zerosync-3", "zerosync-3"),
    "DeepSpeed, stage 2": ("stock-2", "stock-2"),
    "DeepSpeed, stage 3": ("stock-3", "stock-3"),
    "FSDP2, parameters gathered again": ("fsdp2-3", "fsdp2"),
    "DDP (no sharding)": ("ddp", None),
}
"""The rows of its table: the system's name where steps were timed, and where the host's work was counted."""
NOT_COUNTED = ("mutants.md", "results.md", "map.md")
"""Pages that commands make, and the one that belongs to CONTRIBUTING.md."""


def _results(name: str) -> Any:
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())


def test_the_figures_in_readme_are_those_measured() -> None:
    """Each cell of its table, what is said below it, and that each file is linked there."""
    link = _results("2026-11-28-link-35m-all")["runs"][0]
    gpu = {row["system"]: row for row in _results("2026-11-26-gpu")["exposed"]["systems"]}
    host = {row["system"]: row for row in _results("2026-11-28-host-work")["runs"] if row["backwards"] == 4}
    readme = (ROOT / "README.md").read_text()
    table = readme.split("|---|---:|---:|---:|---:|---:|---:|\n")[1].split("\n\n")[0]
    rows = [line.replace("*", "").strip("| ").split(" | ") for line in table.splitlines()]
    assert [row[0] for row in rows] == [*IN_README]
    for name, *cells in rows:
        timed, counted = IN_README[name]
        system = link["systems"][timed]
        expected = [
            f"{1000 * median(system['seconds']):.0f}",
            f"{median(system['bytes_sent']) / link['floor_bytes']:.3f}",
            "reference" if timed == link["reference"] else f"{system['difference']:.0e}".replace("0e+00", "0"),
            f"{1000 * gpu[timed]['step']:.1f}",
            f"{host[counted]['python_calls']:,}" if counted else "not counted",
            f"{sum(host[counted]['collectives'].values()):,}" if counted else "not counted",
        ]
        assert cells == expected, name
    for file in ("2026-11-28-link-35m-all", "2026-11-26-gpu", "2026-11-28-host-work"):
        assert f"(benchmarks/results/{file}.md)" in readme


def test_the_documentation_stays_short() -> None:
    """What commands make does not count; CONTRIBUTING.md and the map have words of their own."""
    pages = sorted((ROOT / "docs").glob("*.md"))
    assert len(pages) <= 25
    counted = [ROOT / "README.md", *(page for page in pages if page.name not in NOT_COUNTED)]
    words = {page.name: len(MADE.sub("", page.read_text()).split()) for page in counted}
    assert sum(words.values()) <= 19_150, words
    assert words["README.md"] <= 740 and max(words.values()) <= 2_000, words


def test_contributing_is_read_in_ten_minutes() -> None:
    """With its table of rooms; the map beside it, for looking up, without its table of files."""
    contributing, page = (path.read_text() for path in MAINTAINERS)
    assert len(contributing.split()) <= 2_000
    assert len(contributing.split()) + len(MADE.sub("", page).split()) <= 2_900


def _words(name: str) -> str:
    return " ".join((ROOT / name).read_text().split())


def test_figures_are_those_measured() -> None:
    """What README and two pages say of one run is what its file has."""
    run = _results("2026-11-28-link-35m-all")["runs"][0]

    def value(name: str, column: int) -> float:
        system = run["systems"][name]
        sent = median(system["bytes_sent"])
        return (1000 * median(system["seconds"]), sent / 1e6, sent / run["floor_bytes"])[column]

    def faster(stock: str, ours: str) -> str:
        times = (run["systems"][name]["seconds"] for name in (stock, ours))
        return f"{median(before / after for before, after in zip(*times, strict=True)):.1f}"

    speeds = [faster("stock-2", "zerosync-2"), faster("stock-3", "zerosync-3")]
    for name in ("README.md", "docs/results.md", "docs/index.md"):
        text = _words(name)
        assert re.findall(r"(\d\.\d) times as fast as", text) == speeds, name
        assert name == "docs/index.md" or f"sent once, {run['floor_bytes'] / 1e6:.1f} MB" in text, name
    table = (ROOT / "docs" / "results.md").read_text().split("x minimum bytes |\n|---|---:|---:|---:|\n")[1]
    for systems, row in zip(SYSTEMS, table.split("\n\n")[0].splitlines(), strict=True):
        for column, cell in enumerate(row.replace("*", "").strip("| ").split(" | ")[1:]):
            for system, shown in zip(systems, cell.split(" / ") * len(systems), strict=False):
                places = len(shown.partition(".")[2])
                assert shown == f"{value(system, column):.{places}f}", (system, column)


def test_every_figure_has_its_file() -> None:
    """The index has each result, each with the command that has made it, and each page that refers to it."""
    folder = ROOT / "benchmarks" / "results"
    row = re.compile(r"^\| [^|]+ \| ([^|]*) \| \[[^\]]+\]\(([^)]+)\) \|$", re.MULTILINE)
    rows = row.findall((folder / "README.md").read_text())
    files = {each.name for each in folder.glob("*.md")} - {"README.md"}
    assert {file for _, file in rows} == files
    assert [each for each in folder.glob("*.json") if f"{each.stem}.md" not in files] == []
    said = {(page, file) for pages, file in rows for page in re.findall(r"\w+(?:/\w+)*\.md", pages)}
    linked = set()
    for page in (*PAGES, ROOT / "CHANGELOG.md", ROOT / "benchmarks" / "README.md"):
        for file in re.findall(r"results/(2026[\w-]+\.md)", page.read_text()):
            linked.add((str(page.relative_to(ROOT)), file))
    assert said == linked
    for _, file in rows:
        text = (folder / file).read_text()
        assert re.search(r"python benchmarks/\w+\.py|zerosync plan |make gpu ", text), file
        assert re.match(r"\d{4}-\d\d-\d\d-", file) and "torch 2." in text, file


def test_every_program_is_run() -> None:
    assert {path.name for path in (ROOT / "docs" / "code").glob("*.py")} == PROGRAMS.keys()


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_run(name: str) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, *PROGRAMS[name], f"docs/code/{name}"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
