"""The state table of core/window.py, with a reducer that only writes down what it is asked for."""

import warnings
from collections.abc import Callable

import pytest
import torch

from zerosync_strategy.core.window import Window, WindowState

CLOSED, OPEN, REDUCED = WindowState.CLOSED, WindowState.OPEN, WindowState.REDUCED


class Notes:
    """Stands in for a Reducer."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.fail = False

    def reduce(self, *, first: bool, final: bool) -> None:
        if self.fail:
            raise OSError("connection lost")
        self.calls.append("reduce" + " first" * first + " final" * final)

    def local_bytes(self) -> int:
        return 8

    def __getattr__(self, name: str) -> Callable[[], None]:
        return lambda: self.calls.append(name)


def make(state: WindowState, coalesce: bool = True) -> tuple[Window, Notes]:
    notes = Notes()
    window = Window(notes, coalesce)  # type: ignore[arg-type]
    if state is not CLOSED:
        backward(window)
    if state is REDUCED:
        window.reduce()
    notes.calls.clear()
    assert window.state is state
    return window, notes


def backward(window: Window) -> None:
    with window.engine_backward():
        pass
    window.backward_done()


@pytest.mark.parametrize(
    ("state", "event", "after", "calls"),
    [
        (CLOSED, backward, OPEN, []),
        (CLOSED, Window.reduce, CLOSED, []),
        (CLOSED, Window.reduce_early, CLOSED, []),
        (CLOSED, Window.zero_grad, CLOSED, []),
        (OPEN, backward, OPEN, []),
        (OPEN, Window.reduce, REDUCED, ["reduce first final"]),
        (OPEN, Window.reduce_early, OPEN, ["reduce first"]),
        (OPEN, Window.begin_step, CLOSED, ["reduce first final"]),
        (OPEN, Window.zero_grad, OPEN, ["drop", "discard"]),
        (REDUCED, Window.reduce, REDUCED, []),
        (REDUCED, Window.reduce_early, REDUCED, []),
        (REDUCED, Window.begin_step, CLOSED, []),
        (REDUCED, Window.zero_grad, OPEN, ["drop", "discard"]),
    ],
)
def test_transition(state: WindowState, event: Callable[[Window], None], after: WindowState, calls: list[str]) -> None:
    window, notes = make(state)
    event(window)
    assert (window.state, notes.calls) == (after, calls)


@pytest.mark.parametrize("state", WindowState)
def test_abort_sends_nothing_and_says_so(state: WindowState) -> None:
    window, notes = make(state)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        window.abort("a reason")
    assert (window.state, notes.calls) == (CLOSED, [] if state is CLOSED else ["reset"])
    assert ["1 backward(s)" in str(w.message) and "a reason" in str(w.message) for w in caught] == (
        [] if state is CLOSED else [True]
    )
    assert window.backwards == 0


def test_errors() -> None:
    window, _ = make(REDUCED)
    with pytest.raises(RuntimeError, match="between the reduction of the gradients and the optimizer step"):
        backward(window)
    window, _ = make(CLOSED)
    with pytest.raises(RuntimeError, match="no backward ran since the last optimizer step"):
        window.begin_step()


def test_failed_backward_and_failed_reduction_drop_the_window() -> None:
    window, notes = make(OPEN)
    expected = pytest.warns(UserWarning, match=r"2 backward\(s\).*backward raised ValueError")
    with expected, pytest.raises(ValueError), window.engine_backward():
        raise ValueError
    assert (window.state, notes.calls) == (CLOSED, ["reset"])
    with pytest.raises(RuntimeError, match="The last window was dropped: backward raised ValueError"):
        window.begin_step()

    window, notes = make(OPEN)
    notes.fail = True
    with pytest.warns(UserWarning, match="the reduction raised OSError"), pytest.raises(OSError):
        window.reduce()
    assert (window.state, notes.calls) == (CLOSED, ["reset"])


def test_without_coalescing_each_backward_reduces_once() -> None:
    window, notes = make(CLOSED, coalesce=False)
    backward(window)
    backward(window)
    window.begin_step()
    assert notes.calls == ["reduce first", "reduce", "finalize"]
    assert (window.backwards, window.reductions) == (2, 2)
    window.end_step()
    assert (window.backwards, window.reductions) == (0, 0)


def test_zero_grad_restarts_the_partition() -> None:
    window, notes = make(CLOSED, coalesce=False)
    backward(window)
    window.zero_grad()
    backward(window)
    assert notes.calls == ["reduce first", "drop", "discard", "reduce first"]
    window, notes = make(OPEN)
    window.zero_grad()
    window.begin_step()  # all gradients are zero: every rank reduces zeros, none is left waiting
    assert notes.calls == ["drop", "discard", "reduce first final"]


@torch.enable_grad()
def raw_backward(window: Window, *inner: Callable[[], None], fail: bool = False) -> None:
    x = torch.ones(2, requires_grad=True)
    y = x * 2

    def hook(_: torch.Tensor) -> None:
        window.inside_graph()
        for run in inner:
            run()
        if fail:
            raise ValueError

    y.register_hook(hook)
    x.register_hook(lambda _: window.inside_graph())  # type: ignore[no-untyped-call]
    y.sum().backward()


def test_a_raw_backward_is_counted_once_with_those_inside_it() -> None:
    window, _ = make(CLOSED)
    raw_backward(window)
    assert (window.state, window.backwards) == (OPEN, 1)
    raw_backward(window, lambda: raw_backward(window), lambda: backward(window))
    assert window.backwards == 2
    with window.engine_backward():
        raw_backward(window)
    assert window.backwards == 3


def test_a_raw_backward_that_failed_hides_no_later_one() -> None:
    window, _ = make(CLOSED)
    with pytest.raises(ValueError):
        raw_backward(window, fail=True)
    window.zero_grad()
    raw_backward(window)
    assert window.backwards == 2
