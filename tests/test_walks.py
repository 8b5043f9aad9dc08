"""The walks of CONTRIBUTING.md are those of a real step, and their pictures are drawn from them."""

import html
import importlib.util
import re
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.harness import engines
from tests.harness.ranks import run_ranks
from zerosync_strategy import attach, prepare_cpu
from zerosync_strategy.core.attached import engine as attached_engine
from zerosync_strategy.core.engine.parameter import TRANSITIONS, Claim, State
from zerosync_strategy.core.optimizer import masters

pytestmark = pytest.mark.off_device("what is called is the same there")

ROOT = Path(__file__).parent.parent
PICTURES = ROOT / "docs" / "pictures"
WIDTH, LAYERS = 8, 6


def of_site(name: str) -> Any:
    """A module of docs/_site."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / "_site" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


walks = of_site("walks")
pictures = of_site("pictures")


class Calls:
    """The functions of core/ that are called while it records, in the order of their first calls, and how often."""

    def __init__(self) -> None:
        self.count: Counter[tuple[str, str]] = Counter()
        self._core = f"{walks.SOURCE / 'core'}/"

    def __enter__(self) -> None:
        sys.setprofile(self._see)

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _see(self, frame: Any, event: str, _: Any) -> None:
        if event == "call" and (path := frame.f_code.co_filename).startswith(self._core):
            file = path.removeprefix(self._core)
            name = walks.functions_of(file).get(frame.f_code.co_firstlineno)
            if name is not None:  # else a lambda, or a comprehension
                self.count[file, name] += 1


def make_engine(stage: int) -> Any:
    """As the first of two ranks on torch's fake process group, which takes every collective and moves nothing."""
    prepare_cpu()
    masters.STEP_NUMEL = WIDTH
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    block = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)) for _ in range(LAYERS // 2)]
    model = nn.Sequential(*block)
    zero = {
        "stage": stage, "stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0,
        "reduce_bucket_size": WIDTH * (WIDTH + 1),
    }  # fmt: skip
    return engines.make_engine(model, torch.optim.AdamW(model.parameters(), lr=1e-3), zero=zero)


def backward(engine: Any) -> None:
    engine.backward(engine(torch.ones(1, WIDTH)).square().mean())


def calls_of(program: Callable[[Calls], None]) -> Counter[tuple[str, str]]:
    """What ``program`` records in a process of its own."""

    def run() -> Any:
        calls = Calls()
        program(calls)
        return calls.count

    (found,) = run_ranks(run, world_size=1)
    return found


def window_of(stage: int) -> Counter[tuple[str, str]]:
    """Two backwards and a step, after such a window has gone before."""

    def program(calls: Calls) -> None:
        engine = make_engine(stage)
        attach(engine, overlap_last=False)
        for _ in range(2):
            backward(engine)
        engine.step()
        with calls:
            for _ in range(2):
                backward(engine)
            engine.step()

    return calls_of(program)


def attach_and_backward() -> Counter[tuple[str, str]]:
    def program(calls: Calls) -> None:
        engine = make_engine(2)
        with calls:
            attach(engine, coalesce=False)
            backward(engine)

    return calls_of(program)


def on_stage_3(stations: Sequence[Any]) -> list[tuple[str, str]]:
    places = [walks.ON_STAGE_3.get(each[:2], each[:2]) for each in stations]
    return [place for place in places if place is not None]


def hold(stations: Sequence[tuple[Any, ...]], calls: Counter[tuple[str, str]]) -> None:
    """Each station is called, and first after the one before it."""
    walk, reached = [each[:2] for each in stations], list(calls)
    assert [place for place in walk if place not in calls] == [], "never called"
    assert sorted(walk, key=reached.index) == walk, "first calls come in another order: docs/_site/walks.py"


def test_a_gradient_on_stages_1_and_2() -> None:
    hold(walks.GRADIENT, window_of(2))


def test_a_gradient_and_a_unit_on_stage_3() -> None:
    calls = window_of(3)
    hold(on_stage_3(walks.GRADIENT), calls)
    hold(walks.UNIT, calls)


def test_an_option() -> None:
    hold(walks.OPTION, attach_and_backward())


def warm_step(engine: Any, calls: Calls) -> None:
    """The fourth step, whose calls are counted."""
    for _ in range(3):
        backward(engine)
        engine.step()
    with calls:
        backward(engine)
        engine.step()


def test_the_timeline_of_a_step() -> None:
    """The table of ``attached/engine.py``, on stage 2. The program does nothing."""
    rows = re.findall(r"``(\w+)\.(\w+)``", str(attached_engine.__doc__))
    classes = {"Stage": "(Flat)?Stage", "StepObserver": "UnitNorms"}

    def program(calls: Calls) -> None:
        attach(engine := make_engine(2), unit_norms=True)
        warm_step(engine, calls)

    called = [name for _, name in calls_of(program)]
    reached = [
        next(place for place, each in enumerate(called) if re.fullmatch(rf"{classes.get(of, of)}\.{name}", each))
        for of, name in rows
    ]
    assert len(rows) == 8 and reached == sorted(reached), [called[place] for place in reached]


def test_what_is_no_walk() -> None:
    calls = Counter({("a.py", "first"): 1, ("b.py", "second"): 2})
    hold([("a.py", "first"), ("b.py", "second")], calls)
    with pytest.raises(AssertionError):
        hold([("b.py", "second"), ("a.py", "first")], calls)
    with pytest.raises(AssertionError, match="never called"):
        hold([("a.py", "first"), ("a.py", "another")], calls)


def test_a_gradient_that_is_added_to_costs_one_call() -> None:
    """H6: in a second backward, the hook of each parameter, which calls nothing."""

    def program(calls: Calls) -> None:
        engine = make_engine(2)
        attach(engine, overlap_last=False)
        backward(engine)
        with calls:
            backward(engine)

    calls = calls_of(program)
    assert calls["gradients/window.py", "Window.added"] == 2 * LAYERS
    assert [name for name, count in calls.items() if count >= 2 * LAYERS] == [("gradients/window.py", "Window.added")]


LENGTHS = {"stage 2": (209, 28), "stage 3": (278, 43), "stage 3, held": (265, 43)}
"""How many functions and files of ours a step goes through at most. A change may make the way shorter."""


@pytest.mark.parametrize("kind", LENGTHS)
def test_the_way_through_a_step_is_no_longer(kind: str) -> None:
    """A warm one: forward, backward and step, by default. CONTRIBUTING.md says the lengths."""

    def program(calls: Calls) -> None:
        engine = make_engine(int(kind.split()[1].strip(",")))
        attach(engine, **({"param_memory_budget": "all"} if "held" in kind else {}))
        warm_step(engine, calls)

    calls = calls_of(program)
    functions, files = len(calls), len({file for file, _ in calls})
    assert functions <= LENGTHS[kind][0] and files <= LENGTHS[kind][1], (functions, files)
    said = " ".join((ROOT / "CONTRIBUTING.md").read_text().split())
    assert f"{kind}: {LENGTHS[kind][0]} functions in {LENGTHS[kind][1]} files" in said


@pytest.mark.parametrize("walk", ["GRADIENT", "UNIT", "OPTION"])
def test_stations_exist(walk: str) -> None:
    """Without a run, and on any release of DeepSpeed."""
    places = [each[:2] for each in getattr(walks, walk)] + [place for place in walks.ON_STAGE_3.values() if place]
    assert [place for place in places if place[1] not in walks.functions_of(place[0]).values()] == []


def test_the_states_in_the_picture_are_those_of_the_table() -> None:
    """The docstring has the table that the code goes by."""
    shown = walks.transitions()
    assert {event.name: [*row] for event, row in TRANSITIONS.items()} == {
        event: [State[state] for state in row] for event, row in shown.items()
    }
    for event, row in TRANSITIONS.items():
        for before, after in row.items():
            cell = shown[event.name][before.name].partition(";")[0]
            expected = "error" if isinstance(after, str) else "stay" if after is before else f"-> {after.name}"
            assert cell.removeprefix("waits: ") == expected, (event, before)
    assert list(walks.members("State")) == State._member_names_
    assert list(walks.members("Claim")) == Claim._member_names_


def test_pictures_are_as_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures, "OUT", tmp_path)
    pictures.draw_all()
    drawn, there = ({path.name: path.read_text() for path in of.glob("*.svg")} for of in (tmp_path, PICTURES))
    assert drawn == there, "python docs/_site/pictures.py"


@pytest.mark.parametrize("name", ["gradient", "unit", "option", "parameter", "rooms"])
def test_no_text_lies_on_another(name: str) -> None:
    """Taken as wide as in a wide font."""
    picture = (PICTURES / f"{name}.svg").read_text()
    width, height = map(int, re.findall(r'viewBox="0 0 (\d+) (\d+)"', picture)[0])
    boxes = []
    for x, y, kind, anchor, text in re.findall(
        r'<text x="(.*?)" y="(.*?)" class="(.*?)" text-anchor="(\w+)">(.*?)<', picture
    ):
        size = 12 if "small" in kind else 14
        wide = 0.56 * size * len(html.unescape(text))
        left = float(x) - wide * {"start": 0, "middle": 0.5, "end": 1}[anchor]
        boxes.append((left, float(y) - size, left + wide, float(y) + 2, text))
    for left, top, right, bottom, text in boxes:
        assert left >= 0 and right <= width and top >= 0 and bottom <= height, text
        for other in boxes:
            apart = other[0] >= right or other[2] <= left or other[1] >= bottom or other[3] <= top
            assert apart or other == (left, top, right, bottom, text), (text, other[4])
