"""torch-spatiotemporal: an RNN on the nodes of a graph and a GCN over them, in its Predictor and data module."""

from typing import Any

import numpy as np
import torch
from pytorch_lightning import Trainer
from tsl.data import SpatioTemporalDataModule, SpatioTemporalDataset
from tsl.engines import Predictor
from tsl.metrics.torch import MaskedMAE
from tsl.nn.models import RNNEncGCNDecModel

LIBRARY = "pytorch_lightning"


def fit(options: dict[str, Any]) -> None:
    series = np.sin(np.arange(120)[:, None] / np.array([3.0, 5.0, 7.0])).astype(np.float32)
    edges = np.array([[0, 1, 1, 2], [1, 0, 2, 1]])
    data = SpatioTemporalDataset(series, connectivity=(edges, None), horizon=4, window=8, stride=1)
    predictor = Predictor(
        model=RNNEncGCNDecModel(
            input_size=1, hidden_size=16, output_size=1, horizon=4, rnn_layers=1, gcn_layers=1, exog_size=0
        ),
        loss_fn=MaskedMAE(), optim_class=torch.optim.Adam, optim_kwargs={"lr": 0.01},
    )  # fmt: skip
    Trainer(**options).fit(predictor, SpatioTemporalDataModule(data, batch_size=4))
