"""What a step sends under an optimizer that needs whole parameters, by the number of ranks, against AdamW's.

    python benchmarks/whole_bytes.py --output benchmarks/results/<date>-whole-bytes

The model has matrices of one size and nothing else. This process is one rank of W on torch's fake process group, which
sends nothing: counted is what ZeroSync asks it to send in the third step, as its report has it: of a reduction to an
owner and of an all-to-all, what this rank sends; of another collective, the mean over the ranks. So the first rank,
which owns a matrix, and the last one, which may own none, are measured. The minimum is 2 (W-1)/W of the parameters'
bytes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import platform
from pathlib import Path
from typing import Any

WIDTH = 64
COLUMNS = ("stage", "matrices", "W", "rank", "AdamW", "Muon", "largest", "states", "matrices stepped")


def measure(optimizer: str, stage: int, matrices: int, world_size: int, rank: int, dtype: str) -> dict[str, Any]:
    """One rank's third step of one backward. In a process of its own."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(world_size)}
    os.environ["LOCAL_WORLD_SIZE"] = "8"
    import deepspeed
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from zerosync_strategy import attach, prepare_cpu
    from zerosync_strategy.core.engine import zero

    torch.set_num_threads(1)
    torch.manual_seed(0)
    prepare_cpu()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    model = torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(matrices)])
    made: Any = {"AdamW": torch.optim.AdamW, "Muon": torch.optim.Muon}[optimizer](model.parameters(), lr=1e-4)
    numel = matrices * WIDTH**2
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=made, dist_init_required=False,
        config={
            "train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": dtype == "bf16"}, "gradient_clipping": 0.0,
            "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False,
            "zero_optimization": {
                "stage": stage, "reduce_bucket_size": numel // 8, "stage3_prefetch_bucket_size": numel // 8,
            },
        },
    )  # fmt: skip
    zerosync = attach(engine, **({"param_memory_budget": "all"} if stage == 3 else {}))
    largest = 0
    backend = zero.comm_backend()

    def noted(name: str) -> Any:
        call = getattr(backend, name)

        def method(*args: Any, **kwargs: Any) -> Any:
            nonlocal largest
            tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor)]
            largest = max(largest, *(tensor.nbytes for tensor in tensors))
            tensors[0].nan_to_num_(0.0, 0.0, 0.0).clamp_(-1e-3, 1e-3)  # received: whatever was there
            return call(*args, **kwargs)

        return method

    for name in ("reduce", "broadcast", "reduce_scatter_tensor", "all_gather_into_tensor", "all_to_all_single"):
        setattr(backend, name, noted(name))
    for _ in range(3):
        engine.backward(engine(torch.ones(1, WIDTH, dtype=engine.optimizer.dtype)).float().square().mean())
        engine.step()
    assert not engine.skipped_steps
    itemsize = 2 if dtype == "bf16" else 4
    sent = {kind: traffic.bytes for kind, traffic in zerosync.report.collectives.items() if kind != "all_reduce"}
    states = sum(
        value.numel() for state in made.state.values() for value in state.values() if isinstance(value, torch.Tensor)
    )
    return {
        "ratio": sum(sent.values()) / (2 * (world_size - 1) / world_size * numel * itemsize),
        "largest": largest / (WIDTH**2 * itemsize),
        "states": states / (numel / world_size),
        "stepped": sum(len(group["params"]) for group in made.param_groups) if optimizer == "Muon" else 0,
        "sent": sent,
    }


def main() -> None:
    """Print the table, and write it."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed
    import torch

    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--output", type=Path, help="without a suffix; writes .json and .md")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--world-sizes", type=int, nargs="+", default=[8, 64, 256, 1024])
    parser.add_argument("--matrices", type=int, nargs="+", default=[16, 200])
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 3])
    options = parser.parse_args()
    lines, results = [], []
    context = multiprocessing.get_context("fork")  # of a process that has imported everything
    for stage, matrices, world_size in itertools.product(options.stages, options.matrices, options.world_sizes):
        found: dict[str, Any] = {}
        for rank in (0, world_size - 1):
            for optimizer in ("AdamW", "Muon") if not found else ("Muon",):  # AdamW's is the same on all ranks
                with context.Pool(1) as pool:
                    case = (optimizer, stage, matrices, world_size, rank, options.dtype)
                    found[optimizer] = pool.apply(measure, case)
            results.append({"stage": stage, "matrices": matrices, "W": world_size, "rank": rank, **found})
            muon = found["Muon"]
            lines.append(
                f"| {stage} | {matrices} | {world_size} | {rank} | {found['AdamW']['ratio']:.4f} | {muon['ratio']:.4f}"
                f" | {muon['largest']:.2f} | {muon['states']:.2f} | {muon['stepped']} |"
            )
            print(lines[-1], flush=True)
    if options.output is not None:
        head = ["| " + " | ".join(COLUMNS) + " |", "|" + " --- |" * len(COLUMNS)]
        text = [
            f"{options.dtype}; torch {torch.__version__}, DeepSpeed {deepspeed.__version__}, {platform.machine()}."
            " AdamW, Muon: bytes that this rank sends in a step, times the minimum. Largest: tensor of a collective, in"
            " matrices. States: elements of this rank's states, in even shares of the parameters.", "",
        ]  # fmt: skip
        options.output.with_suffix(".md").write_text("\n".join([*text, *head, *lines]) + "\n")
        options.output.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
