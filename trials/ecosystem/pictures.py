"""What diffusers' scripts train on, made without a network: python pictures.py FOLDER, in the environment of a row.

pipeline/  a small Stable Diffusion with random weights
images/    pictures with captions
"""

import json
import random
import sys
from pathlib import Path

import torch
from diffusers import AutoencoderKL, DDPMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from PIL import Image
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

WORDS = ["a", "red", "green", "blue", "square", "on", "white"]
WIDTH, ROWS = 32, 32


def make(folder: Path) -> None:
    torch.manual_seed(0)
    tokenizer = make_tokenizer(folder)
    text = CLIPTextModel(
        CLIPTextConfig(
            vocab_size=len(tokenizer), hidden_size=WIDTH, intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=2, max_position_embeddings=tokenizer.model_max_length, projection_dim=WIDTH,
            bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )  # fmt: skip
    vae = AutoencoderKL(
        block_out_channels=(8, 16), down_block_types=("DownEncoderBlock2D",) * 2, latent_channels=4,
        up_block_types=("UpDecoderBlock2D",) * 2, norm_num_groups=4,
    )  # fmt: skip
    unet = UNet2DConditionModel(
        sample_size=16, block_out_channels=(16, 32), layers_per_block=1, cross_attention_dim=WIDTH,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=8, norm_num_groups=8,
    )  # fmt: skip
    StableDiffusionPipeline(
        vae=vae, text_encoder=text, tokenizer=tokenizer, unet=unet, scheduler=DDPMScheduler(), safety_checker=None,
        feature_extractor=None, requires_safety_checker=False,
    ).save_pretrained(folder / "pipeline")  # fmt: skip

    numbers, images = random.Random(0), folder / "images"
    images.mkdir(exist_ok=True)
    lines = []
    for number in range(ROWS):
        color = tuple(numbers.randrange(256) for _ in range(3))
        Image.new("RGB", (WIDTH, WIDTH), color).save(images / f"{number}.png")
        lines.append({"file_name": f"{number}.png", "text": " ".join(numbers.choices(WORDS, k=4))})
    (images / "metadata.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def make_tokenizer(folder: Path) -> CLIPTokenizer:
    pieces = ["<|startoftext|>", "<|endoftext|>", *(f"{word}</w>" for word in WORDS)]
    pieces += sorted({letter + end for word in WORDS for letter in word for end in ("", "</w>")} - set(pieces))
    merges = []
    for word in WORDS:  # letter by letter, from the left
        letters = [*word[:-1], word[-1] + "</w>"]
        for length in range(1, len(letters)):
            merges.append(f"{''.join(letters[:length])} {letters[length]}")
            pieces.append("".join(letters[: length + 1]))
    files = folder / "words"
    files.mkdir(parents=True, exist_ok=True)
    pieces = list(dict.fromkeys(pieces))
    (files / "vocab.json").write_text(json.dumps({piece: number for number, piece in enumerate(pieces)}))
    (files / "merges.txt").write_text("\n".join(["#version: 0.2", *dict.fromkeys(merges)]) + "\n")
    return CLIPTokenizer(str(files / "vocab.json"), str(files / "merges.txt"), model_max_length=16)


if __name__ == "__main__":
    make(Path(sys.argv[1]))
