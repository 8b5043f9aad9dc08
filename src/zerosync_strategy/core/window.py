"""The window: all backwards of one optimizer step, reduced once.

States and transitions (rules W1, W3):

===========  ====================  ============  ===================  ==================  ============
state        backward              reduce        begin_step           abort               zero_grad
===========  ====================  ============  ===================  ==================  ============
``CLOSED``   -> ``OPEN``           stay          error                stay                stay
``OPEN``     stay                  -> REDUCED    reduce, -> CLOSED    drop, -> CLOSED     drop, stay
``REDUCED``  error                 stay          -> ``CLOSED``        drop, -> CLOSED     drop, -> OPEN
===========  ====================  ============  ===================  ==================  ============

A backward may reduce some gradients as it goes, or all of them when it is known to be the window's last; what it
leaves, ``reduce`` sends. These two communicate. ``abort`` issues no collective, and nothing here runs from a finaliser
(W3).
"""

from __future__ import annotations

import enum
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from zerosync_strategy.core.reduction import Reducer


class WindowState(enum.Enum):
    """Where a window is; the table above has the transitions."""

    CLOSED = "closed"  # no gradient since the last optimizer step
    OPEN = "open"  # gradients are local, or reduced in part
    REDUCED = "reduced"  # every gradient is in its partition; the step may follow


