"""pytorch-tabular: its TabularModel, which makes the Trainer from its configurations."""

from typing import Any

import numpy as np
import pandas as pd
from pytorch_tabular import TabularModel
from pytorch_tabular.config import DataConfig, OptimizerConfig, TrainerConfig
from pytorch_tabular.models import CategoryEmbeddingModelConfig

LIBRARY = "pytorch_lightning"


def fit(options: dict[str, Any]) -> None:
    strategy = options["strategy"]  # its configurations hold names, not objects
    name = strategy if isinstance(strategy, str) else f"zerosync_stage_{strategy.stage}"
    numbers = np.random.default_rng(0)
    frame = pd.DataFrame({"one": numbers.normal(size=96), "two": numbers.normal(size=96), "kind": list("abc") * 32})
    frame["target"] = frame["one"] * 2 + (frame["kind"] == "a")
    training = TrainerConfig(
        batch_size=4,
        max_epochs=2,
        accelerator="cpu",
        devices=options["devices"],
        accumulate_grad_batches=options["accumulate_grad_batches"],
        early_stopping=None,
        checkpoints=None,
        load_best=False,
        progress_bar="none",
        trainer_kwargs={"strategy": name, "enable_model_summary": False, "max_steps": options["max_steps"]},
    )
    model = TabularModel(
        data_config=DataConfig(target=["target"], continuous_cols=["one", "two"], categorical_cols=["kind"]),
        model_config=CategoryEmbeddingModelConfig(
            task="regression", layers="128-64", use_batch_norm=False, dropout=0.0
        ),
        optimizer_config=OptimizerConfig(optimizer="SGD"),
        trainer_config=training,
        verbose=False,
    )
    model.fit(train=frame, validation=frame, callbacks=options["callbacks"])
