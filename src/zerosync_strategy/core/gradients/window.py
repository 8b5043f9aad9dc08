"""The window: all backwards of one optimizer step, reduced once.

States and transitions (rules W1, W3):

===========  ====================  ============  ===================  ==================  ============
state        backward              reduce        begin_step           abort               zero_grad
===========  ====================  ============  ===================  ==================  ============
``CLOSED``   -> ``OPEN``           stay          error                stay                stay
``OPEN``     stay                  -> REDUCED    reduce, -> CLOSED    drop, -> CLOSED     drop, stay
``REDUCED``  error                 stay          -> ``CLOSED``        drop, -> CLOSED     drop, -> OPEN
===========  ====================  ============  ===================  ==================  ============

A backward may reduce some gradients as it goes, or all of them when it is known to be the window's last; ``reduce``
reduces the rest. These two communicate. ``abort`` issues no collective, and nothing here runs from a finaliser (W3).
"""

from __future__ import annotations

import enum
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from zerosync_strategy.core.comm.collectives import phase
from zerosync_strategy.core.comm.traffic import EngineCounter
from zerosync_strategy.core.engine import zero3
from zerosync_strategy.core.failures.doing import Doing
from zerosync_strategy.core.gradients.buckets import LocalGradient
from zerosync_strategy.core.gradients.checks import LocalChanges
from zerosync_strategy.core.gradients.reducer import Reducer


class WindowState(enum.Enum):
    """Where a window is; the table above has the transitions."""

    CLOSED = "closed"  # no gradient since the last optimizer step
    OPEN = "open"  # gradients are local, or reduced in part
    REDUCED = "reduced"  # every gradient is in its shard; the step may follow


_ALLOWED = {
    WindowState.CLOSED: {WindowState.OPEN},
    WindowState.OPEN: {WindowState.OPEN, WindowState.REDUCED, WindowState.CLOSED},
    WindowState.REDUCED: {WindowState.OPEN, WindowState.CLOSED},
}


class _Last(enum.Enum):
    """What is known of the window's last backward."""

    UNKNOWN = enum.auto()
    NEXT = enum.auto()  # promised to be the next one
    RUNNING = enum.auto()  # the running backward, or the one that ran last, was promised to be it
    STREAMED = enum.auto()  # and it has reduced gradients as it went


class _Backward(enum.Enum):
    """The backward that runs."""

    NONE = enum.auto()
    AWAITED = enum.auto()  # another engine runs one, which has completed no gradient of this window yet
    OURS = enum.auto()  # one of this window


