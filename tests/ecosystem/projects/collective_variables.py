"""mlcolvar: a regression variable of its own, which is a module of Lightning, with its DictModule."""

from typing import Any

import torch
from lightning.pytorch import Trainer
from mlcolvar.cvs import RegressionCV
from mlcolvar.data import DictDataset, DictModule


def fit(options: dict[str, Any]) -> None:
    inputs = torch.randn(128, 4)
    data = DictDataset({"data": inputs, "target": inputs.square().sum(-1, keepdim=True)})
    module = DictModule(data, lengths=[0.5, 0.5], batch_size=4, shuffle=False)
    Trainer(limit_val_batches=0, **options).fit(RegressionCV(layers=[4, 64, 1]), module)
