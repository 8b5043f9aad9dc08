"""Train a small mixture-of-experts GPT whose experts are on groups of ranks, with ZeRO-3 under Lightning.

    python examples/lightning_moe.py               # four ranks on CPU, or every GPU there is

Half of the ranks have half of the experts, and exchange tokens with the other half. An expert's parameters are sharded
over the ranks that have it, all others over all ranks. What to look at: `configure_model`, which says so by a mesh and
`shard_over`, and `on_fit_end`, which tells who holds what.
"""

import argparse
import logging
import os
import warnings
from typing import Any

import torch
from gpt import next_byte_loss
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.utilities import rank_zero_only
from moe import MixtureOfExperts, MoEGPT
from text import Windows, read_standard_library
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader

from zerosync_strategy import ZeroSyncStrategy, shard_over

BATCH = 4  # pieces of text per rank and backward
BALANCE = 0.01  # weight of the loss that spreads tokens evenly over experts


class Module(LightningModule):
    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        self.options = options
        self.gpt: Any = None

    def configure_model(self) -> None:
        if self.gpt is not None:
            return
        options, ranks = self.options, self.trainer.world_size
        device = self.trainer.strategy.root_device.type
        mesh = init_device_mesh(device, (options.parts, ranks // options.parts), mesh_dim_names=("experts", "shards"))

        def mixture() -> MixtureOfExperts:
            held_by = shard_over(mesh["shards"])
            return MixtureOfExperts(options.width, options.experts, mesh["experts"].get_group(), held_by)

        self.gpt = MoEGPT(options.layers, options.width, options.context, mixture)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = next_byte_loss(self.gpt(batch), batch)
        self.log("loss", loss, prog_bar=True)
        return loss + BALANCE * self.gpt.uneven()

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("val_loss", next_byte_loss(self.gpt(batch), batch), sync_dist=True, prog_bar=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.options.lr)

    def on_fit_end(self) -> None:
        report = self.trainer.strategy.zerosync.report
        print_outcome(self, report)


@rank_zero_only
def print_outcome(module: Module, report: Any) -> None:
    sharded: dict[int, int] = {}
    for param in module.parameters():
        over = torch.distributed.get_world_size(param.ds_process_group)
        sharded[over] = sharded.get(over, 0) + param.ds_numel
    print(f"\nValidation loss: {float(module.trainer.callback_metrics['val_loss']):.3f} nats per byte")
    for over, size in sorted(sharded.items()):
        print(f"Of rank 0's parameters, {size:,} are sharded over {over} ranks")
    print(f"The last optimizer step: {report.backwards} backwards, {report.reductions} reduction of the gradients")
    for kind, traffic in sorted(report.collectives.items()):
        print(f"  {kind}: {traffic.calls} calls, {traffic.bytes / 1e6:.2f} MB sent by rank 0")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, help="ranks, an even number (default: every GPU, or 4 on CPU)")
    parser.add_argument("--parts", type=int, default=2, help="groups of ranks that have different experts (default: 2)")
    parser.add_argument("--experts", type=int, default=4)
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps (default: 60)")
    parser.add_argument("--accumulate", type=int, default=2, help="backwards per optimizer step (default: 2)")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--context", type=int, default=64, help="bytes that the model sees")
    parser.add_argument("--lr", type=float, default=3e-3)
    options = parser.parse_args()
    gpus = torch.cuda.device_count()
    options.devices = options.devices or gpus or 4
    if options.devices % options.parts or options.experts % options.parts:
        raise SystemExit(f"--parts {options.parts} must divide --devices {options.devices} and --experts.")
    warnings.filterwarnings("ignore", module="(lightning|torch|deepspeed)")
    for name in ("lightning.pytorch", "lightning.fabric", "DeepSpeed"):
        logging.getLogger(name).setLevel(logging.ERROR)
    if not gpus:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // options.devices))

    seed_everything(0, verbose=False)
    training, validation = read_standard_library()
    pieces = Windows(training, options.steps * options.accumulate * BATCH * options.devices, options.context)
    trainer = Trainer(
        strategy=ZeroSyncStrategy(stage=3, param_memory_budget="all"), accelerator="cuda" if gpus else "cpu",
        devices=options.devices, max_epochs=1, accumulate_grad_batches=options.accumulate, gradient_clip_val=1.0,
        num_sanity_val_steps=0, logger=False, enable_checkpointing=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(
        Module(options), DataLoader(pieces, BATCH), DataLoader(Windows(validation, 128, options.context), BATCH)
    )


if __name__ == "__main__":
    main()
