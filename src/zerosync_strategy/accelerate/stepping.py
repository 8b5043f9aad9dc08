"""Where a program takes its optimizer steps: in ``optimizer.step()``, or in ``accelerator.backward()`` as under stock.

Under stock Accelerate with DeepSpeed, ``optimizer.step()`` does nothing, and a program may omit it. With ZeroSync, this
program would run backwards and train nothing. That is an error, whose remedy is the option ``step_on``.
"""

from __future__ import annotations

from typing import Any

from zerosync_strategy.frontend import ZeroSync

AUTO, ON_BACKWARD = "auto", "backward"
STEP_ON = (AUTO, "optimizer", ON_BACKWARD)
REMEDY = (
    "If the program relies on the step that stock Accelerate takes in backward(), set step_on to 'backward', in the"
    " 'zerosync' block of the DeepSpeed configuration or in ZeroSyncPlugin; if it adds up gradients on purpose, to"
    " 'optimizer'."
)


class StepPlace:
    """Where a program steps one engine.

    Args:
        zerosync: the handle of the engine.
        asked: the option ``step_on``.

    Attributes:
        on_backward: ``accelerator.backward()`` steps whenever gradients are synchronised.
    """

    def __init__(self, zerosync: ZeroSync, asked: str) -> None:
        self._zerosync = zerosync
        self.on_backward = asked == ON_BACKWARD
        self._undecided = asked == AUTO
        self._accumulates = False
        self._complete = False  # the last backward synchronised gradients
        self._norm_is_read = False  # of the window that is complete

    def backward_begins(self, synchronises: bool) -> None:
        """Check a beginning ``accelerator.backward()``.

        Raises:
            RuntimeError: it begins the next window after a complete one, and the program has never stepped.
        """
        made, is_reduced = self._zerosync.window.backwards, not self._zerosync.window.unused
        begins_next = is_reduced or (self._accumulates and not synchronises)
        if self._never_stepped and self._complete and made and begins_next:
            raise RuntimeError(
                f"accelerator.backward() begins the next window of accumulation, and the program has not called"
                f" optimizer.step() after the {made} backward(s) of the one before: it would"
                f" train nothing. Call optimizer.step() where accelerator.sync_gradients is true. {REMEDY}"
            )

    def backward_ended(self, synchronises: bool) -> None:
        self._complete = synchronises
        self._accumulates |= not synchronises
        self._norm_is_read = False

    def coming_norm(self) -> Any:
        """Return the norm of the step that completes the window, which stock Accelerate has taken; else ``None``."""
        if not (self._complete and self._zerosync.window.backwards and self._zerosync.has_backward):
            return None
        self._norm_is_read = True
        return self._zerosync.gradient_norm()

    def program_steps(self) -> None:
        """Record a call of ``optimizer.step()``: the program steps by itself."""
        self._undecided = self._complete = False

    @property
    def _never_stepped(self) -> bool:
        return self._undecided and self._zerosync.report is None

    def check_end(self, num_steps: int) -> None:
        """Check at the end of the training that the program has stepped.

        Raises:
            RuntimeError: it never stepped, and ran more backwards than the ``num_steps`` of one window, or read the
                norm of a step.
        """
        made, unused = self._zerosync.window.backwards, self._zerosync.window.unused
        if self._never_stepped and self._complete and (unused > num_steps or (self._norm_is_read and made)):
            raise RuntimeError(
                f"end_training() was called after {made} backwards and no optimizer step: nothing was trained. Call"
                f" optimizer.step(). {REMEDY}"
            )
