"""What several projects train on."""

from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset


def loader(*tensors: torch.Tensor, batch_size: int = 4) -> DataLoader[Any]:
    """In order; Lightning gives each rank its part."""
    return DataLoader(TensorDataset(*tensors), batch_size=batch_size)
