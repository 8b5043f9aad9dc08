"""LitGPT: its GPT in a module of Lightning, with its loss in chunks, as its documentation has it."""

from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from litgpt.config import Config
from litgpt.model import GPT
from litgpt.utils import chunked_cross_entropy

from trials.ecosystem.projects.data import loader


class Gpt(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = GPT(Config(block_size=32, padded_vocab_size=64, n_layer=2, n_head=4, n_embd=32))

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        (tokens,) = batch
        return chunked_cross_entropy(self.net(tokens[:, :-1]), tokens[:, 1:], chunk_size=8)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.001)


def fit(options: dict[str, Any]) -> None:
    Trainer(**options).fit(Gpt(), loader(torch.randint(64, (64, 17))))
