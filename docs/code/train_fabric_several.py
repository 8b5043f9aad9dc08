"""Lightning Fabric, two models with their optimizers: python docs/code/train_fabric_several.py"""

import torch
from lightning.fabric import Fabric
from torch.nn.functional import softplus

from zerosync_strategy.fabric import ZeroSyncFabricStrategy

if __name__ == "__main__":
    torch.manual_seed(0)
    generator, discriminator = torch.nn.Linear(4, 16), torch.nn.Linear(16, 1)
    of_generator = torch.optim.Adam(generator.parameters())
    of_discriminator = torch.optim.Adam(discriminator.parameters())
    fabric = Fabric(strategy=ZeroSyncFabricStrategy(stage=2), accelerator="cpu", devices=2)
    fabric.launch()
    # --8<-- [start:several]
    generator, of_generator = fabric.setup(generator, of_generator)
    discriminator, of_discriminator = fabric.setup(discriminator, of_discriminator)

    loss_of_generator = softplus(-discriminator(generator(torch.randn(8, 4)))).mean()
    fabric.backward(loss_of_generator, model=generator)  # Fabric wants to be told one of several
    of_generator.step()
    of_discriminator.zero_grad()  # as without ZeRO, it has gradients of this backward too
    # --8<-- [end:several]
    fabric.print("stepped, loss", loss_of_generator.item())
