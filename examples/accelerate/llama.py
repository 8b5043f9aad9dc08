"""What the two language models here share: a small Llama over bytes with random parameters, and text for it."""

import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.append(str(Path(__file__).resolve().parents[1]))  # text.py belongs to all examples
from text import Windows, read_standard_library

CONTEXT = 128  # bytes that the model sees


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
