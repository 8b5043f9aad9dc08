"""Lightning's own DeepSpeed strategy without its CUDA-only gates: the base of ``ZeroSyncStrategy``, and a baseline."""

from __future__ import annotations

from typing import Any

import torch
from typing_extensions import override

from zerosync_strategy import frontend

from .library import (
    CPUAccelerator,
    CUDAAccelerator,
    DDPStrategy,
    DeepSpeedStrategy,
    MisconfigurationException,
    reset_seed,
)


class DeepSpeedAnyDeviceStrategy(DeepSpeedStrategy):
    """``DeepSpeedStrategy`` that runs on CPU with gloo as well as on CUDA; otherwise stock, its defects included."""

    @override
    def setup_environment(self) -> None:
        if not isinstance(self.accelerator, (CUDAAccelerator, CPUAccelerator)):
            raise MisconfigurationException(
                f"{type(self).__name__} runs on CUDA or on CPU, got {type(self.accelerator).__name__}. Use"
                " Trainer(accelerator='cuda') or Trainer(accelerator='cpu')."
            )
        if not self._on_cpu:
            return super().setup_environment()
        if problem := frontend.prepare_device("cpu", getattr(self.precision_plugin, "precision", None)):
            raise MisconfigurationException(problem)
        DDPStrategy.setup_environment(self)  # skips the check of DeepSpeedStrategy

    @override
    def setup_distributed(self) -> None:
        if not self._on_cpu:
            return super().setup_distributed()
        reset_seed()
        self.set_world_ranks()
        self._init_deepspeed_distributed()

    @override
    def _setup_model_and_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        with frontend.building_engine(self):
            return super()._setup_model_and_optimizer(*args, **kwargs)

    @override
    def _initialize_deepspeed_inference(self, model: torch.nn.Module) -> None:
        with frontend.building_engine(self):
            super()._initialize_deepspeed_inference(model)

    @override
    def _auto_select_batch_size(self) -> int:
        try:
            return super()._auto_select_batch_size()
        except AttributeError:  # a loader without a batch sampler; DeepSpeed only logs its throughput by the size
            return 1

    @property
    def _on_cpu(self) -> bool:
        return isinstance(self.accelerator, CPUAccelerator)
