"""Accelerate. Two ranks on CPU:

accelerate launch --config_file examples/accelerate/zerosync_cpu.yaml docs/code/train_accelerate.py
"""

import torch
from accelerate import Accelerator
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader

from zerosync_strategy import ZeroSyncPlugin

accelerator = Accelerator(deepspeed_plugin=ZeroSyncPlugin(stage=3), gradient_accumulation_steps=8)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
batches = DataLoader(torch.randn(512, 16), batch_size=8)
model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
for batch in batches:
    with accelerator.accumulate(model):
        loss = mse_loss(model(batch), batch.sum(1, keepdim=True))
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
accelerator.print(f"loss {loss.item():.3f}, norm {norm:.3f}")
accelerator.print(accelerator.deepspeed_engine_wrapped.zerosync.report)
# --8<-- [start:saving]
accelerator.save_state("out/docs-accelerate")  # to go on from
accelerator.load_state("out/docs-accelerate")
accelerator.save_model(model, "out/docs-accelerate/weights")  # weights in full, as model.safetensors
# --8<-- [end:saving]
accelerator.end_training()
