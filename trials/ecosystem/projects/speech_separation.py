"""asteroid: Conv-TasNet in its System, with its permutation-invariant loss."""

from typing import Any

import torch
from asteroid.engine.system import System
from asteroid.losses import PITLossWrapper, pairwise_neg_sisdr
from asteroid.models import ConvTasNet
from pytorch_lightning import Trainer

from trials.ecosystem.projects.data import loader

LIBRARY = "pytorch_lightning"
PLAIN = "ddp_find_unused_parameters_true"  # the last block leads to no mask


def fit(options: dict[str, Any]) -> None:
    net = ConvTasNet(n_src=2, n_filters=16, n_blocks=2, n_repeats=1, bn_chan=8, hid_chan=16, skip_chan=8)
    sources = torch.randn(32, 2, 800)
    system = System(
        net,
        torch.optim.Adam(net.parameters(), lr=0.01),
        PITLossWrapper(pairwise_neg_sisdr, pit_from="pw_mtx"),
        loader(sources.sum(1), sources, batch_size=2),
        loader(sources.sum(1), sources, batch_size=2),
    )
    Trainer(limit_val_batches=0, **options).fit(system)
