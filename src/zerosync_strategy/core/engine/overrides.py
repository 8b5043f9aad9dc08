"""What ZeroSync overrides of DeepSpeed where there is no optimizer (``interpose.py``)."""

from __future__ import annotations


class InferenceOverrides:
    """Overrides of what gathers ZeRO-3 parameters where there is no optimizer."""

    def _restore_from_bit16_weights(self) -> None:
        """Does nothing: DeepSpeed 0.19.8 asks for it, and only an optimizer has it."""
