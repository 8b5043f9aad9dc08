"""GluonTS: the module, transformation and loader of its feed-forward estimator, in a Trainer.

``estimator.train()`` makes the Trainer itself, with a ModelCheckpoint, and opens what that has written as a file: under
DeepSpeed, ZeroSync or not, it is a folder.
"""

from typing import Any

import numpy as np
from gluonts.dataset.common import ListDataset
from gluonts.torch import SimpleFeedForwardEstimator
from lightning.pytorch import Trainer


def fit(options: dict[str, Any]) -> None:
    series = [{"start": "2020-01-01", "target": np.sin(np.arange(60) / (2 + n))} for n in range(4)]
    estimator = SimpleFeedForwardEstimator(
        prediction_length=4, context_length=8, hidden_dimensions=[16], batch_size=4, num_batches_per_epoch=16, lr=0.01
    )
    module = estimator.create_lightning_module()
    data = estimator.create_transformation().apply(ListDataset(series, freq="D"), is_train=True)
    Trainer(**options).fit(module, estimator.create_training_data_loader(data, module=module))
