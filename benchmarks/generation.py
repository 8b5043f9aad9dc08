"""Tokens per second and bytes of greedy generation under ZeRO-3, stock DeepSpeed and ZeroSync side by side.

    python benchmarks/generation.py --output benchmarks/results/<date>-generation-link  # root, iproute2; trl for "-trl"

A small Llama on two ranks, each in a network namespace with a 1 Gbit/s link to a switch. The ways to generate take
turns, round after round. transformers is told of ZeRO-3, as Accelerate and the Hugging Face Trainer do.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import multiprocessing
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

from hosts import Host, link, require_namespaces, tune, variables_of_rank
from output import processor

WAYS = {
    "stock": "stock DeepSpeed, stage 3",
    "stock-trl": "stock, TRL's unwrap_model_for_generation",
    "zerosync": "ZeroSync, stage 3",
    "zerosync-trl": "ZeroSync, TRL's unwrap_model_for_generation",
    "zerosync-gathered": "ZeroSync, gathered_for_inference()",
}
QUIET = 0.05  # seconds after which all that was sent has been counted
PACKAGES = ("zerosync-strategy", "torch", "deepspeed", "transformers", "trl")


def main() -> None:
    """Measure, check that all ways generate the same tokens, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64, help="generated after each prompt")
    parser.add_argument("--prompts", type=int, default=4, help="per rank, of 16 tokens")
    parser.add_argument("--width", type=int, default=384, help="of the Llama, which has six layers")
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--output", type=Path, help="writes OUTPUT.json and OUTPUT.md")
    options = parser.parse_args()
    require_namespaces()
    ways = options.ways.split(",")
    with link(options.ranks, options.rate) as hosts:
        parameters, found = measure(hosts, ways, generate, options)
    versions = {name: version(name) for name in PACKAGES if importlib.util.find_spec(name.replace("-", "_"))}
    results = {
        "date": datetime.date.today().isoformat(),
        "command": f"python benchmarks/generation.py --rounds {options.rounds} --tokens {options.tokens}"
        f" --prompts {options.prompts} --width {options.width}",
        "cpu": processor(), "cores": os.cpu_count(), "versions": versions,
        "rate": options.rate, "ranks": options.ranks, "parameters": parameters,
        "tokens": options.tokens, "prompts": options.prompts, "ways": found,
    }  # fmt: skip
    print(table(results))
    if options.output:
        options.output.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")
        options.output.with_suffix(".md").write_text(report(results))


def measure(
    hosts: list[Host], ways: list[str], live: Callable[..., None], options: argparse.Namespace
) -> tuple[int, dict[str, Any]]:
    """Return the model's parameters, and by way the seconds and bytes of each round.

    Args:
        hosts: by rank.
        ways: what is measured, the name of a system and what it does. One system has one team of ranks.
        live: the life of a rank.
        options: of the command line; ``rounds``, and ``tokens`` of a round.
    """
    context = multiprocessing.get_context("spawn")
    teams: dict[str, list[tuple[Any, Connection]]] = {}
    for number, system in enumerate(dict.fromkeys(way.partition("-")[0] for way in ways)):
        teams[system] = []
        for rank in range(len(hosts)):
            ours, theirs = context.Pipe()
            arguments = theirs, hosts, rank, 29700 + number, system, options
            process = context.Process(target=live, args=arguments, daemon=True)
            process.start()
            teams[system].append((process, ours))
    try:
        sizes = [connection.recv() for team in teams.values() for _, connection in team]
        found: dict[str, Any] = {way: {"seconds": [], "bytes_sent": []} for way in ways}
        tokens: dict[str, Any] = {}
        for number in range(-1, options.rounds):  # the first is not counted, and short
            for way in ways:
                team = teams[way.partition("-")[0]]
                # Where ranks share a host, any of them shows its counter.
                processes = {host: process.pid for host, (process, _) in zip(hosts, team, strict=True)}
                before = sum(host.sent(process) for host, process in processes.items())
                begin = time.perf_counter()
                for _, connection in team:
                    connection.send((way, 4 if number < 0 else options.tokens))
                generated = [connection.recv() for _, connection in team]
                seconds = time.perf_counter() - begin
                time.sleep(QUIET)
                sent = sum(host.sent(process) for host, process in processes.items()) - before
                if number < 0:
                    continue
                if tokens.setdefault(number, generated) != generated:
                    raise SystemExit(f"{way} generated other tokens than {ways[0]}.")
                found[way]["seconds"].append(seconds)
                found[way]["bytes_sent"].append(sent / len(hosts))
                print(f"round {number}: {way} {seconds:.2f} s, {sent / len(hosts) / 1e6:.1f} MB", flush=True)
        return sizes[0], found
    finally:
        for team in teams.values():
            for process, _ in team:
                process.kill()
                process.join()


