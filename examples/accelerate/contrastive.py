"""Contrastive training with GradCache: sentence-transformers' CachedMultipleNegativesRankingLoss, in a plain loop.

    accelerate launch --config_file examples/accelerate/zerosync_cpu.yaml examples/accelerate/contrastive.py

The model learns to find the function of Python's standard library that the first line of a docstring belongs to.

What to look at: the loss embeds a large batch in mini-batches and runs one backward for each of them, inside the
backward of the loop. However many there are, an optimizer step sends gradients once.
"""

import argparse
import ast
import math
import sysconfig
import warnings
from collections.abc import Iterator
from itertools import chain, islice, repeat
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.losses import CachedMultipleNegativesRankingLoss
from sentence_transformers.sentence_transformer.modules import Pooling
from tokenizers import ByteLevelBPETokenizer
from torch.utils.data import DataLoader
from transformers import DistilBertConfig, DistilBertModel, PreTrainedTokenizerFast

import zerosync_strategy.accelerate  # noqa: F401

TOKENS = 32  # that the model sees of a text
WIDTH = 128
HELD_OUT = 500  # pairs
Pair = tuple[str, str]  # the first line of a docstring, and the name and arguments of the function


def read_pairs() -> list[Pair]:
    """From the whole standard library. No line and no function is in two pairs: each has one right answer."""
    root = Path(sysconfig.get_paths()["stdlib"])
    lines, functions = set(), set()
    pairs = []
    for path in sorted(root.rglob("*.py")):
        if {"test", "tests", "idle_test", "site-packages", "dist-packages"} & set(path.relative_to(root).parts):
            continue
        for line, function in documented_functions(ast.parse(path.read_bytes())):
            if line not in lines and function not in functions:
                pairs.append((line, function))
                lines.add(line)
                functions.add(function)
    return pairs


def documented_functions(tree: ast.Module) -> Iterator[Pair]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and (docstring := ast.get_docstring(node)):
            yield docstring.splitlines()[0], f"{node.name}({ast.unparse(node.args)})"


def byte_level_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Made from the texts: bytes that are often together become one token."""
    tokenizer = ByteLevelBPETokenizer(lowercase=True)
    tokenizer.train_from_iterator(texts, vocab_size=2000, special_tokens=["<pad>"], show_progress=False)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer._tokenizer, pad_token="<pad>", model_max_length=TOKENS)


class RandomTransformer(torch.nn.Module):
    """A small transformer with random parameters, as a module of sentence-transformers."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        config = DistilBertConfig(
            vocab_size=vocabulary,
            dim=WIDTH,
            hidden_dim=2 * WIDTH,
            n_layers=2,
            n_heads=4,
            max_position_embeddings=TOKENS,
        )
        self.transformer = DistilBertModel(config)

    def forward(self, features: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        hidden = self.transformer(features["input_ids"], features["attention_mask"]).last_hidden_state
        return {**features, "token_embeddings": hidden}


@torch.no_grad()
def accuracy(accelerator: Accelerator, model: Any, loader: DataLoader) -> float:
    """The share of lines whose own function is nearest to them, among those of all pairs of the loader."""
    model.eval()
    embedded = [[accelerator.gather_for_metrics(model(side)["sentence_embedding"]) for side in pair] for pair in loader]
    lines, functions = (torch.nn.functional.normalize(torch.cat(side)) for side in zip(*embedded, strict=True))
    model.train()
    nearest = (lines @ functions.T).argmax(1)
    return (nearest == torch.arange(len(nearest), device=nearest.device)).float().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps (default: 60)")
    parser.add_argument("--batch", type=int, default=64, help="pairs per rank and step (default: 64)")
    parser.add_argument("--mini-batch", type=int, default=16, help="texts embedded at once (default: 16)")
    parser.add_argument("--lr", type=float, default=2e-3)
    options = parser.parse_args()
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch")

    accelerator = Accelerator()
    set_seed(0)
    pairs = read_pairs()
    order = torch.randperm(len(pairs)).tolist()
    training, held_out = ([pairs[index] for index in part] for part in (order[HELD_OUT:], order[:HELD_OUT]))
    tokenizer = byte_level_tokenizer([text for pair in training for text in pair])
    encoder = SentenceTransformer(modules=[RandomTransformer(len(tokenizer)), Pooling(WIDTH)])

    def tokens(batch: list[Pair]) -> list[dict[str, torch.Tensor]]:
        sides = zip(*batch, strict=True)
        return [dict(tokenizer(side, padding="max_length", truncation=True, return_tensors="pt")) for side in sides]

    model, optimizer, loader, test_loader = accelerator.prepare(
        encoder,
        torch.optim.AdamW(encoder.parameters(), lr=options.lr),
        DataLoader(training, options.batch, shuffle=True, drop_last=True, collate_fn=tokens),
        DataLoader(held_out, options.batch, collate_fn=tokens),
    )
    loss_of = CachedMultipleNegativesRankingLoss(encoder, mini_batch_size=options.mini_batch)

    accelerator.print(f"{len(training)} pairs; accuracy among {HELD_OUT} held-out ones:")
    accelerator.print(f"before: {accuracy(accelerator, model, test_loader):.1%}")
    batches = chain.from_iterable(repeat(loader))  # epoch after epoch
    for step, batch in enumerate(islice(batches, options.steps), 1):
        loss = loss_of(batch, None)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if step == 1 or step % 10 == 0:
            mean = accelerator.reduce(loss.detach(), "mean").item()
            accelerator.print(f"step {step:4d}: loss {mean:.3f}")

    report = accelerator.deepspeed_engine_wrapped.zerosync.report
    inside = 2 * math.ceil(options.batch / options.mini_batch)
    accelerator.print(f"after: {accuracy(accelerator, model, test_loader):.1%}")
    accelerator.print(
        f"\nThe last step: {inside} backwards of mini-batches inside the one of the loop, {report.reductions} reduction"
        f" of the gradients. Each rank sent {report.bytes_sent / 1e6:.2f} MB; the floor is"
        f" {report.floor_bytes / 1e6:.2f} MB."
    )
    accelerator.end_training()


if __name__ == "__main__":
    main()
