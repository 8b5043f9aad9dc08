"""Bytes of each step of adapters (PEFT's LoRA) on a frozen Llama under ZeRO-3, by the interface's own counter.

    python benchmarks/adapters.py        # one namespace per rank, 1 Gbit/s links to a switch; root and iproute2

Frozen parameters that are held, on the device or in host memory, cross the wire in the first step alone (R4).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time
from multiprocessing.connection import Connection
from typing import Any

from hosts import Host, link, require_namespaces, variables_of_rank

BUDGETS = [0, "all", {"device": 0, "host": "all"}, {"device": "1MiB", "host": "all"}]
QUIET = 0.1  # seconds after which all that was sent has been counted


def main() -> None:
    """Measure each budget, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--accumulate", type=int, default=4, help="backwards per optimizer step")
    parser.add_argument("--width", type=int, default=512, help="of the Llama, which has four layers")
    options = parser.parse_args()
    require_namespaces()
    for number, budget in enumerate(BUDGETS):
        with link(options.ranks, options.rate) as hosts:
            sent, found = measure(hosts, budget, options, 29700 + number)
        adapters = found["trained"] * (options.ranks - 1) // options.ranks * 2
        print(json.dumps({"param_memory_budget": budget, "sent": sent, "adapters": adapters, **found}))
        print(f"  from the second step on at most {max(sent[1:]) / adapters:.3f} of the adapters", flush=True)


def measure(hosts: list[Host], budget: Any, options: argparse.Namespace, port: int) -> tuple[list[int], dict[str, Any]]:
    """Return the bytes that the first rank's interface sends in each step, and what that rank reports."""
    context = multiprocessing.get_context("spawn")
    ranks: list[tuple[Any, Connection]] = []
    for rank in range(len(hosts)):
        ours, theirs = context.Pipe()
        process = context.Process(target=train, args=(theirs, hosts, rank, port, budget, options), daemon=True)
        process.start()
        ranks.append((process, ours))
    sent = []
    try:
        for _ in range(options.steps):
            for _, connection in ranks:
                connection.recv()  # ready
            time.sleep(QUIET)
            before = hosts[0].sent(ranks[0][0].pid)
            for _, connection in ranks:
                connection.send(None)
            for _, connection in ranks:
                connection.recv()  # done
            time.sleep(QUIET)
            sent.append(hosts[0].sent(ranks[0][0].pid) - before)
        return sent, ranks[0][1].recv()
    finally:
        for process, _ in ranks:
            process.kill()
            process.join()


def train(conductor: Connection, hosts: list[Host], rank: int, port: int, budget: Any, options: Any) -> None:
    """The life of a rank."""
    hosts[rank].enter()
    os.environ |= variables_of_rank(hosts, rank, port)
    import deepspeed
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    from zerosync_strategy import attach, prepare_cpu

    torch.set_num_threads(1)
    prepare_cpu()
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    torch.manual_seed(0)
    width = options.width
    llama = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=1024, hidden_size=width, intermediate_size=3 * width, num_hidden_layers=4,
            num_attention_heads=8, max_position_embeddings=128, tie_word_embeddings=False,
        )
    )  # fmt: skip
    model = get_peft_model(llama, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"))
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW((param for param in model.parameters() if param.requires_grad), lr=1e-3),
        config={
            "train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0.0, "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        },
        dist_init_required=False,
    )  # fmt: skip
    zerosync = attach(engine, param_memory_budget=budget)
    data = torch.Generator().manual_seed(rank)
    floors, held, kept = [], [], []
    for _ in range(options.steps):
        conductor.send("ready")
        conductor.recv()
        for _ in range(options.accumulate):
            tokens = torch.randint(1024, (2, 64), generator=data)
            engine.backward(engine(input_ids=tokens, labels=tokens).loss / options.accumulate)
        engine.step()
        floors.append(zerosync.report.floor_bytes)
        held.append(zerosync.report.peak_held_bytes)
        kept.append(zerosync.report.peak_host_bytes)
        conductor.send("done")
    size = {True: 0, False: 0}
    for param in model.parameters():
        size[param.requires_grad] += param.ds_numel * 4
    conductor.send(
        {"floor": floors, "held": held, "in_host_memory": kept, "trained": size[True], "frozen": size[False]}
    )
    conductor.recv()  # until it is ended


if __name__ == "__main__":
    main()
