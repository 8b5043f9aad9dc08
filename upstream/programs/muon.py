"""Stock DeepSpeed's Muon: how many matrices each rank orthogonalizes in a step, and what it receives for that.

    TORCHDYNAMO_DISABLE=1 torchrun --nproc_per_node 2 upstream/programs/muon.py

Three matrices of 32 x 32, stages 2 and 3, with and without an offloaded optimizer. Each matrix needs one Newton-Schulz
iteration on one rank. The checksum of the parameters tells whether a change of DeepSpeed changes what is trained.
"""

import os
import warnings
from collections.abc import Callable
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import nn


def main() -> None:
    warnings.simplefilter("ignore")
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # or DeepSpeed looks for a compiler
    deepspeed.init_distributed("gloo")
    from deepspeed.runtime.zero.muon import original_muon

    counted = {"matrices": 0, "bytes": 0}
    update = original_muon.muon_update

    def counting_update(*args: Any, **options: Any) -> Any:
        counted["matrices"] += 1
        return update(*args, **options)

    original_muon.muon_update = counting_update

    def count(name: str, received: Callable[..., int]) -> None:
        stock = getattr(deepspeed.comm, name)

        def call(*args: Any, **options: Any) -> Any:
            counted["bytes"] += received(*args, **options)
            return stock(*args, **options)

        setattr(deepspeed.comm, name, call)

    rank, world = dist.get_rank(), dist.get_world_size()
    count("all_gather", lambda into, own, *_, **__: sum(each.nbytes for each in into) - own.nbytes)
    count("all_gather_into_tensor", lambda into, own, *_, **__: into.nbytes - own.nbytes)
    count("broadcast", lambda tensor, src, *_, **__: 0 if src == rank else tensor.nbytes)
    for stage in (2, 3):
        for offload in (False, True):
            torch.manual_seed(0)
            module = nn.Sequential(*[nn.Linear(32, 32, bias=False) for _ in range(3)])
            for param in module.parameters():
                param.use_muon = True
            engine, *_ = deepspeed.initialize(
                model=module, model_parameters=module.parameters(),
                config={
                    "train_micro_batch_size_per_gpu": 4,
                    "optimizer": {"type": "Muon", "params": {"lr": 0.02}},
                    "zero_force_ds_cpu_optimizer": False,
                    "zero_optimization": {
                        "stage": stage, "reduce_scatter": False, "stage3_param_persistence_threshold": 0,
                        **({"offload_optimizer": {"device": "cpu"}} if offload else {}),
                    },
                },
            )  # fmt: skip
            for step in range(2):
                x = torch.randn(4, 32, generator=torch.Generator().manual_seed(10 * step + rank))
                loss = (engine(x) - x).square().mean()
                counted.update(matrices=0, bytes=0)
                engine.backward(loss)
                engine.step()
            everyone: list[Any] = [None] * world
            dist.all_gather_object(everyone, dict(counted))
            with deepspeed.zero.GatheredParameters(list(module.parameters())):
                checksum = sum(param.double().abs().sum().item() for param in module.parameters())
            if rank == 0:
                matrices = [each["matrices"] for each in everyone]
                received = [round(each["bytes"] / 4096, 1) for each in everyone]
                print(
                    f"stage {stage}, offload {offload!s:5}: of 3 matrices, ranks orthogonalize {matrices} and receive"
                    f" {received} matrices' bytes; checksum {checksum:.9f}", flush=True,
                )  # fmt: skip
            engine.destroy()
    dist.destroy_process_group()


if __name__ == "__main__":
    assert os.environ.get("TORCHDYNAMO_DISABLE") == "1", "DeepSpeed's Muon asks for torch.compile"
    main()
