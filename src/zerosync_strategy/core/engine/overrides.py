"""What ZeroSync overrides of an engine that need not be attached (``interpose.py``)."""

from __future__ import annotations

from typing import Any

import torch

from zerosync_strategy.core.engine import checkpoint_files
from zerosync_strategy.core.engine.interpose import Stock


class InferenceOverrides:
    """Overrides of what gathers ZeRO-3 parameters where there is no optimizer."""

    def _restore_from_bit16_weights(self) -> None:
        """Does nothing: DeepSpeed 0.19.8 asks for it, and only an optimizer has it."""


class ModeOverrides(Stock):
    """Overrides of ``DeepSpeedEngine``: its mode is its module's. DeepSpeed's own says training for ever."""

    module: torch.nn.Module

    @property
    def training(self) -> bool:
        return self.module.training

    @training.setter
    def training(self, mode: bool) -> None:
        self.module.training = mode

    def train(self, mode: bool = True) -> Any:
        super().train(mode)
        return self  # as every other module; DeepSpeed returns nothing

    def eval(self) -> Any:
        super().eval()
        return self


class FrozenStay(Stock):
    """Overrides of ``DeepSpeedEngine``: frozen parameters stay as they are where a checkpoint has none."""

    module: torch.nn.Module

    def load_module_state_dict(
        self, checkpoint: dict[str, Any], strict: bool = True, custom_load_fn: Any = None, *args: Any, **kwargs: Any
    ) -> None:
        def load(src: dict[str, Any], dst: torch.nn.Module) -> None:
            custom_load_fn(src=src | checkpoint_files.frozen_missing(dst, src), dst=dst)

        if custom_load_fn is None:
            checkpoint["module"].update(checkpoint_files.frozen_missing(self.module, checkpoint["module"]))
        load_fn = None if custom_load_fn is None else load
        super().load_module_state_dict(checkpoint, strict, load_fn, *args, **kwargs)
