"""scvi-tools: SCVI on counts, by its own train()."""

from typing import Any

import numpy as np
from anndata import AnnData
from scvi.model import SCVI

PLAIN = "ddp_find_unused_parameters_true"


def fit(options: dict[str, Any]) -> None:
    counts = np.random.default_rng(0).poisson(3.0, (128, 20)).astype(np.float32)
    data = AnnData(counts)
    SCVI.setup_anndata(data)
    model = SCVI(data, n_hidden=16, n_latent=4)
    given = {name: value for name, value in options.items() if name not in ("max_epochs", "accelerator", "devices")}
    model.train(
        max_epochs=100, accelerator="cpu", devices=options["devices"], batch_size=8, train_size=1.0,
        plan_kwargs={"lr": 0.01}, **given,
    )  # fmt: skip
