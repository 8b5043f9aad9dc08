"""The state table of gradients/window.py, with a reducer that only writes down what it is asked for."""

import contextlib
import warnings
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from zerosync_strategy.core.gradients.counts import LastBackward
from zerosync_strategy.core.gradients.window import Window, WindowState

CLOSED, OPEN, REDUCED = WindowState.CLOSED, WindowState.OPEN, WindowState.REDUCED


class Notes:
    """Stands in for a Reducer. What a backward streams, and what it leaves to reduce, are set by the test."""

    pipeline = SimpleNamespace(begun=None)

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.fail = False
        self.streams = False
        self.keeps_some = True
        self.needs_reduce = self._left = False

    def begin_backward(self, last: bool, first_uses: object, ready: object) -> None:
        self.calls.append("begin" + " last" * last)
        self.needs_reduce = True

    def end_backward(self) -> bool:
        if self.streams and self.needs_reduce:
            self.calls.append("stream")
            self.needs_reduce = False
            return True
        return False

    def reduce(self, every: bool) -> None:
        if self.fail:
            raise OSError("connection lost")
        self.calls.append("reduce")
        self.needs_reduce = False

    def settle(self, last: LastBackward) -> None:
        self._left = self.needs_reduce

    def agrees(self, last: LastBackward) -> bool:
        return True

    def hear(self, last: LastBackward) -> bool:
        return self._left

    def share_left(self) -> None:
        self.calls.append("again")

    def drop(self) -> None:
        self.calls.append("drop")
        self.needs_reduce = False

    def __getattr__(self, name: str) -> Callable[[], None]:
        return lambda: self.calls.append(name)


def new_window(notes: Notes, overlap_last: bool = True) -> Window:
    last = LastBackward(overlap_last, None)
    return Window(notes, last, lambda what: contextlib.nullcontext())  # type: ignore[arg-type]


def begin_step(window: Window) -> None:
    with window.closing():
        pass


def make(state: WindowState, streams: bool = False) -> tuple[Window, Notes]:
    notes = Notes()
    notes.streams, notes.keeps_some = streams, not streams
    window = new_window(notes)
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


@pytest.mark.parametrize(
    ("state", "event", "after", "calls"),
    [
        (CLOSED, backward, OPEN, ["begin"]),
        (CLOSED, Window.reduce, CLOSED, []),
        (CLOSED, Window.zero_grad, CLOSED, []),
        (OPEN, backward, OPEN, ["begin"]),
        (OPEN, Window.reduce, REDUCED, ["reduce", "close"]),
        (OPEN, begin_step, CLOSED, ["reduce", "close"]),
        (OPEN, Window.zero_grad, OPEN, ["drop"]),
        (REDUCED, Window.reduce, REDUCED, []),
        (REDUCED, begin_step, CLOSED, []),
        (REDUCED, Window.zero_grad, OPEN, ["drop"]),
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
        begin_step(window)


def test_failed_backward_and_failed_reduction_drop_the_window() -> None:
    window, notes = make(OPEN)
    expected = pytest.warns(UserWarning, match=r"2 backward\(s\).*backward raised ValueError")
    with expected, pytest.raises(ValueError), window.engine_backward():
        raise ValueError
    assert (window.state, notes.calls) == (CLOSED, ["begin", "interrupted", "reset"])
    with pytest.raises(RuntimeError, match="The last window was dropped: backward raised ValueError"):
        begin_step(window)

    window, notes = make(OPEN)
    notes.fail = True
    with pytest.warns(UserWarning, match="the reduction raised OSError"), pytest.raises(OSError):
        window.reduce()
    assert (window.state, notes.calls) == (CLOSED, ["interrupted", "reset"])


def test_what_a_backward_streams_is_not_sent_again() -> None:
    window, notes = make(CLOSED, streams=True)
    backward(window)
    backward(window)
    begin_step(window)
    assert notes.calls == ["begin", "stream", "begin", "stream", "close"]
    assert (window.backwards, window.reductions, window.early_reductions) == (2, 2, 2)
    window.end_step()
    assert (window.backwards, window.reductions) == (0, 0)


def test_a_promise_holds_for_one_backward_of_one_window() -> None:
    window, notes = make(CLOSED)
    window.expect_last()
    backward(window)
    backward(window)  # the promise was wrong
    window.expect_last()
    begin_step(window)
    window.end_step()
    backward(window)
    assert notes.calls == ["begin last", "begin", "again", "reduce", "close", "reset_counts", "begin"]

    window = new_window(notes := Notes(), overlap_last=False)
    window.expect_last()
    backward(window)
    assert notes.calls == ["begin"]


@pytest.mark.parametrize("backwards", [1, 2])
def test_a_wrong_promise_costs_a_reduction(backwards: int) -> None:
    window, _ = make(CLOSED, streams=True)
    window.expect_last()
    for _ in range(backwards):
        backward(window)
    begin_step(window)
    assert (window.reductions, window.early_reductions) == (backwards, backwards)


def test_after_zero_grad_zeros_are_sent() -> None:
    window, notes = make(OPEN)
    window.zero_grad()
    begin_step(window)  # other ranks may have gradients
    assert notes.calls == ["drop", "reduce", "close"]


@torch.enable_grad()
def raw_backward(window: Window, *inner: Callable[[], None], fail: bool = False) -> None:
    x = torch.ones(2, requires_grad=True)
    y = x * 2

    def hook(_: torch.Tensor) -> None:
        window.enter_graph()
        for run in inner:
            run()
        if fail:
            raise ValueError

    y.register_hook(hook)
    x.register_hook(lambda _: window.enter_graph())  # type: ignore[no-untyped-call]
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
    assert window.backwards == 1


def test_an_awaited_backward_begins_with_its_first_gradient() -> None:
    window, notes = make(CLOSED)
    with window.engine_backward(begins=False):
        backward(window)  # the engine that runs it may be this one
    with contextlib.suppress(ValueError), window.engine_backward(begins=False):
        raise ValueError  # of other engines: nothing here is incomplete
    assert (window.state, window.backwards, notes.calls) == (CLOSED, 0, [])

    with window.engine_backward(begins=False):
        raw_backward(window, lambda: raw_backward(window))
    assert (window.state, window.backwards, notes.calls) == (OPEN, 1, ["begin"])
    expected = pytest.warns(UserWarning, match=r"2 backward\(s\).*backward raised ValueError")
    with expected, pytest.raises(ValueError), window.engine_backward(begins=False):
        raw_backward(window, fail=True)
    assert window.state is CLOSED
