"""darts: its N-BEATS, which makes the Trainer from what it was given."""

from typing import Any

import numpy as np
from darts import TimeSeries
from darts.models import NBEATSModel

LIBRARY = "pytorch_lightning"


def fit(options: dict[str, Any]) -> None:
    series = TimeSeries.from_values(np.sin(np.arange(160, dtype=np.float32) / 5))
    model = NBEATSModel(
        8, 4, num_stacks=2, num_blocks=1, num_layers=2, layer_widths=32, batch_size=4, optimizer_kwargs={"lr": 0.01},
        pl_trainer_kwargs=options,
    )  # fmt: skip
    model.fit(series)
