"""Where a program takes its optimizer steps: in ``optimizer.step()``, or in ``accelerator.backward()`` as under stock.

Under stock Accelerate with DeepSpeed ``optimizer.step()`` does nothing, and a program may leave it out. Such a program
would make backwards here and train nothing, so what it does until its first step decides, or is an error.
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
    """Where the program of one engine steps.

    Args:
        zerosync: of the engine.
        asked: the option ``step_on``.

    Attributes:
        on_backward: ``accelerator.backward()`` steps wherever gradients are synchronised.
    """

    def __init__(self, zerosync: ZeroSync, asked: str) -> None:
        self._zerosync = zerosync
        self.on_backward = asked == ON_BACKWARD
        self._undecided = asked == AUTO
        self._decided_here = False  # since the last backward
        self._says_when = False  # the program sets accelerator.sync_gradients itself
        self._accumulates = False
        self._complete = False  # the last backward was one with synchronisation

    def program_synchronises(self) -> None:
        """The program has set ``accelerator.sync_gradients``, which Accelerate's own ``backward()`` reads."""
        self._says_when = True

    def backward_begins(self, synchronises: bool) -> None:
        """``accelerator.backward()`` begins.

        Raises:
            RuntimeError: a window was complete, the next one begins, and the program has never stepped.
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
        """The program asks the engine for the norm of its last step.

        Where it sets ``accelerator.sync_gradients`` itself, has made the backward that completes the window, and has
        never called ``optimizer.step()``, it takes the step for done: by the backward.
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
        """``optimizer.step()`` was called, or another call that only a program that steps there makes."""
        if self._decided_here:  # and no backward has come since: the step that this would be has been taken, once
            self.on_backward = False
        self._undecided = self._decided_here = False

    @property
    def _never_stepped(self) -> bool:
        return self._undecided and self._zerosync.report is None

    def check_end(self, num_steps: int) -> None:
        """The training ends.

        Raises:
            RuntimeError: the program made more backwards than the ``num_steps`` of one window, and never stepped.
        """
        made = self._zerosync.window.unused
        if self._never_stepped and self._complete and made > num_steps:
            raise RuntimeError(
                f"end_training() was called after {made} backwards and no optimizer step: nothing was trained. Call"
                f" optimizer.step(). {REMEDY}"
            )
