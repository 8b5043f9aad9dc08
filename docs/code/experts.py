"""Parameters of some ranks only. Four ranks: torchrun --nproc_per_node 4 docs/code/experts.py"""

import deepspeed
import torch
from torch.distributed.device_mesh import init_device_mesh

from zerosync_strategy import attach, prepare_cpu, shard_over

device = "cuda" if torch.cuda.is_available() else "cpu"
if device == "cpu":
    prepare_cpu()
deepspeed.init_distributed("nccl" if device == "cuda" else "gloo")
config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 3}}

# --8<-- [start:experts]
mesh = init_device_mesh(device, (2, 2), mesh_dim_names=("experts", "shards"))
model = torch.nn.Sequential(torch.nn.Linear(8, 8))  # sharded over all four ranks
with shard_over(mesh["shards"]):
    model.append(torch.nn.Linear(8, 8))  # each pair of ranks has its own
# --8<-- [end:experts]

optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
zerosync = attach(engine)
engine.backward(engine(torch.randn(4, 8, device=engine.device)).square().mean())
engine.step()
print(f"rank {engine.global_rank} has in full: {sorted(zerosync.full_state())}")
engine.destroy()
torch.distributed.destroy_process_group()
