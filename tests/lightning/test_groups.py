"""Parameters over groups of ranks under Lightning: said in configure_model, trained exactly, resumed exactly."""

import os
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, TensorDataset

from tests.harness.groups import LAYOUTS, WORLD, Model, Reference, data, sgd, skips, values
from tests.harness.oracle import distance, full_parameters, value_of
from tests.harness.ranks import run_ranks
from tests.lightning.runs import make_trainer
from zerosync_strategy import ZeroSyncStrategy, shard_over

STEPS = 4


class Module(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net: Any = None

    def configure_model(self) -> None:
        if self.net is not None:
            return
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("third", "second"))
        dimensions = {"second": mesh["second"], "third": mesh["third"]}
        inner = deepspeed.zero.Init(data_parallel_group=mesh["second"].get_group())
        with pytest.raises(ValueError, match="Use 'with shard_over"), inner:
            pass
        self.net = Model(lambda name: shard_over(dimensions.get(name, torch.distributed.group.WORLD)))
        for name, param in self.net.named_parameters():
            layer, rank = name.split(".")[0], int(os.environ["RANK"])
            group = next(g for g in LAYOUTS["grid"].get(layer, [list(range(WORLD))]) if rank in g)
            with deepspeed.zero.GatheredParameters([param], modifier_rank=0):
                param.data.copy_(values(name, group, param.data))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.net(batch[0][0], skip=skips(batch_idx))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return sgd(self.parameters())


def loader() -> DataLoader:
    rank = int(os.environ["RANK"])
    return DataLoader(TensorDataset(torch.stack([data(k, rank) for k in range(2 * STEPS)])), batch_size=1)


def test_configure_model_shards_over_the_dimensions_of_a_mesh(tmp_path: Path) -> None:
    def run() -> Any:
        def train(epochs: int, ckpt_path: Any = None, **options: Any) -> tuple[Any, Any]:
            trainer = make_trainer(
                ZeroSyncStrategy(stage=3, **options), devices=WORLD, max_epochs=epochs, accumulate_grad_batches=2
            )
            module = Module()
            trainer.fit(module, loader(), ckpt_path=ckpt_path)
            return trainer, {name.removeprefix("net."): p for name, p in full_parameters(module).items()}

        trainer, once = train(1)
        trainer.save_checkpoint(tmp_path / "once")
        _, whole = train(2)
        _, resumed = train(2, ckpt_path=tmp_path / "once")
        torch.save(
            {"state_dict": {}, "pytorch-lightning_version": "2.6.6"}, one_file := tmp_path / f"{os.getpid()}.ckpt"
        )
        with pytest.raises(MisconfigurationException, match=r"some are sharded over groups .* by load_full_state\(\)"):
            train(2, ckpt_path=one_file, load_full_weights=True)
        reference = Reference(LAYOUTS["grid"], sgd)
        reference.train(STEPS)
        own = {name: value_of(param) for name, param in reference.of_rank(int(os.environ["RANK"])).items()}
        return distance(once, own), distance(resumed, whole)

    # The resumed run to the bit: it makes the same operations, from the same bits on the same layout.
    assert run_ranks(run, world_size=WORLD) == [(0.0, 0.0)] * WORLD
