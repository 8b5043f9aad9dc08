"""Plain DeepSpeed. Two ranks: torchrun --nproc_per_node 2 docs/code/train_deepspeed.py"""

# --8<-- [start:loop]
import os

import deepspeed
import torch
from torch.nn.functional import mse_loss

from zerosync_strategy import attach, prepare_cpu

if not torch.cuda.is_available():
    prepare_cpu()  # before DeepSpeed starts
torch.manual_seed(0)  # the same model on every rank
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
config = {
    "train_micro_batch_size_per_gpu": 8,
    "gradient_accumulation_steps": 1,  # the loop below accumulates
    "gradient_clipping": 0.0,  # DeepSpeed's own default is 1.0
    "zero_optimization": {"stage": 2},
}
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
zerosync = attach(engine)

torch.manual_seed(1 + int(os.environ["RANK"]))  # other data on every rank
for _step in range(20):
    for _ in range(4):
        x = torch.randn(8, 16, device=engine.device)
        loss = mse_loss(engine(x), x.sum(1, keepdim=True))
        engine.backward(loss / 4)  # or (loss / 4).backward()
    engine.step()  # the only reduction of the gradients
if engine.global_rank == 0:
    print(f"loss {loss.item():.3f}")
    print(zerosync.report)
# --8<-- [end:loop]

# --8<-- [start:gradients]
# Averaged gradients, between the last backward and the step:
engine.backward(mse_loss(engine(x), x.sum(1, keepdim=True)))
norm = zerosync.gradient_norm()  # of the average, the same on every rank
with zerosync.full_gradients():  # each parameter has its average in param.grad
    torch.nn.utils.clip_grad_value_(model.parameters(), 0.5)  # the step uses what is left there
engine.step()
# --8<-- [end:gradients]

# --8<-- [start:parameters]
# Parameters in full, on every stage; what is written stays:
with zerosync.full_parameters(), torch.no_grad():
    for param in model.parameters():
        param.clamp_(-1, 1)
# --8<-- [end:parameters]

# --8<-- [start:saving]
# Collective, each of them: call it on all ranks.
engine.save_checkpoint("out/docs-deepspeed")  # to go on from
engine.load_checkpoint("out/docs-deepspeed")
zerosync.export("out/docs-deepspeed/weights")  # weights in full, as model.safetensors
# --8<-- [end:saving]

zerosync.detach()  # what trains on is DeepSpeed's own engine
engine.destroy()
torch.distributed.destroy_process_group()
