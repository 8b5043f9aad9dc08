"""One way to train the small problem under Accelerate on forked ranks, and the same on the oracle."""

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import GradientAccumulationPlugin
from torch.utils.data import DataLoader

from tests.harness.oracle import full_parameters
from tests.harness.problem import MICRO, Data, network, sgd
from zerosync_strategy import ZeroSyncPlugin

DECAY = 0.9


@dataclass
class Run:
    """What a script has under Accelerate."""

    accelerator: Accelerator
    model: Any
    optimizer: Any
    loader: Any
    scheduler: Any
    data: Data

    @property
    def zerosync(self) -> Any:
        return self.accelerator.deepspeed_engine_wrapped.zerosync

    def batch(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.data.batch(index, self.accelerator.process_index)

    def parameters(self) -> dict[str, torch.Tensor]:
        return full_parameters(self.accelerator.unwrap_model(self.model))


def start(
    stage: int, *, batches: int = 12, accumulate: int = 1, sync_with_dataloader: bool = True,
    optimizer: Callable[[Any], torch.optim.Optimizer] = sgd, dynamo_plugin: Any = None,
    make: Callable[[], torch.nn.Module] = network, **options: Any,
) -> Run:  # fmt: skip
    """Prepare everything on this rank."""
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    accelerator = Accelerator(
        deepspeed_plugin=ZeroSyncPlugin(stage=stage, **options),
        dynamo_plugin=dynamo_plugin,
        gradient_accumulation_plugin=GradientAccumulationPlugin(
            num_steps=accumulate, sync_with_dataloader=sync_with_dataloader
        ),
    )
    data, model = Data(batches), make()
    torch_optimizer = optimizer(model.parameters())
    scheduler = torch.optim.lr_scheduler.ExponentialLR(torch_optimizer, DECAY)
    loader = DataLoader(data, batch_size=MICRO)
    return Run(accelerator, *accelerator.prepare(model, torch_optimizer, loader, scheduler), data)


def launched(stage: int, **options: Any) -> dict[str, str]:
    """What ``accelerate launch`` tells the ranks; with options of ours."""
    config = {
        "zero_optimization": {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True},
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "zerosync": options,
    }
    return {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": json.dumps(config)}
