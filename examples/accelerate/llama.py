"""What the two language models here share: a small Llama over bytes with random parameters, text for it, options."""

import argparse
import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.append(str(Path(__file__).resolve().parents[1]))  # text.py belongs to all examples
from text import Windows, read_standard_library

CONTEXT = 128  # bytes that the model sees
OUT = Path(__file__).resolve().parents[2] / "out"  # git ignores it


def small_llama() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=256, hidden_size=192, intermediate_size=576, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=CONTEXT, bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM(config)


class Pieces(Windows):
    """Pieces of text as transformers' models take them. The model itself shifts the labels."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = super().__getitem__(index)
        return {"input_ids": tokens, "labels": tokens}


def pieces(training: int, validation: int) -> tuple[Pieces, Pieces]:
    """That many pieces to train on, and to validate on from files that are held out."""
    text, held_out = read_standard_library()
    return Pieces(text, training, CONTEXT), Pieces(held_out, validation, CONTEXT)


def parse_options(description: str | None, name: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps (default: 100)")
    parser.add_argument("--accumulate", type=int, default=4, help="backwards per optimizer step (default: 4)")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--clip", type=float, default=1.0, help="largest norm of the gradients (default: 1.0)")
    parser.add_argument("--pieces", type=int, default=3000, help="pieces of text per epoch (default: 3000)")
    parser.add_argument("--every", type=int, default=50, help="steps between evaluations and checkpoints (default: 50)")
    parser.add_argument("--checkpoints", default=str(OUT / name), help="folder to make them in (default: %(default)s)")
    parser.add_argument("--resume", help="a checkpoint to go on from")
    return parser.parse_args()
