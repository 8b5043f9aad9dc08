"""What ``zerosync_strategy.lightning`` uses of Lightning, from the package ``pytorch_lightning``."""

from typing import Any

from lightning_fabric.utilities.seed import reset_seed
from lightning_fabric.utilities.types import Steppable
from pytorch_lightning import Callback, LightningModule, Trainer, callbacks
from pytorch_lightning.accelerators import CPUAccelerator, CUDAAccelerator
from pytorch_lightning.callbacks import (
    BackboneFinetuning,
    BaseFinetuning,
    GradientAccumulationScheduler,
    StochasticWeightAveraging,
    Timer,
)
from pytorch_lightning.plugins.precision import DeepSpeedPrecision, Precision
from pytorch_lightning.strategies import DDPStrategy, DeepSpeedStrategy
from pytorch_lightning.utilities import GradClipAlgorithmType
from pytorch_lightning.utilities.exceptions import MisconfigurationException
from pytorch_lightning.utilities.types import LRSchedulerConfig

PACKAGE = "pytorch_lightning"
WEIGHT_AVERAGING: tuple[type[Any], ...] = tuple(
    getattr(callbacks, name) for name in ("WeightAveraging",) if hasattr(callbacks, name)
)
"""The callback that averages weights, in releases that have one."""
