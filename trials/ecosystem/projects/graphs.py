"""torch-geometric: a graph network on its batches, by its LightningDataset."""

from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GAT, global_mean_pool


class Classifier(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = GAT(8, 16, num_layers=2, out_channels=3, heads=2)

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        found = global_mean_pool(self.net(batch.x, batch.edge_index), batch.batch)
        return torch.nn.functional.cross_entropy(found, batch.y)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def fit(options: dict[str, Any]) -> None:
    graphs = []
    for number in range(64):
        nodes = 3 + number % 5
        graphs.append(Data(torch.randn(nodes, 8), torch.randint(nodes, (2, 3 * nodes)), y=torch.tensor([number % 3])))
    Trainer(**options).fit(Classifier(), DataLoader(graphs, batch_size=4))
