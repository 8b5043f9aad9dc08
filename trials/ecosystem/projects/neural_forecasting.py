"""neuralforecast: NHITS by NeuralForecast, which makes the Trainer from what its model was given."""

from typing import Any

import numpy as np
import pandas as pd
from neuralforecast import NeuralForecast
from neuralforecast.models import NHITS

LIBRARY = "pytorch_lightning"
PLAIN = "ddp_find_unused_parameters_true"


def fit(options: dict[str, Any]) -> None:
    days = pd.date_range("2020-01-01", periods=48)
    frame = pd.concat(
        pd.DataFrame({"unique_id": str(n), "ds": days, "y": np.sin(np.arange(48) / (2 + n))}) for n in range(16)
    )
    given = {name: value for name, value in options.items() if name != "max_epochs"}
    model = NHITS(
        h=4, input_size=8, mlp_units=3 * [[64, 64]], batch_size=2, windows_batch_size=8, learning_rate=0.01, **given
    )
    NeuralForecast(models=[model], freq="D").fit(frame)
