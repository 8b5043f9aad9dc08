"""What this layer uses of Lightning Fabric. The other files import no other name of it.

The other files import each other relatively, because ``zerosync_strategy.lightning_fabric`` runs the same files with
its own ``library``, which imports every name from the package ``lightning_fabric``.
"""

from lightning.fabric.accelerators import CPUAccelerator, CUDAAccelerator
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.fabric.plugins.precision import DeepSpeedPrecision, Precision
from lightning.fabric.strategies import DDPStrategy, DeepSpeedStrategy
from lightning.fabric.utilities.exceptions import MisconfigurationException

PACKAGE = "lightning.fabric"
