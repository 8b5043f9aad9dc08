"""finetuning-scheduler: its callback, which thaws the model by a schedule."""

from typing import Any

import torch
from finetuning_scheduler import FinetuningScheduler
from lightning.pytorch import LightningModule, Trainer

from tests.ecosystem.projects.data import loader

PLAIN = "ddp_find_unused_parameters_true"


class Classifier(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 3))

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        inputs, labels = batch
        return torch.nn.functional.cross_entropy(self.net(inputs), labels)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.05)


def fit(options: dict[str, Any]) -> None:
    schedule = {
        0: {"params": ["net.2.weight", "net.2.bias"], "max_transition_epoch": 2},
        1: {"params": ["net.0.weight"], "max_transition_epoch": 8},
    }
    # Without `allow_untested`, it takes no strategy with DeepSpeed.
    thaw = FinetuningScheduler(
        ft_schedule=schedule, epoch_transitions_only=True, restore_best=False, allow_untested=True
    )
    options["callbacks"].append(thaw)
    options |= {"enable_checkpointing": True, "max_epochs": 10}
    Trainer(**options).fit(Classifier(), loader(torch.randn(16, 16), torch.arange(16) % 3))