class Window:
    """The backwards of one optimizer step of one engine.

    Args:
        overlap_last: reduce during the backward that is promised to be the last.
        activity: a context that notes down what this rank does, around what may communicate (W4).
        begins: is called when a backward begins, with whether it opens the window.
        changes: finds what a program does to local gradients.

    Attributes:
        backwards: since the last optimizer step, as all counts, or the last ``zero_grad()``; one that runs inside
            another counts with it.
        unused: of these, those whose gradients nobody has reduced or dropped.
        reductions, early_reductions: passes over the gradients; of these, those that were made while a backward ran.
        seconds: host time in reductions.
        dropped: backwards of the window that was dropped last, until the next backward; for errors.
        interrupted: an exception has ended a backward; who mends what it has left sets this to ``False``.
    """

    def __init__(
        self, reducer: Reducer, overlap_last: bool, traffic: EngineCounter,
        activity: Callable[[str], AbstractContextManager[None]], begins: Callable[[bool], None] = lambda _: None,
        changes: LocalChanges | None = None,
    ) -> None:  # fmt: skip
        self._reducer, self._overlap_last, self._traffic = reducer, overlap_last, traffic
        self._activity, self._begins = activity, begins
        self.changes = changes or LocalChanges((), {})
        self._state = WindowState.CLOSED
        self._last = _Last.UNKNOWN
        self._aborted: str | None = None  # why the last window was dropped, for the error of a step that follows
        self.backwards = self.reductions = self.early_reductions = self.dropped = self.unused = 0
        self.seconds = 0.0
        self.interrupted = False
        self._stepped = False  # since the last engine.step() has ended
        self._zeroed = True  # zero_grad() has come since the last step
        self._shares = True  # this process's traffic with other engines
        # The running backward: engine.backward() calls on the stack, and autograd graphs that hooks have seen.
        self._backward = _Backward.NONE
        self._engine_backwards = 0
        self._graphs: set[int] = set()

    @property
    def state(self) -> WindowState:
        return self._state

    def _enter(self, state: WindowState) -> None:
        if state not in _ALLOWED[self._state]:
            raise RuntimeError(f"a window cannot go from {self._state.name} to {state.name}")
        self._state = state

    # ---- backward ------------------------------------------------------------------------------------------------

    @contextmanager
    def engine_backward(self, begins: bool = True) -> Iterator[None]:
        """Around ``engine.backward``. An exception drops the window: its gradients are incomplete.

        Not ``begins``: the backward may concern other engines alone. It is one of this window from the first gradient
        of this engine.
        """
        if self._backward is _Backward.NONE:
            if begins:
                self._begin_backward()
            else:
                self._backward = _Backward.AWAITED
        self._engine_backwards += 1
        try:
            yield
        except BaseException as error:
            if self._engine_backwards == 1 and self._backward is _Backward.OURS:
                self.abort(f"backward raised {type(error).__name__}")
            raise
        finally:
            self._engine_backwards -= 1
            self._leave_backward()
        self._end_backward()

    def forward_begins(self) -> None:
        """A forward begins; a raw backward that has not ended by now has raised."""
        self._reset_graphs()

    def enter_graph(self, ready: LocalGradient | None = None) -> None:
        """From a hook inside an autograd graph: a raw ``loss.backward()`` shows itself here.

        ``ready`` is the gradient that the backward has changed already, if any.
        """
        if self._engine_backwards:
            if self._backward is _Backward.AWAITED:
                self._begin_backward(ready)
            return
        graph = torch._C._current_graph_task_id()
        if graph in self._graphs:
            return
        if not self._graphs:
            self._begin_backward(ready)
        if graph != -1:
            self._graphs.add(graph)
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self._graph_done(graph))
        else:
            self._leave_backward()

    def added(self, gradient: LocalGradient, param: Any) -> None:
        """Autograd has added to ``param.grad``."""
        # Called for every gradient of every backward: where there is nothing to do, it calls nothing.
        if not self._reducer.only_adds or param.grad is not gradient.place or (self._shares and self._traffic.traffic):
            self.gradient_ready(gradient)

    def gradient_ready(self, gradient: LocalGradient) -> None:
        """There is more in a gradient."""
        if self._backward is not _Backward.OURS or not self._engine_backwards:
            self.enter_graph(gradient)
        if self._shares and self._traffic.traffic:
            self._traffic.attribute()  # parameters that were gathered on the way to this gradient
        if self._reducer.gradient_ready(gradient):
            with self._activity(Doing.OWN_BACKWARD):
                self._reducer.reduce_complete()
            self._traffic.attribute()  # what was reduced

    def reaches_unit(self, behind: int) -> None:
        """The backward comes to a module of ZeRO-3; ``behind`` is as :meth:`Reducer.reduce_behind` takes it."""
        if self._backward is _Backward.OURS and self._reducer.needs_reduce_behind(behind):
            self._traffic.attribute()  # parameters that were gathered on the way
            with self._activity(Doing.OWN_BACKWARD):
                self._reducer.reduce_behind(behind)
            self._traffic.attribute()

    def add(self, gradient: LocalGradient, more: torch.Tensor) -> None:
        """Add ``more``, in full, that a compiled graph has computed; its memory stays the graph's."""
        param = gradient.param
        if param.grad is None:
            with zero3.as_it_is(), zero3.in_full_shapes((param,)):
                param.grad = more.to(param.dtype, copy=True)
        else:
            param.grad.add_(more)
        self.gradient_ready(gradient)

    def _graph_done(self, graph: int) -> None:
        self._graphs.discard(graph)
        self._leave_backward()
        with self._activity(Doing.OWN_BACKWARD):  # engine.backward() is one itself
            self._end_backward()

    def _leave_backward(self) -> None:
        if not self._engine_backwards and not self._graphs:
            self._backward = _Backward.NONE

    def _begin_backward(self, ready: LocalGradient | None = None) -> None:
        if self._state is WindowState.REDUCED:
            raise RuntimeError(
                "backward() was called between the reduction of the gradients and the optimizer step that uses them."
                " Call step() first, or zero_grad() to drop the reduced gradients."
            )
        self.changes.check(but=None if ready is None else ready.param)
        self._shares = not self._traffic.is_alone
        is_last = self._last is _Last.NEXT and self._overlap_last
        self._reducer.begin_backward(is_last, ready)  # may refuse; then nothing has begun
        self._begins(self._state is WindowState.CLOSED)
        self._enter(WindowState.OPEN)
        self._backward = _Backward.OURS
        self.backwards += 1
        self.unused += 1
        self.dropped = 0
        self._aborted = None
        self._last = _Last.RUNNING if is_last else _Last.UNKNOWN

    def _end_backward(self) -> None:
        if self._backward is not _Backward.NONE or self._state is not WindowState.OPEN:
            return  # a backward that runs inside another ends with it
        with self._reducing():
            streamed = self._reducer.end_backward()
        self.early_reductions += streamed
        self.reductions += streamed and self._last is not _Last.STREAMED
        if streamed and self._last is _Last.RUNNING:
            self._last = _Last.STREAMED
        self.changes.note()

    @property
    def has_reduced(self) -> bool:
        """Whether gradients of this window are no longer on their parameters."""
        is_open = self._state is not WindowState.CLOSED
        return is_open and bool(self.reductions or self.early_reductions or not self._reducer.keeps_gradients)

    # ---- reduction and step --------------------------------------------------------------------------------------

    def expect_last(self) -> None:
        """Promise that the next backward is the last of this window, on every rank alike.

        Its gradients are then reduced while it runs. If another backward follows, the result is still right, and its
        gradients are reduced by themselves.
        """
        self._last = _Last.NEXT

    def reduce(self) -> None:
        """Reduce what is local and make the shards ready for the step. All ranks must call it alike."""
        self._reset_graphs()
        self.changes.check()
        self._end_backward()
        self.changes.reset()  # and the memory that is freed as they are reduced
        if self._state is not WindowState.OPEN:
            return
        with self._reducing():
            if self._reducer.needs_reduce:
                self._reducer.reduce()
                self.reductions += self._last is not _Last.STREAMED  # else it is part of the same pass
            self._reducer.close()
        self._enter(WindowState.REDUCED)
        self.unused = 0

    @contextmanager
    def _reducing(self) -> Iterator[None]:
        began = time.perf_counter()
        try:
            with phase("reduce"):
                yield
        except BaseException as error:
            self.abort(f"the reduction raised {type(error).__name__}")
            raise
        self.seconds += time.perf_counter() - began

    def begin_step(self) -> None:
        """Before DeepSpeed's own optimizer step: reduce what is open, and close."""
        if self._state is WindowState.CLOSED:
            why = f" The last window was dropped: {self._aborted}." if self._aborted else ""
            raise RuntimeError(
                f"step() was called, but no backward ran since the last optimizer step.{why} Call backward() on a loss"
                " that depends on the parameters first, on every rank."
            )
        self.reduce()
        self._enter(WindowState.CLOSED)

    def end_step(self) -> None:
        """After the step: count from zero. Kept apart from ``begin_step`` so that a report can read the counts."""
        self.backwards = self.reductions = self.early_reductions = 0
        self.seconds = 0.0
        self._stepped = True
        self._last = _Last.UNKNOWN
        self._reducer.reset_counts()
        self._reset_graphs()

    def end_engine_step(self) -> None:
        """At the end of ``engine.step()``, which may have stepped, and then called ``zero_grad()`` by itself."""
        if self._stepped:
            self._stepped = self._zeroed = False

    # ---- dropping ------------------------------------------------------------------------------------------------

    def zero_grad(self) -> None:
        """Drop the gradients of this window, local or reduced; the window stays open."""
        self._zeroed = True
        self._reset_graphs()
        self.changes.reset()
        if self._state is WindowState.CLOSED:
            return
        self._reducer.drop()
        self._enter(WindowState.OPEN)
        self.backwards = self.unused = 0

    def check_zeroed(self) -> None:
        """Before the step of a program that is not written for DeepSpeed, whose own ``step()`` uses gradients up.

        A ``RuntimeError``: ``zero_grad()`` has not come since the last step, and PyTorch would step its gradients
        again.
        """
        if not self._zeroed and self._state is not WindowState.CLOSED:
            raise RuntimeError(
                "optimizer.step() was called, and no optimizer.zero_grad() since the last one: PyTorch would have added"
                " to the gradients of that step, which ZeRO has used up. Call zero_grad() of the optimizer or of the"
                " module after each step, or before the first backward of the next."
            )

    def abort(self, reason: str) -> None:
        """Drop the gradients and close, without a collective (W3). Does nothing when closed."""
        if self._backward is _Backward.OURS:
            self._interrupt()
        self._graphs.clear()
        self._leave_backward()
        self.changes.reset()
        if self._state is WindowState.CLOSED:
            return
        self.dropped, self.backwards, self.reductions, self.early_reductions = self.backwards, 0, 0, 0
        self._enter(WindowState.CLOSED)
        self.unused = 0
        self._last = _Last.UNKNOWN
        self._aborted = reason
        self._reducer.reset()
        if self.dropped:  # and not by zero_grad() before
            warnings.warn(
                f"ZeroSync dropped the gradients of {self.dropped} backward(s) since the last optimizer step: {reason}."
                " Dropping them sent nothing to other ranks.",
                stacklevel=2,
            )

    def warn_if_open(self, what: str) -> None:
        """Warn where ``what`` comes in mid-window: its gradients are not in the checkpoint (W5)."""
        if self.backwards and self._state is not WindowState.CLOSED:
            warnings.warn(
                f"{what} with {self.backwards} backward(s) since the last optimizer step. Their gradients are"
                " not in the checkpoint: this process keeps them for its next step, but a run that resumes from the"
                " checkpoint starts from the last step without them. Checkpoint right after a step to avoid this.",
                stacklevel=4,
            )

    def _reset_graphs(self) -> None:
        # A backward that raised never runs its final callback. Outside of any graph, none can be running.
        if torch._C._current_graph_task_id() == -1:
            if self._graphs:
                self._interrupt()
            self._graphs.clear()
            self._leave_backward()

    def _interrupt(self) -> None:
        """An exception has ended a backward, at another place on each rank."""
        self._reducer.interrupted()
        self.interrupted = True
