"""From FSDP2: torchrun --nproc_per_node 2 docs/code/migrate_fsdp2.py"""

import os

import deepspeed
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from zerosync_strategy import attach, prepare_cpu

device = "cuda" if torch.cuda.is_available() else "cpu"
if device == "cpu":
    prepare_cpu()
deepspeed.init_distributed("nccl" if device == "cuda" else "gloo")


def make():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1)).to(device)


def data():
    torch.manual_seed(1 + int(os.environ["RANK"]))
    return [torch.randn(4, 8, device=device) for _ in range(4)]


def before(model, batches):
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    # --8<-- [start:before]
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    for number, batch in enumerate(batches, 1):
        last = number == len(batches)
        model.set_requires_gradient_sync(last)
        model.set_reshard_after_backward(last)
        (model(batch).square().mean() / len(batches)).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    # --8<-- [end:before]
    norm = norm.full_tensor()
    return norm, [param.full_tensor() for param in model.parameters()]


def after(model, batches):
    # --8<-- [start:after]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 3},
        "zerosync": {"param_memory_budget": "all"},
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    zerosync = attach(engine)

    for batch in batches:
        (engine(batch).square().mean() / len(batches)).backward()
    norm = zerosync.gradient_norm()
    engine.step()
    # --8<-- [end:after]
    with zerosync.full_parameters():
        return norm, [param.detach().clone() for param in engine.module.parameters()]


old_norm, old = before(make(), data())
new_norm, new = after(make(), data())
difference = max((a - b).abs().max().item() for a, b in zip(old, new, strict=True))
if dist.get_rank() == 0:
    print(f"norms {old_norm.item():.6f} and {new_norm.item():.6f}; largest difference of a parameter {difference}")
dist.destroy_process_group()
