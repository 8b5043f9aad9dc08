"""ZeroSync under Hugging Face Accelerate.

After this import, every DeepSpeed configuration with a ``"zerosync"`` block trains with ZeroSync, also if Accelerate
reads the configuration by itself, as under ``accelerate launch``. Other configurations train as before.
"""

from zerosync_strategy.accelerate import install
from zerosync_strategy.accelerate.plugin import ZeroSyncPlugin

install.install()

__all__ = ["ZeroSyncPlugin"]
