"""pytorch-lifestream: CoLES on sequences of events, with its encoder, data module and loss."""

from functools import partial
from typing import Any

import torch
from ptls.frames import PtlsDataModule
from ptls.frames.coles import ColesDataset, CoLESModule
from ptls.frames.coles.split_strategy import SampleSlices
from ptls.nn import RnnSeqEncoder, TrxEncoder
from pytorch_lightning import Trainer

LIBRARY = "pytorch_lightning"


def fit(options: dict[str, Any]) -> None:
    numbers = torch.Generator().manual_seed(0)
    rows = [{"event_time": torch.arange(40), "kind": torch.randint(1, 8, (40,), generator=numbers)} for _ in range(64)]
    encoder = TrxEncoder(embeddings={"kind": {"in": 8, "out": 8}})
    model = CoLESModule(
        seq_encoder=RnnSeqEncoder(trx_encoder=encoder, hidden_size=16, type="gru"),
        optimizer_partial=partial(torch.optim.Adam, lr=0.01),
        lr_scheduler_partial=partial(torch.optim.lr_scheduler.StepLR, step_size=10),
    )
    data = ColesDataset(rows, SampleSlices(split_count=3, cnt_min=8, cnt_max=16))
    Trainer(**options).fit(model, PtlsDataModule(train_data=data, train_batch_size=4, train_num_workers=0))
