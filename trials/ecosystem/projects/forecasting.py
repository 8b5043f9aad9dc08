"""pytorch-forecasting: its temporal fusion transformer, on its own data set."""

from typing import Any

import numpy as np
import pandas as pd
from lightning.pytorch import Trainer
from pytorch_forecasting import TemporalFusionTransformer, TimeSeriesDataSet
from pytorch_forecasting.metrics import QuantileLoss

PLAIN = "ddp_find_unused_parameters_true"


def fit(options: dict[str, Any]) -> None:
    steps = np.arange(40)
    frame = pd.concat(
        pd.DataFrame({"time": steps, "series": str(n), "value": np.sin(steps / (2 + n)) + 0.1 * n}) for n in range(4)
    ).reset_index(drop=True)
    data = TimeSeriesDataSet(
        frame, time_idx="time", target="value", group_ids=["series"], max_encoder_length=8, max_prediction_length=4,
        static_categoricals=["series"], time_varying_known_reals=["time"], time_varying_unknown_reals=["value"],
    )  # fmt: skip
    model = TemporalFusionTransformer.from_dataset(
        data, learning_rate=0.01, hidden_size=8, attention_head_size=2, dropout=0.0, hidden_continuous_size=4,
        loss=QuantileLoss(), optimizer="adam", log_interval=-1,
    )  # fmt: skip
    Trainer(**options).fit(model, data.to_dataloader(train=False, batch_size=8, num_workers=0))
