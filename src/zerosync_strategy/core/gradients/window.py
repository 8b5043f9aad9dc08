"""The window: all backwards of one optimizer step, reduced once.

States and transitions (rules W1, W3):

===========  ====================  ============  ===================  ==================  ============
state        backward              reduce        closing              abort               zero_grad
===========  ====================  ============  ===================  ==================  ============
``CLOSED``   -> ``OPEN``           stay          error                stay                stay
``OPEN``     stay                  -> REDUCED    reduce, -> CLOSED    drop, -> CLOSED     drop, stay
``REDUCED``  error                 stay          -> ``CLOSED``        drop, -> CLOSED     drop, -> OPEN
===========  ====================  ============  ===================  ==================  ============

A backward may reduce some gradients while it runs, or all of them if it is taken for the window's last
(``counts.py``). ``reduce`` reduces the rest, and hears whether another rank has more. Only these two
communicate. ``abort`` issues no collective, and no finaliser runs a reduction (W3).
"""

from __future__ import annotations

import enum
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import nn

from zerosync_strategy.core.comm.journal import phase
from zerosync_strategy.core.engine import zero3
from zerosync_strategy.core.failures.misused_gradients import LocalChanges
from zerosync_strategy.core.failures.rank_state import Doing
from zerosync_strategy.core.gradients.buckets import LocalGradient
from zerosync_strategy.core.gradients.counts import LastBackward
from zerosync_strategy.core.gradients.reducer import FirstUses, Reducer


class WindowState(enum.Enum):
    """The state of a window; the table above has the transitions."""

    CLOSED = "closed"  # no gradient since the last optimizer step
    OPEN = "open"  # gradients are local, or reduced in part
    REDUCED = "reduced"  # every gradient is in its shard; the step may follow


_ALLOWED = {
    WindowState.CLOSED: {WindowState.OPEN},
    WindowState.OPEN: {WindowState.OPEN, WindowState.REDUCED, WindowState.CLOSED},
    WindowState.REDUCED: {WindowState.OPEN, WindowState.CLOSED},
}


class _Backward(enum.Enum):
    """The running backward."""

    NONE = enum.auto()
    AWAITED = enum.auto()  # of another engine; it has completed no gradient of this window yet
    OURS = enum.auto()  # of this window