def generate(conductor: Connection, hosts: list[Host], rank: int, port: int, system: str, options: Any) -> None:
    """The life of a rank."""
    tune()
    hosts[rank].enter()
    os.environ |= variables_of_rank(hosts, rank, port)
    import deepspeed
    import torch
    from transformers.integrations.deepspeed import HfDeepSpeedConfig
    from transformers.utils import logging

    from zerosync_strategy import attach, prepare_cpu

    logging.set_verbosity_error()
    torch.set_num_threads(1)
    prepare_cpu()
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    model = llama(options.width)
    config = {
        "train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0.0, "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    }  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)
    engine.eval()
    told = HfDeepSpeedConfig(config)  # as long as it lives
    assert told.is_zero3()
    zerosync = attach(engine) if system == "zerosync" else None
    accelerator = SimpleNamespace(
        state=SimpleNamespace(deepspeed_plugin=SimpleNamespace(zero_stage=3)),
        unwrap_model=lambda wrapped: wrapped.module,
    )
    prompts = torch.randint(8192, (options.prompts, 16), generator=torch.Generator().manual_seed(rank))
    mask = torch.ones_like(prompts)
    conductor.send(sum(param.ds_numel for param in model.parameters()))
    while True:
        way, tokens = conductor.recv()
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            if way.endswith("-trl"):
                from trl.models.utils import unwrap_model_for_generation

                stack.enter_context(unwrap_model_for_generation(engine, accelerator))
            elif zerosync is not None and way.endswith("-gathered"):
                stack.enter_context(zerosync.gathered_for_inference())
            out = model.generate(prompts, attention_mask=mask, max_new_tokens=tokens, do_sample=False, pad_token_id=0)
        conductor.send(out[:, 16:].tolist())


def llama(width: int) -> Any:
    """A Llama of six layers, which does not end a text by itself."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=8192, hidden_size=width, intermediate_size=8 * width // 3, num_hidden_layers=6,
            num_attention_heads=6, max_position_embeddings=256, tie_word_embeddings=False, eos_token_id=None,
        )
    )  # fmt: skip


def table(results: dict[str, Any]) -> str:
    """The results as a table of Markdown."""
    lines = ["| way | tokens/s | of stock | MB sent per rank and token | s per phase |", "|---|---:|---:|---:|---:|"]
    per_rank = results["prompts"] * results["tokens"]
    reference = next(iter(results["ways"].values()))["seconds"]
    for way, found in results["ways"].items():
        faster = median(theirs / ours for theirs, ours in zip(reference, found["seconds"], strict=True))
        lines.append(
            f"| {WAYS[way]} | {median(results['ranks'] * per_rank / s for s in found['seconds']):.0f} | {faster:.1f}"
            f" | {median(found['bytes_sent']) / results['tokens'] / 1e6:.3f} | {median(found['seconds']):.2f} |"
        )
    return "\n".join(lines)


def report(results: dict[str, Any]) -> str:
    """The results with how they were got."""
    versions = ", ".join(f"{name} {number}" for name, number in results["versions"].items())
    return f"""# {results["date"]}: generation, {results["ranks"]} ranks, one {results["rate"]} link per rank

A Llama of {results["parameters"] / 1e6:.1f} M parameters in fp32, ZeRO-3, gloo. Greedy: {results["tokens"]} tokens
after each of {results["prompts"]} prompts of 16 tokens per rank.
{results["cpu"]}, {results["cores"]} cores, one thread per rank. {versions}.

    {results["command"]}

{table(results)}

All ways generate the same tokens. tokens/s: of all ranks. MB: by the interface's counter, over the forwards, which are
as many as the tokens of one prompt. Medians of the rounds; "of stock" is the median of the ratios within a round.
"""


if __name__ == "__main__":
    main()
