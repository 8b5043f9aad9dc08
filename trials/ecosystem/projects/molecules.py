"""chemprop: its message passing network, which is a module of Lightning."""

from typing import Any

from chemprop import data, models, nn
from lightning.pytorch import Trainer


def fit(options: dict[str, Any]) -> None:
    smiles = ["C" * n + end for n in range(1, 17) for end in ("O", "N", "=O", "Cl")]
    points = [data.MoleculeDatapoint.from_smi(text, [len(text) / 8]) for text in smiles]
    loader = data.build_dataloader(data.MoleculeDataset(points), batch_size=4, shuffle=False)
    model = models.MPNN(
        nn.BondMessagePassing(d_h=16, depth=2), nn.MeanAggregation(), nn.RegressionFFN(input_dim=16, hidden_dim=16)
    )
    Trainer(**options).fit(model, loader)
