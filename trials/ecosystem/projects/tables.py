"""deeptab: the module and data module of its MLP, in a Trainer.

``fit()`` makes the Trainer itself, with a ModelCheckpoint, and opens what that has written as a file: under DeepSpeed,
ZeroSync or not, it is a folder.
"""

from typing import Any

import numpy as np
import pandas as pd
from deeptab.models import MLPRegressor
from lightning.pytorch import Trainer


def fit(options: dict[str, Any]) -> None:
    numbers = np.random.default_rng(0)
    frame = pd.DataFrame({"one": numbers.normal(size=96), "two": numbers.normal(size=96), "kind": list("abc") * 32})
    target = (frame["one"] * 2 + (frame["kind"] == "a")).to_numpy()
    estimator = MLPRegressor()
    estimator.build_model(frame, target, X_val=frame, y_val=target, batch_size=4)
    Trainer(limit_val_batches=0, **options).fit(estimator._task_model, estimator._data_module)
