"""What ``zerosync_strategy.fabric`` uses of Lightning Fabric, from the package ``lightning_fabric``."""

from lightning_fabric.accelerators import CPUAccelerator, CUDAAccelerator
from lightning_fabric.plugins import TorchCheckpointIO
from lightning_fabric.plugins.precision import DeepSpeedPrecision, Precision
from lightning_fabric.strategies import DDPStrategy, DeepSpeedStrategy
from lightning_fabric.utilities.exceptions import MisconfigurationException

PACKAGE = "lightning_fabric"
