"""TRL's trainers, with their own defaults otherwise, on stages 2 and 3, against DDP."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tests.accelerate.runs import launched
from tests.harness.oracle import distance, full_parameters
from tests.harness.ranks import run_ranks

WORDS = ["<pad>", "<eos>", "<unk>", *"abcdefghijklmnopqrstuvwxyz"]
CONFIG = LlamaConfig(
    vocab_size=len(WORDS), hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0, eos_token_id=1, bos_token_id=None,
)  # fmt: skip
ROWS, STEPS = 24, 3


def save(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    torch.manual_seed(0)
    LlamaForCausalLM(CONFIG).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    ).save_pretrained(folder)


def text(row: int, length: int) -> str:
    return " ".join(WORDS[3 + (7 * row + 5 * place * place) % 26] for place in range(length))


def score(completions: list[str], **_: Any) -> list[float]:
    return [float(sum(ord(letter) for letter in completion) % 7) for completion in completions]


def sft(trl: Any, columns: Any, options: dict[str, Any]) -> Any:
    rows = columns(text=[text(row, 4 + row % 5) for row in range(ROWS)])
    return trl.SFTTrainer, trl.SFTConfig(**options, max_length=16), {"train_dataset": rows}


def dpo(trl: Any, columns: Any, options: dict[str, Any]) -> Any:
    rows = columns(
        prompt=[text(row, 3) for row in range(ROWS)],
        chosen=[" " + text(row + 1, 4) for row in range(ROWS)],
        rejected=[" " + text(row + 2, 3) for row in range(ROWS)],
    )
    return trl.DPOTrainer, trl.DPOConfig(**options), {"train_dataset": rows}


def grpo(trl: Any, columns: Any, options: dict[str, Any]) -> Any:
    rows = columns(prompt=[text(row, 3) for row in range(ROWS)])
    config = trl.GRPOConfig(**options, num_generations=2, max_completion_length=6)
    return trl.GRPOTrainer, config, {"train_dataset": rows, "reward_funcs": score}


def online_dpo(trl: Any, columns: Any, options: dict[str, Any]) -> Any:
    from trl.experimental import online_dpo

    rows = columns(prompt=[text(row, 3) for row in range(ROWS)])
    config = online_dpo.OnlineDPOConfig(**options, max_new_tokens=6, max_length=16)
    return online_dpo.OnlineDPOTrainer, config, {"train_dataset": rows, "reward_funcs": score}


@pytest.mark.slow
@pytest.mark.parametrize("make", [sft, dpo, grpo, online_dpo], ids=lambda make: make.__name__)
def test_as_ddp(make: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    save(tmp_path / "model")

    def columns(**given: list[str]) -> Any:
        return datasets.Dataset.from_dict(given)

    options: dict[str, Any] = {
        "output_dir": str(tmp_path), "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2,
        "max_steps": STEPS, "learning_rate": 0.5, "lr_scheduler_type": "constant", "optim": "sgd", "max_grad_norm": 0.5,
        "save_strategy": "no", "report_to": [], "disable_tqdm": True, "bf16": False, "logging_steps": 1,
        "dataloader_pin_memory": False,
    }  # fmt: skip
    make(trl, columns, options)  # imported once, before the ranks are forked

    def train(**alone: Any) -> Any:
        from transformers import AutoTokenizer

        kind, config, given = make(trl, columns, options | alone)
        assert config.world_size == 2
        folder = str(tmp_path / "model")
        models: Any = {"model": folder}
        if make is online_dpo:  # it would give from_pretrained() a device_map, which ZeRO-3 does not go with
            models = {name: LlamaForCausalLM.from_pretrained(folder) for name in ("model", "ref_model")}
        trainer = kind(args=config, processing_class=AutoTokenizer.from_pretrained(folder), **models, **given)
        trainer.train()
        norms = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
        return full_parameters(trainer.accelerator.unwrap_model(trainer.model)), norms

    (expected, norms), _ = run_ranks(train, ddp_backend="gloo", use_cpu=True)
    assert len(norms) == STEPS and min(norms) > 0
    for stage in (2, 3):
        for parameters, found in run_ranks(train, env=launched(stage)):
            assert found == pytest.approx(norms, rel=1e-4)
            assert distance(parameters, expected) < 1e-5  # between DDP and ZeRO, where a step is 0.25 long at most
