"""The window: all backwards of one optimizer step, reduced once.

States and transitions (rules W1, W3):

===========  ==============  ============  ===================  ==================  ====================  ============
state        backward        reduce_early  reduce               begin_step          abort                 zero_grad
===========  ==============  ============  ===================  ==================  ====================  ============
``CLOSED``   -> ``OPEN``     stay          stay                 error               stay                  stay
``OPEN``     stay            stay          -> ``REDUCED``       reduce, -> CLOSED   drop, -> ``CLOSED``   drop, stay
``REDUCED``  error           stay          stay                 -> ``CLOSED``       drop, -> ``CLOSED``   drop, -> OPEN
===========  ==============  ============  ===================  ==================  ====================  ============

Only ``reduce_early``, ``reduce`` and ``begin_step`` communicate. ``abort`` issues no collective, and nothing here runs
from a finaliser (W3).
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
        peak_unreduced_bytes: the most bytes of local gradients since the last optimizer step.
        seconds: host time in reductions since the last optimizer step.
    """

    def __init__(self, reducer: Reducer, coalesce: bool) -> None:
        self._reducer = reducer
        self._coalesce = coalesce
        self.state = WindowState.CLOSED
        self.backwards = 0
        self.reductions = 0
        self.peak_unreduced_bytes = 0
        self.seconds = 0.0
        self._unreduced = False  # a backward ran since the last reduction
        self._partial = False  # the partition holds gradients of this window, and the window is open for more
        self._aborted: str | None = None  # why the last window was dropped, for the error of a step that follows
        # The backward that runs: engine.backward() calls on the stack, and autograd graphs seen from inside.
        self._engine_backwards = 0
        self._graphs: set[int] = set()

    # ---- backward ------------------------------------------------------------------------------------------------

    @contextmanager
    def engine_backward(self) -> Iterator[None]:
        """Around ``engine.backward``. An exception drops the window: its gradients are incomplete."""
        if not self._engine_backwards and not self._graphs:
            self._begin_backward()
        self._engine_backwards += 1
        try:
            yield
        except BaseException as error:
            if self._engine_backwards == 1:
                self.abort(f"backward raised {type(error).__name__}")
            raise
        finally:
            self._engine_backwards -= 1

    def inside_graph(self) -> None:
        """From a hook inside an autograd graph: a raw ``loss.backward()`` shows itself here."""
        if self._engine_backwards:
            return
        graph = torch._C._current_graph_task_id()
        if graph in self._graphs:
            return
        if not self._graphs:
            self._begin_backward()
        if graph != -1:
            self._graphs.add(graph)
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self._graphs.discard(graph))

    def _begin_backward(self) -> None:
        if self.state is WindowState.REDUCED:
            raise RuntimeError(
                "backward() was called between the reduction of the gradients and the optimizer step that uses them."
                " Call step() first, or zero_grad() to drop the reduced gradients."
            )
        self.state = WindowState.OPEN
        self.backwards += 1
        self._unreduced = True
        self._aborted = None

    # ---- reduction and step --------------------------------------------------------------------------------------

    def backward_done(self) -> None:
        """The engine would reduce now. With ``coalesce`` nothing is due before the step (W1)."""
        if not self._coalesce:
            self.reduce_early()

    def reduce_early(self) -> None:
        """Reduce the local gradients into the partition and leave the window open for more."""
        if self.state is WindowState.OPEN and self._unreduced:
            self._reduce(final=False)

    def reduce(self) -> None:
        """Reduce what is local and make the partition ready for the step. All ranks must call it alike."""
        if self.state is not WindowState.OPEN:
            return
        if self._unreduced or not self._partial:
            self._reduce(final=True)
        else:
            self._reducer.finalize()
        self.state = WindowState.REDUCED

    def _reduce(self, final: bool) -> None:
        self.peak_unreduced_bytes = max(self.peak_unreduced_bytes, self._reducer.local_bytes())
        began = time.perf_counter()
        try:
            with torch.profiler.record_function("zerosync::reduce"):
                self._reducer.reduce(first=not self._partial, final=final)
        except BaseException as error:
            self.abort(f"the reduction raised {type(error).__name__}")
            raise
        self.seconds += time.perf_counter() - began
        self.reductions += 1
        self._partial = True
        self._unreduced = False

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
        self.backwards = self.reductions = self.peak_unreduced_bytes = 0
        self.seconds = 0.0
        self._unreduced = self._partial = False
        self._forget_graphs()

    # ---- dropping ------------------------------------------------------------------------------------------------

    def zero_grad(self) -> None:
        """Drop the gradients of this window, local or reduced; the window stays open."""
        self._forget_graphs()
        if self.state is WindowState.CLOSED:
            return
        self._reducer.drop()
        self._reducer.discard()
        self.state = WindowState.OPEN
        self._unreduced = self._partial = False

    def abort(self, reason: str) -> None:
        """Drop the gradients and close, without a collective (W3). Does nothing when closed."""
        self._graphs.clear()
        if self.state is WindowState.CLOSED:
            return
        backwards, self.backwards, self.reductions = self.backwards, 0, 0
        self.state = WindowState.CLOSED
        self._unreduced = self._partial = False
        self._aborted = reason
        self._reducer.reset()
        warnings.warn(
            f"ZeroSync dropped the gradients of {backwards} backward(s) since the last optimizer step: {reason}."
            " Nothing was sent to other ranks.",
            stacklevel=2,
        )

    def _forget_graphs(self) -> None:
        # A backward that raised never runs its final callback. Outside of any graph, none can be running.
        if torch._C._current_graph_task_id() == -1:
            self._graphs.clear()