class Window:
    """The backwards of one optimizer step of one engine.

    Attributes:
        state: where the window is in the table above.
        backwards: backwards since the last optimizer step; one that runs inside another counts with it.
        reductions: reduction passes over the gradients since the last optimizer step.
        early_reductions: those of them made while a backward ran.
        seconds: host time in reductions since the last optimizer step.
    """

    def __init__(self, reducer: Reducer, overlap_last: bool) -> None:
        self._reducer = reducer
        self._overlap_last = overlap_last
        self._last_is_next = False
        self._is_last = False
        self._last_streamed = False  # in the backward promised to be the last; what it left is sent in the same pass
        self.state = WindowState.CLOSED
        self.backwards = 0
        self.reductions = 0
        self.early_reductions = 0
        self.seconds = 0.0
        self._aborted: str | None = None  # why the last window was dropped, for the error of a step that follows
        # The backward that runs: engine.backward() calls on the stack, and autograd graphs seen from inside.
        self._engine_backwards = 0
        self._graphs: set[int] = set()
        self._awaited = False  # it is one of this window only if it brings a gradient, and has brought none yet

    # ---- backward ------------------------------------------------------------------------------------------------

    @contextmanager
    def engine_backward(self, begins: bool = True) -> Iterator[None]:
        """Around ``engine.backward``. An exception drops the window: its gradients are incomplete.

        Args:
            begins: ``False``: the backward may concern other engines alone. It is one of this window from the first
                gradient that it brings.
        """
        if not self._engine_backwards and not self._graphs:
            if begins:
                self._begin_backward()
            else:
                self._awaited = True
        self._engine_backwards += 1
        try:
            yield
        except BaseException as error:
            if self._engine_backwards == 1 and not self._awaited:
                self.abort(f"backward raised {type(error).__name__}")
            raise
        finally:
            self._engine_backwards -= 1
            self._awaited &= self._engine_backwards > 0
        self._end_backward()

    def inside_graph(self) -> None:
        """From a hook inside an autograd graph: a raw ``loss.backward()`` shows itself here."""
        if self._engine_backwards:
            if self._awaited:
                self._awaited = False
                self._begin_backward()
            return
        graph = torch._C._current_graph_task_id()
        if graph in self._graphs:
            return
        if not self._graphs:
            self._begin_backward()
        if graph != -1:
            self._graphs.add(graph)
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self._graph_done(graph))

    def _graph_done(self, graph: int) -> None:
        self._graphs.discard(graph)
        self._end_backward()

    def _end_backward(self) -> None:
        # A backward that runs inside another ends with it.
        if not self._engine_backwards and not self._graphs and self.state is WindowState.OPEN:
            with self._reducing():
                streamed = self._reducer.end_backward()
            self.early_reductions += streamed
            self._last_streamed |= streamed and self._is_last
            self.reductions += streamed and not self._is_last

    def _begin_backward(self) -> None:
        if self.state is WindowState.REDUCED:
            raise RuntimeError(
                "backward() was called between the reduction of the gradients and the optimizer step that uses them."
                " Call step() first, or zero_grad() to drop the reduced gradients."
            )
        self.state = WindowState.OPEN
        self.backwards += 1
        self._aborted = None
        self.reductions += self._last_streamed  # the promise was wrong: another pass follows
        self._last_streamed = False
        self._is_last = self._last_is_next and self._overlap_last
        self._reducer.begin_backward(last=self._is_last)
        self._last_is_next = False

    # ---- reduction and step --------------------------------------------------------------------------------------

    def expect_last(self) -> None:
        """Promise that the next backward is the last of this window, on every rank alike.

        Its gradients are then reduced while it runs. If another backward follows, the result is still right, and its
        gradients are reduced by themselves.
        """
        self._last_is_next = True

    def reduce(self) -> None:
        """Reduce what is local and make the partition ready for the step. All ranks must call it alike."""
        self._forget_graphs()
        self._end_backward()
        if self.state is not WindowState.OPEN:
            return
        with self._reducing():
            if self._reducer.due:
                self._reducer.reduce()
                self.reductions += 1
            elif self._last_streamed:
                self.reductions += 1
            self._reducer.close()
        self.state = WindowState.REDUCED

    @contextmanager
    def _reducing(self) -> Iterator[None]:
        began = time.perf_counter()
        try:
            with torch.profiler.record_function("zerosync::reduce"):
                yield
        except BaseException as error:
            self.abort(f"the reduction raised {type(error).__name__}")
            raise
        self.seconds += time.perf_counter() - began

    def begin_step(self) -> None:
        """Before DeepSpeed's own optimizer step: reduce what is open, and close."""
        if self.state is WindowState.CLOSED:
            why = f" The last window was dropped: {self._aborted}." if self._aborted else ""
            raise RuntimeError(
                f"step() was called, but no backward ran since the last optimizer step.{why} Call backward() on a loss"
                " that depends on the parameters first, on every rank."
            )
        self.reduce()
        self.state = WindowState.CLOSED

    def end_step(self) -> None:
        """After the step: count from zero. Kept apart from ``begin_step`` so that a report can read the counts."""
        self.backwards = self.reductions = self.early_reductions = 0
        self.seconds = 0.0
        self._last_is_next = self._last_streamed = False
        self._reducer.end_window()
        self._forget_graphs()

    # ---- dropping ------------------------------------------------------------------------------------------------

    def zero_grad(self) -> None:
        """Drop the gradients of this window, local or reduced; the window stays open."""
        self._forget_graphs()
        if self.state is WindowState.CLOSED:
            return
        self._reducer.forget()
        self.state = WindowState.OPEN

    def abort(self, reason: str) -> None:
        """Drop the gradients and close, without a collective (W3). Does nothing when closed."""
        self._graphs.clear()
        if self.state is WindowState.CLOSED:
            return
        backwards, self.backwards, self.reductions, self.early_reductions = self.backwards, 0, 0, 0
        self.state = WindowState.CLOSED
        self._last_is_next = self._last_streamed = False
        self._aborted = reason
        self._reducer.reset()
        warnings.warn(
            f"ZeroSync dropped the gradients of {backwards} backward(s) since the last optimizer step: {reason}."
            " Dropping them sent nothing to other ranks.",
            stacklevel=2,
        )

    def _forget_graphs(self) -> None:
        # A backward that raised never runs its final callback. Outside of any graph, none can be running.
        if torch._C._current_graph_task_id() == -1:
            self._graphs.clear()