class Window:
    """The backwards of one optimizer step of one engine.

    Args:
        last: which backward is the last, and may reduce while it runs.
        activity: a context around what may communicate; it records what this rank does (W4).
        changes: finds edits of local gradients by the program.

    Attributes:
        state: as the table above says; read only.
        begun: the collectives that ``reducer`` has begun.
        backwards: number since the last optimizer step (as all counts here) or the last ``zero_grad()``; a nested
            backward counts as part of the outer one.
        unused: backwards whose gradients are neither reduced nor dropped.
        reductions, early_reductions: passes over the gradients, and how many of them ran during a backward.
        seconds: host time in reductions.
        begins: called when a backward begins, with whether it opens the window; see :meth:`Stage.backward_begins`.
        dropped: backwards of the most recently dropped window, until the next backward; for errors.
        interrupted: an exception has ended a backward; the code that cleans up after it sets this to ``False``.
    """

    def __init__(
        self, reducer: Reducer, last: LastBackward, activity: Callable[[str], AbstractContextManager[None]],
        changes: LocalChanges | None = None,
    ) -> None:  # fmt: skip
        self._reducer, self.begun, self.last, self._activity = reducer, reducer.pipeline.begun, last, activity
        self.begins: Callable[[bool], FirstUses | None] = lambda opens: None
        self.changes = changes or LocalChanges((), {})
        self.state = WindowState.CLOSED
        self._aborted: str | None = None  # why the last window was dropped, for the error of a step that follows
        self.backwards = self.reductions = self.early_reductions = self.dropped = self.unused = 0
        self.seconds = 0.0
        self.interrupted = False
        self._stepped = False  # since the end of the last engine.step()
        self._zeroed = True  # zero_grad() was called since the last step
        # The running backward: engine.backward() calls on the stack, and autograd graphs that hooks have seen.
        self._backward = _Backward.NONE
        self._engine_backwards = 0
        self._graphs: set[int] = set()

    def _enter(self, state: WindowState) -> None:
        if state not in _ALLOWED[self.state]:
            raise RuntimeError(f"a window cannot go from {self.state.name} to {state.name}")
        self.state = state

    # ---- backward ------------------------------------------------------------------------------------------------

    @contextmanager
    def engine_backward(self, begins: bool = True) -> Iterator[None]:
        """Around ``engine.backward``. An exception drops the window, because its gradients are incomplete.

        With ``begins=False``, the backward may concern other engines only. It belongs to this window from the first
        gradient of this engine on.
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
        """Forget raw backwards that have not ended: when a forward begins, they have raised."""
        self.changes.show_all()  # torch.compile looks at gradients
        self._reset_graphs()

    def enter_graph(self, ready: LocalGradient | None = None) -> None:
        """Detect a raw ``loss.backward()``. Called by hooks inside an autograd graph.

        ``ready`` is the gradient that the backward has already changed, if any.
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

    def added(self, gradient: LocalGradient, param: nn.Parameter) -> None:
        """Process an accumulation by autograd into ``param.grad``."""
        # Called for every gradient of every backward, so it makes no further call if nothing is to be done (H6).
        if not self._reducer.only_adds or param.grad is not gradient.tensor:
            self.gradient_ready(gradient)

    def gradient_ready(self, gradient: LocalGradient) -> None:
        """Process an accumulation into a gradient: begin the backward, or reduce buckets, if it is time."""
        if self._backward is not _Backward.OURS or not self._engine_backwards:
            self.enter_graph(gradient)
        if self._reducer.gradient_ready(gradient):
            with self._activity(Doing.OWN_BACKWARD):
                self._reducer.reduce_complete()

    def reaches_unit(self, behind: int) -> None:
        """Reduce when the backward reaches a ZeRO-3 module; ``behind`` is as in :meth:`Reducer.reduce_behind`."""
        if self._backward is _Backward.OURS and self._reducer.needs_reduce_behind(behind):
            with self._activity(Doing.OWN_BACKWARD):
                self._reducer.reduce_behind(behind)

    def add(self, gradient: LocalGradient, more: torch.Tensor) -> None:
        """Add ``more``, a full gradient that a compiled graph has computed and whose memory the graph keeps."""
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
        with self._activity(Doing.OWN_BACKWARD):  # engine.backward() enters this activity itself
            self._end_backward()

    def _leave_backward(self) -> None:
        if not self._engine_backwards and not self._graphs:
            self._backward = _Backward.NONE

    def _begin_backward(self, ready: LocalGradient | None = None) -> None:
        if self.state is WindowState.REDUCED:
            raise RuntimeError(
                "backward() was called between the reduction of the gradients and the optimizer step that uses them."
                " Call step() or zero_grad() first. To read gradients between backwards, pass overlap_last=False."
            )
        self.changes.check(but=None if ready is None else ready.param)
        is_last = self.last.is_next()
        first_uses = self.begins(self.state is WindowState.CLOSED)
        self._reducer.begin_backward(is_last, first_uses, ready)  # may raise; then no backward of the window has begun
        self._enter(WindowState.OPEN)
        self._backward = _Backward.OURS
        self.backwards += 1
        self.unused += 1
        self.dropped = 0
        self._aborted = None
        self.last.begin(is_last)

    def _end_backward(self) -> None:
        if self._backward is not _Backward.NONE or self.state is not WindowState.OPEN:
            return  # a nested backward ends with the outer one
        with self._reducing():
            streamed = self._reducer.end_backward()
        self.early_reductions += streamed
        self.reductions += streamed and not self.last.has_streamed
        self.last.has_streamed |= streamed and self.last.is_running
        self.changes.note(reduced=streamed or not self._reducer.keeps_gradients)

    @property
    def has_reduced(self) -> bool:
        """Whether some gradients of this window may no longer be on their parameters."""
        is_open = self.state is not WindowState.CLOSED
        return is_open and bool(self.reductions or self.early_reductions or not self._reducer.keeps_gradients)

    # ---- reduction and step --------------------------------------------------------------------------------------

    def expect_last(self, is_last: bool = True) -> None:
        """Promise that the next backward is the last of this window, or with ``False`` that it is not; on every rank.

        The gradients of the last are reduced while it runs. If another backward follows, the result is still right, and
        its gradients are reduced by themselves. Without a promise, a window is expected to have as many backwards as
        the one before.
        """
        self.last.promise(is_last)

    def reduce(self) -> None:
        """Reduce the local gradients and prepare the shards for the step. Collective."""
        self._begin_reduction()
        self._end_reduction()

    def _begin_reduction(self, passed: Callable[[], None] = lambda: None) -> None:
        """Issue the pass, if no backward has begun it, and what ranks say to each other, without waiting for it."""
        self._reset_graphs()
        self.changes.check()
        self._end_backward()
        self.changes.reset()  # drops its references, so that the reduction frees the gradients
        if self.state is WindowState.OPEN:
            with self._reducing():
                if not self.last.began:
                    self._reduce(every=self.last.overlaps)  # also if zero_grad() has left this rank nothing
                elif not self._reducer.agrees(self.last):
                    self._reduce()
                passed()
                self._reducer.settle(self.last)
        else:
            passed()

    def _end_reduction(self) -> None:
        if self.state is not WindowState.OPEN:
            return
        with self._reducing():
            while self._reducer.hear(self.last):
                self._reducer.share_left()
                self._reduce()
                self._reducer.settle(self.last)
            self._reducer.close()
        self._enter(WindowState.REDUCED)
        self.unused = 0

    def _reduce(self, every: bool = False) -> None:
        if self._reducer.needs_reduce or (every and self._reducer.keeps_some):
            self._reducer.reduce(every)
            self.reductions += not self.last.has_streamed  # else part of the pass that the backward began

    @contextmanager
    def _reducing(self) -> Iterator[None]:
        began = time.perf_counter()
        try:
            with phase("reduce"):
                yield
        except BaseException as error:
            self._reducer.interrupted()
            self.abort(f"the reduction raised {type(error).__name__}")
            raise
        self.seconds += time.perf_counter() - began

    @contextmanager
    def closing(self, passed: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Reduce what is still local, and close the window at the end. Around what comes before DeepSpeed's step.

        ``passed`` is called when the pass is issued: some ranks have begun it in a backward, so what is sent earlier in
        a step would come before it on some ranks and after it on others (W8).
        """
        if self.state is WindowState.CLOSED:
            why = f" The last window was dropped: {self._aborted}." if self._aborted else ""
            raise RuntimeError(
                f"step() was called, but no backward ran since the last optimizer step.{why} Call backward() on a loss"
                " that depends on the parameters first, on every rank."
            )
        self._begin_reduction(passed)
        try:
            yield
        finally:  # other ranks go on to the end of the reduction
            self._end_reduction()
            self._enter(WindowState.CLOSED)

    def end_step(self) -> None:
        """Reset the counts after the step. Separate from ``closing``, so that a report can read the counts."""
        self.backwards = self.reductions = self.early_reductions = 0
        self.seconds = 0.0
        self._stepped = True
        self.last.stepped()
        self._reducer.reset_counts()
        self._reset_graphs()

    def end_engine_step(self) -> None:
        """Handle the end of ``engine.step()``: a ``zero_grad()`` that its step made is not counted as the program's."""
        if self._stepped:
            self._stepped = self._zeroed = False

    # ---- dropping ------------------------------------------------------------------------------------------------

    def zero_grad(self) -> None:
        """Drop the gradients of this window, local or reduced; the window stays open."""
        self._zeroed = True
        self._reset_graphs()
        self.changes.reset()
        if self.state is WindowState.CLOSED:
            return
        self._reducer.drop()
        self.last.dropped()
        self._enter(WindowState.OPEN)
        self.backwards = self.unused = 0

    def check_zeroed(self) -> None:
        """Raise a ``RuntimeError`` if ``zero_grad()`` was not called since the last step.

        Called before the step of a program that is written for plain PyTorch, which would step the old gradients again;
        ZeRO's step consumes them.
        """
        if not self._zeroed and self.state is not WindowState.CLOSED:
            raise RuntimeError(
                "optimizer.step() was called, and no optimizer.zero_grad() since the last one: PyTorch would have added"
                " to the gradients of that step, which ZeRO has used up. Call zero_grad() of the optimizer or of the"
                " module after each step, or before the first backward of the next."
            )

    def abort(self, reason: str) -> None:
        """Drop the gradients and close the window, without a collective (W3). Does nothing when closed."""
        if self._backward is _Backward.OURS:
            self._interrupt()
        self._graphs.clear()
        self._leave_backward()
        self.changes.reset()
        if self.state is WindowState.CLOSED:
            return
        self.dropped, self.backwards, self.reductions, self.early_reductions = self.backwards, 0, 0, 0
        self._enter(WindowState.CLOSED)
        self.unused = 0
        self.last.dropped()
        self._aborted = reason
        self._reducer.reset()
        if self.dropped:  # zero_grad() had not dropped them before
            warnings.warn(
                f"ZeroSync dropped the gradients of {self.dropped} backward(s) since the last optimizer step: {reason}."
                " Dropping them sent nothing to other ranks.",
                stacklevel=2,
            )

    def warn_if_open(self, what: str) -> None:
        """Warn that a checkpoint in mid-window lacks the window's gradients (W5). ``what`` is the operation."""
        if self.backwards and self.state is not WindowState.CLOSED:
            warnings.warn(
                f"{what} with {self.backwards} backward(s) since the last optimizer step. Their gradients are"
                " not in the checkpoint: this process keeps them for its next step, but a run that resumes from the"
                " checkpoint starts from the last step without them. Checkpoint right after a step to avoid this.",
                stacklevel=4,
            )

    def _reset_graphs(self) -> None:
        # A backward that raised never runs its final callback. Outside of any autograd graph, no backward is running.
        if torch._C._current_graph_task_id() == -1:
            if self._graphs:
                self._interrupt()
            self._graphs.clear()
            self._leave_backward()

    def _interrupt(self) -> None:
        """Record that an exception has ended a backward, at a different point on each rank."""
        self._reducer.interrupted()
        self.interrupted = True
