"""scvi-tools: its variational autoencoder by the model's train(), which makes the Trainer."""

from typing import Any

import anndata
import numpy as np
import scvi
from scvi.model import SCVI

PLAIN = "ddp_find_unused_parameters_true"


def fit(options: dict[str, Any]) -> None:
    scvi.settings.seed = 1  # else it splits its data anew in every run
    counts = np.random.default_rng(0).poisson(3.0, (128, 20)).astype(np.float32)
    cells = anndata.AnnData(counts)
    SCVI.setup_anndata(cells)
    model = SCVI(cells, n_hidden=16, n_latent=4, n_layers=1, dropout_rate=0.0)
    model.train(train_size=1.0, batch_size=4, plan_kwargs={"lr": 0.01, "n_epochs_kl_warmup": None}, **options)
