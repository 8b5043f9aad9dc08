"""Lightning's own DeepSpeed strategy without its CUDA-only gates: the base of ``ZeroSyncStrategy``, and a baseline."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.accelerators import CPUAccelerator, CUDAAccelerator
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from typing_extensions import override

from zerosync_strategy.core.engine.cpu import prepare_cpu


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
        precision = getattr(self.precision_plugin, "precision", None)
        if precision in ("16-true", "16-mixed"):
            raise MisconfigurationException(
                f"DeepSpeed does not train with precision={precision!r} on CPU. Use '32-true', 'bf16-mixed' or"
                " 'bf16-true', or a GPU."
            )
        prepare_cpu()
        DDPStrategy.setup_environment(self)  # past the gate of DeepSpeedStrategy

    @override
    def setup_distributed(self) -> None:
        if not self._on_cpu:
            return super().setup_distributed()
        reset_seed()
        self.set_world_ranks()
        self._init_deepspeed_distributed()

    @override
    def _setup_model_and_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        with self._device_index():
            return super()._setup_model_and_optimizer(*args, **kwargs)

    @override
    def _initialize_deepspeed_inference(self, model: torch.nn.Module) -> None:
        with self._device_index():
            super()._initialize_deepspeed_inference(model)

    @override
    def _auto_select_batch_size(self) -> int:
        try:
            return super()._auto_select_batch_size()
        except AttributeError:  # a loader without a batch sampler; DeepSpeed wants the number for its throughput log
            return 1

    @property
    def _on_cpu(self) -> bool:
        return isinstance(self.accelerator, CPUAccelerator)

    @contextmanager
    def _device_index(self) -> Iterator[None]:
        """DeepSpeed is given the index of the root device as the rank on this host; CPU devices have none."""
        devices = self.parallel_devices
        if self._on_cpu:
            self.parallel_devices = [torch.device("cpu", index) for index in range(len(devices or []))]
        try:
            yield
        finally:
            self.parallel_devices = devices
