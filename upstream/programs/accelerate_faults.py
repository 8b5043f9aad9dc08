"""What stock Accelerate with DeepSpeed does otherwise than a PyTorch loop says, without an error; against plain torch.

torchrun --nproc_per_node 2 upstream/programs/accelerate_faults.py [--zerosync] [NAME ...]

"""

import argparse
import copy
import os
import warnings
from typing import Any

import deepspeed
import torch
from accelerate import Accelerator, InitProcessGroupKwargs
from accelerate.state import AcceleratorState
from accelerate.utils import DeepSpeedPlugin
from faults import report
from torch import nn

WITH_ZEROSYNC = False


def prepared(module: nn.Module) -> tuple[Accelerator, Any, Any]:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    config = {
        "train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0.0, "zero_allow_untested_optimizer": True,
        "gradient_accumulation_steps": 1, "zero_optimization": {"stage": 2},
    }  # fmt: skip
    AcceleratorState._reset_state(reset_partial_state=True)
    if WITH_ZEROSYNC:
        from zerosync_strategy import ZeroSyncPlugin

        plugin: DeepSpeedPlugin = ZeroSyncPlugin(hf_ds_config=config)
    else:
        plugin = DeepSpeedPlugin(hf_ds_config=config)
    gloo = InitProcessGroupKwargs(backend="gloo")  # without it, on CPU, every rank takes itself for the only one
    accelerator = Accelerator(deepspeed_plugin=plugin, kwargs_handlers=[gloo])
    assert accelerator.num_processes == int(os.environ["WORLD_SIZE"]), accelerator.num_processes
    return accelerator, *accelerator.prepare(module, optimizer)


def batch(number: int, rank: int) -> torch.Tensor:
    return torch.randn(2, 6, generator=torch.Generator().manual_seed(10 * number + rank))


def loss_of(output: torch.Tensor) -> torch.Tensor:
    return (output - 1).square().mean()


def in_plain_torch(plain: nn.Module, world: int, backwards: int, steps: int, max_norm: float = 0.0) -> nn.Module:
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        for k in range(backwards):
            losses = [loss_of(plain(batch(backwards * step + k, rank))) for rank in range(world)]
            (torch.stack(losses).mean() / backwards).backward()
        if max_norm:
            nn.utils.clip_grad_norm_(plain.parameters(), max_norm)
        optimizer.step()
    return plain


def apart(module: nn.Module, plain: nn.Module) -> float:
    return max((a - b).abs().max().item() for a, b in zip(module.parameters(), plain.parameters(), strict=True))


def several_backwards() -> float:
    """Four accelerator.backward() to one optimizer.step(): four steps."""
    module = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    plain = copy.deepcopy(module)
    accelerator, model, optimizer = prepared(module)
    for step in range(2):
        optimizer.zero_grad()
        for k in range(4):
            accelerator.backward(loss_of(model(batch(4 * step + k, accelerator.process_index))) / 4)
        optimizer.step()
    return apart(module, in_plain_torch(plain, accelerator.num_processes, 4, 2))


def clipping() -> float:
    """accelerator.clip_grad_norm_() before optimizer.step() clips nothing."""
    module = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    plain = copy.deepcopy(module)
    accelerator, model, optimizer = prepared(module)
    for step in range(2):
        optimizer.zero_grad()
        accelerator.backward(loss_of(model(batch(step, accelerator.process_index))))
        accelerator.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()
    return apart(module, in_plain_torch(plain, accelerator.num_processes, 1, 2, max_norm=0.01))


PROGRAMS = (several_backwards, clipping)


def main() -> None:
    global WITH_ZEROSYNC
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--zerosync", action="store_true")
    parser.add_argument("names", nargs="*", default=[program.__name__ for program in PROGRAMS])
    options = parser.parse_args()
    WITH_ZEROSYNC = options.zerosync
    warnings.simplefilter("ignore")
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"  # as `accelerate launch` does
    if not WITH_ZEROSYNC:
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # or DeepSpeed looks for a compiler
    report(PROGRAMS, options.names)


if __name__ == "__main__":
    main()
