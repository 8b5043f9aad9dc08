"""The systems that run under Lightning's Trainer: ``Trainer.fit`` with ``accumulate_grad_batches``."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy, Strategy
from systems import TIMEOUT, System, engine_config, gpt, make_model, make_optimizer, report_of, shard

from zerosync_strategy import ZeroSyncStrategy
from zerosync_strategy.lightning import DeepSpeedAnyDeviceStrategy


class UnderTrainer(System):
    """A module that the Trainer trains with one strategy. The environment says which rank this is, as torchrun does."""

    def __init__(self, module: GPTModule, strategy: Strategy, accumulate: int) -> None:
        self.lightning_module = module
        self.module = module.gpt
        self.strategy = strategy
        devices = int(os.environ["LOCAL_WORLD_SIZE"])
        self.trainer = Trainer(
            accelerator="cpu",
            strategy=strategy,
            devices=devices,
            num_nodes=int(os.environ["WORLD_SIZE"]) // devices,
            accumulate_grad_batches=accumulate,
            max_epochs=1,
            use_distributed_sampler=False,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
        )

    @property
    def steps(self) -> int:  # type: ignore[override]
        return self.trainer.global_step

    def run(self, turns: Iterable[Sequence[torch.Tensor]]) -> None:
        self.trainer.fit(self.lightning_module, Loader(turns))

    def report(self) -> dict[str, int]:
        return report_of(self.strategy.zerosync) if isinstance(self.strategy, ZeroSyncStrategy) else {}


class Loader:
    """The micro-batches of all turns. A turn is asked for with its first micro-batch.

    The length is more than any run has. Because there is one, Lightning fetches nothing ahead; because it is not
    reached, no micro-batch is the last one of an epoch, where Lightning steps whatever was accumulated.
    """

    def __init__(self, turns: Iterable[Sequence[torch.Tensor]]) -> None:
        self.turns = turns

    def __len__(self) -> int:
        return 10**9

    def __iter__(self) -> Iterator[torch.Tensor]:
        for batches in self.turns:
            yield from batches


class GPTModule(LightningModule):
    """The GPT as a LightningModule."""

    def __init__(self, model: str) -> None:
        super().__init__()
        self.gpt = make_model(model)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return gpt.next_byte_loss(self.gpt(batch), batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return make_optimizer(self)


class ShardedGPTModule(GPTModule):
    """The same with FSDP2 of the given stage, applied where ``ModelParallelStrategy`` wants it."""

    def __init__(self, model: str, stage: int) -> None:
        super().__init__(model)
        self.stage = stage

    def configure_model(self) -> None:
        shard(self.gpt, self.device_mesh["data_parallel"], self.stage)


def make_lightning_system(name: str, model: str, accumulate: int) -> System:
    """A system by its name, which begins with ``lightning-``."""
    _, kind, stage, *variant = name.split("-")
    if kind == "fsdp2":
        world_size = int(os.environ["WORLD_SIZE"])
        parallel = ModelParallelStrategy(data_parallel_size=world_size, tensor_parallel_size=1, timeout=TIMEOUT)
        return UnderTrainer(ShardedGPTModule(model, int(stage)), parallel, accumulate)
    strategies = {"stock": DeepSpeedAnyDeviceStrategy, "zerosync": ZeroSyncStrategy}
    options: dict[str, Any] = {"param_memory_budget": "all"} if variant == ["held"] else {}
    strategy = strategies[kind](config=engine_config(int(stage)), timeout=TIMEOUT, **options)
    return UnderTrainer(GPTModule(model), strategy, accumulate)
