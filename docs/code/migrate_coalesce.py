"""From DeepSpeed's coalesce_grad_reduction: torchrun --nproc_per_node 2 docs/code/migrate_coalesce.py"""

import os

import deepspeed
import torch

from zerosync_strategy import attach, prepare_cpu

if not torch.cuda.is_available():
    prepare_cpu()
config = {
    "train_micro_batch_size_per_gpu": 4, "gradient_clipping": 0.0, "zero_optimization": {"stage": 2},
}  # fmt: skip


def make():
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    torch.manual_seed(1 + int(os.environ["RANK"]))
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def losses(engine):
    for _ in range(4):
        yield engine(torch.randn(4, 8, device=engine.device)).square().mean() / 4


def before(engine):
    # --8<-- [start:before]
    with engine.coalesce_grad_reduction():
        for loss in losses(engine):
            engine.backward(loss)
    engine.step()
    # --8<-- [end:before]


def after(engine):
    # --8<-- [start:after]
    attach(engine)  # once, after deepspeed.initialize()

    for loss in losses(engine):
        engine.backward(loss)  # or loss.backward()
    engine.step()
    # --8<-- [end:after]


results = []
for step in (before, after):
    engine = make()
    step(engine)
    results.append(torch.cat([param.detach().flatten() for param in engine.module.parameters()]))
    engine.destroy()
print("largest difference", (results[0] - results[1]).abs().max().item())
torch.distributed.destroy_process_group()
