"""Where a program takes its optimizer steps: in ``optimizer.step()``, or in ``accelerator.backward()`` as under stock.

Under stock Accelerate with DeepSpeed, ``optimizer.step()`` does nothing, and a program may omit it. With ZeroSync, this
program would run backwards and train nothing. So the program's calls before its first step decide where it steps, or
raise an error.
"""

from __future__ import annotations

from zerosync_strategy import frontend
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
        self._decided_here = False  # by norm_is_read(), since the last backward
        self._says_when = False  # the program sets accelerator.sync_gradients itself
        self._accumulates = False
        self._complete = False  # the last backward synchronised gradients

    def program_synchronises(self) -> None:
        """Record that the program sets ``accelerator.sync_gradients``, which Accelerate's ``backward()`` reads."""
        self._says_when = True

    def backward_begins(self, synchronises: bool) -> None:
        """Check a beginning ``accelerator.backward()``.

        Raises:
            RuntimeError: it begins the next window after a complete one, and the program has never stepped.
        """
        made = self._zerosync.window.unused
        if self._never_stepped and self._accumulates and self._complete and made and not synchronises:
            raise RuntimeError(
                f"accelerator.backward() begins the next window of accumulation, and the program has not called"
                f" optimizer.step() after the {made} backward(s) of the one before: it would"
                f" train nothing. Call optimizer.step() where accelerator.sync_gradients is true. {REMEDY}"
            )

    def backward_ended(self, synchronises: bool) -> None:
        self._complete = synchronises
        self._accumulates |= not synchronises
        self._decided_here = False

    def norm_is_read(self) -> None:
        """Handle a read of the gradient norm of the engine's last step.

        If the program sets ``accelerator.sync_gradients`` itself, has run the backward that completes the window, and
        has never called ``optimizer.step()``, it assumes that the backward has stepped. Then step now, and from now on
        in each such backward.
        """
        if not (self._never_stepped and self._says_when and self._complete and self._zerosync.window.unused):
            return
        self._undecided, self._decided_here, self.on_backward = False, True, True
        frontend.say_on_first_rank(
            "steps in accelerator.backward() from here on, as stock Accelerate does: the program sets"
            " accelerator.sync_gradients, and reads the gradient norm of a step without having called"
            " optimizer.step(). step_on='optimizer' or 'backward' says it from the beginning."
        )
        self._zerosync.engine.step()

    def program_steps(self) -> None:
        """Handle a call of ``optimizer.step()``: the program steps by itself."""
        if self._decided_here:  # the decision was wrong; the step of this call has been taken already, once
            self.on_backward = False
        self._undecided = self._decided_here = False

    @property
    def _never_stepped(self) -> bool:
        return self._undecided and self._zerosync.report is None

    def check_end(self, num_steps: int) -> None:
        """Check at the end of the training that the program has stepped.

        Raises:
            RuntimeError: it ran more backwards than the ``num_steps`` of one window, and never stepped.
        """
        made = self._zerosync.window.unused
        if self._never_stepped and self._complete and made > num_steps:
            raise RuntimeError(
                f"end_training() was called after {made} backwards and no optimizer step: nothing was trained. Call"
                f" optimizer.step(). {REMEDY}"
            )
