"""Seconds and bytes of a GRPO step of TRL under ZeRO-3, stock DeepSpeed and ZeroSync side by side.

    python benchmarks/grpo.py --output benchmarks/results/<date>-grpo-link  # root, iproute2, trl

TRL's GRPOTrainer on the Llama, ranks and links of generation.py: a step generates once, inside of TRL's
``unwrap_model_for_generation``, and trains on that in micro-batches. The systems take turns, a step each.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import tempfile
import warnings
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

from generation import llama, measure
from hosts import Host, link, loopback, require_namespaces, tune, variables_of_rank
from output import command, processor

SYSTEMS: dict[str, dict[str, Any] | None] = {
    "stock": None, "zerosync": {}, "zerosync@held": {"param_memory_budget": "all"},
}  # fmt: skip
PACKAGES = ("zerosync-strategy", "torch", "deepspeed", "accelerate", "transformers", "trl")


def main() -> None:
    """Measure, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--where", choices=("link", "loopback"), default="link")
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=32, help="of a completion")
    parser.add_argument("--micro-batches", type=int, default=2, help="of a step, of two completions each")
    parser.add_argument("--width", type=int, default=384, help="of the Llama, which has six layers")
    parser.add_argument("--output", type=Path, help="writes OUTPUT.json and OUTPUT.md")
    options = parser.parse_args()
    require_namespaces()
    with link(2, options.rate) if options.where == "link" else loopback(2) as hosts:
        parameters, found = measure(hosts, list(SYSTEMS), train, options)
    results = {
        "date": datetime.date.today().isoformat(), "command": command(), "cpu": processor(), "cores": os.cpu_count(),
        "versions": {name: version(name) for name in PACKAGES}, "where": options.where, "rate": options.rate,
        "parameters": parameters, "tokens": options.tokens, "micro_batches": options.micro_batches, "systems": found,
    }  # fmt: skip
    print(table(results))
    if options.output:
        options.output.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")
        options.output.with_suffix(".md").write_text(report(results))


def train(conductor: Connection, hosts: list[Host], rank: int, port: int, system: str, options: Any) -> None:
    """The life of a rank: steps of one trainer, each in its turn."""
    tune()
    hosts[rank].enter()
    own = SYSTEMS[system]
    config: dict[str, Any] = {
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "gradient_accumulation_steps": "auto", "gradient_clipping": "auto", "train_micro_batch_size_per_gpu": "auto",
        "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False,
    } | ({} if own is None else {"zerosync": own})  # fmt: skip
    os.environ |= variables_of_rank(hosts, rank, port) | {
        "ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": json.dumps(config),
        "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    warnings.filterwarnings("ignore")
    import torch
    from accelerate import PartialState
    from accelerate.utils import DistributedType
    from datasets import Dataset
    from datasets.table import InMemoryTable
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, TrainerCallback
    from transformers.utils import logging
    from trl import GRPOConfig, GRPOTrainer

    from zerosync_strategy import prepare_cpu

    if own is None:  # on CPU every rank would believe that it is alone
        PartialState._prepare_backend = lambda *args, **kwargs: ("gloo", DistributedType.NO)
    else:
        import zerosync_strategy.accelerate  # noqa: F401  # so that the "zerosync" block counts
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    prepare_cpu()

    class Turns(TrainerCallback):  # type: ignore[misc]
        """Asks for a turn before each step."""

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            conductor.recv()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            conductor.send(state.global_step)

    model = llama(options.width)
    parameters = sum(param.numel() for param in model.parameters())
    names = ["<pad>", "<unk>", *map(str, range(8190))]
    words = Tokenizer(models.WordLevel({name: index for index, name in enumerate(names)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", unk_token="<unk>")
    tokenizer.eos_token = "<pad>"  # which GRPO asks for
    prompts = [" ".join(names[row + 2 : row + 18]) for row in range(64)]
    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=model,
            processing_class=tokenizer,
            train_dataset=Dataset(InMemoryTable.from_pydict({"prompt": prompts}), fingerprint="prompts"),
            reward_funcs=lambda completions, **_: [float(len(set(each.split()))) for each in completions],
            args=GRPOConfig(
                output_dir=folder, per_device_train_batch_size=2, gradient_accumulation_steps=options.micro_batches,
                num_generations=2, max_completion_length=options.tokens, max_steps=2 + options.rounds,
                learning_rate=1e-5, save_strategy="no", report_to=[], disable_tqdm=True, bf16=False,
                logging_strategy="no", dataloader_pin_memory=False, gradient_checkpointing=False,
            ),
            callbacks=[Turns()],
        )  # fmt: skip
        conductor.send(parameters)
        trainer.train()


def table(results: dict[str, Any]) -> str:
    """The results as a table of Markdown."""
    lines = ["| system | s per step | of stock's time | MB sent per rank |", "|---|---:|---:|---:|"]
    reference = results["systems"]["stock"]["seconds"]
    for system, found in results["systems"].items():
        ratio = median(ours / theirs for theirs, ours in zip(reference, found["seconds"], strict=True))
        sent = median(found["bytes_sent"]) / 1e6
        lines.append(f"| {system} | {median(found['seconds']):.2f} | {ratio:.2f} | {sent:.1f} |")
    return "\n".join(lines)


def report(results: dict[str, Any]) -> str:
    """The results with how they were got."""
    versions = ", ".join(f"{name} {number}" for name, number in results["versions"].items())
    where = f"one {results['rate']} link per rank" if results["where"] == "link" else "one machine's loopback"
    return f"""# {results["date"]}: a GRPO step of TRL, 2 ranks, {where}

A Llama of {results["parameters"] / 1e6:.1f} M parameters in fp32, ZeRO-3, AdamW, gloo; {results["micro_batches"]}
micro-batches of two completions of {results["tokens"]} tokens per rank and step, which one generation gives.
{results["cpu"]}, {results["cores"]} cores, one thread per rank. {versions}.

    {results["command"]}

{table(results)}

MB: by the interface's counter. Medians of the rounds; "of stock's time" is the median of the ratios within a round.
"""


if __name__ == "__main__":
    main()
