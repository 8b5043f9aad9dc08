"""deeptab: its FT-Transformer by the estimator, which makes the Trainer."""

from typing import Any

import numpy as np
import pandas as pd
from deeptab.models import FTTransformerRegressor


def fit(options: dict[str, Any]) -> None:
    numbers = np.random.default_rng(0)
    frame = pd.DataFrame({"one": numbers.normal(size=96), "two": numbers.normal(size=96), "kind": list("abc") * 32})
    target = (frame["one"] * 2 + (frame["kind"] == "a")).to_numpy()
    options |= {"enable_checkpointing": True, "monitor": "train_loss"}
    FTTransformerRegressor().fit(frame, target, X_val=frame, y_val=target, batch_size=4, **options)
