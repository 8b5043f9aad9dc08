"""What this layer uses of Lightning. The other files import no other name of it.

The other files import each other relatively, because ``zerosync_strategy.pytorch_lightning`` runs the same files with
its own ``library``, which imports every name from the package ``pytorch_lightning``.
"""

from typing import Any

from lightning.fabric.utilities.seed import reset_seed
from lightning.fabric.utilities.types import Steppable
from lightning.pytorch import Callback, LightningModule, Trainer, callbacks
from lightning.pytorch.accelerators import CPUAccelerator, CUDAAccelerator
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BaseFinetuning,
    GradientAccumulationScheduler,
    StochasticWeightAveraging,
    Timer,
)
from lightning.pytorch.plugins.precision import DeepSpeedPrecision, Precision
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy
from lightning.pytorch.utilities import GradClipAlgorithmType
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.types import LRSchedulerConfig

PACKAGE = "lightning.pytorch"
WEIGHT_AVERAGING: tuple[type[Any], ...] = tuple(
    getattr(callbacks, name) for name in ("WeightAveraging",) if hasattr(callbacks, name)
)
"""The callback that averages weights, in releases that have one."""
