"""Lightning Fabric. Two ranks on CPU, or every GPU: python docs/code/train_fabric.py"""

import torch
from lightning.fabric import Fabric
from torch.nn.functional import mse_loss

from zerosync_strategy.fabric import ZeroSyncFabricStrategy


def loss_of(model, batch):
    return mse_loss(model(batch), batch.sum(1, keepdim=True))


if __name__ == "__main__":
    gpu = torch.cuda.is_available()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    strategy = ZeroSyncFabricStrategy(stage=3)
    fabric = Fabric(strategy=strategy, accelerator="cuda" if gpu else "cpu", devices=-1 if gpu else 2)
    fabric.launch()
    batches = fabric.setup_dataloaders(torch.utils.data.DataLoader(torch.randn(512, 16), batch_size=8))
    # --8<-- [start:loop]
    model, optimizer = fabric.setup(model, optimizer)

    for number, batch in enumerate(batches, 1):
        with fabric.no_backward_sync(model, enabled=number % 8 != 0):
            fabric.backward(loss_of(model, batch) / 8)
        if number % 8 == 0:
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
    # --8<-- [end:loop]
    fabric.print(strategy.zerosync.report)
    # --8<-- [start:saving]
    fabric.save("out/docs-fabric", {"model": model, "optimizer": optimizer, "number": number})
    state = {"model": model, "optimizer": optimizer, "number": 0}
    fabric.load("out/docs-fabric", state)
    strategy.zerosync.export("out/docs-fabric/weights")  # weights in full, as model.safetensors
    # --8<-- [end:saving]
    fabric.print("loaded, at batch", state["number"])
