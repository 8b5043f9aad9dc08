"""GluonTS: a feed-forward forecaster by its estimator, which makes the Trainer itself."""

from typing import Any

import numpy as np
from gluonts.dataset.common import ListDataset
from gluonts.torch import SimpleFeedForwardEstimator

LIBRARY = "lightning.pytorch"


def fit(options: dict[str, Any]) -> None:
    series = [{"start": "2020-01-01", "target": np.sin(np.arange(60) / (2 + n))} for n in range(4)]
    estimator = SimpleFeedForwardEstimator(
        prediction_length=4, context_length=8, hidden_dimensions=[16], batch_size=4, num_batches_per_epoch=16, lr=0.01,
        trainer_kwargs=options | {"enable_checkpointing": True},
    )  # fmt: skip
    estimator.train(ListDataset(series, freq="D"), cache_data=True)
