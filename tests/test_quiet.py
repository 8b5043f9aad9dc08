"""A default run prints no warning that comes from ZeroSync, or from how it uses the libraries."""

import json
import logging
import os
import re
import runpy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.harness.oracle import full_parameters
from tests.harness.ranks import run_ranks
from tests.harness.releases import since

pytestmark = since("0.19.8", "and the libraries of that time, warnings of their own are others")
ROOT = Path(__file__).parent.parent
LIBRARIES_OWN = re.compile(
    "isinstance.treespec, LeafSpec.|does not have many workers|'pin_memory' argument|Setting accelerator to CPU"
    "|each worker will save a shard of the checkpoint"
)


def heard(run: Callable[[], Any]) -> tuple[Any, list[str]]:
    """What ``run()`` returns on each rank, and the warnings that a user would see of it, printed or logged."""
    found: list[str] = []

    def note(self: logging.Logger, record: logging.LogRecord) -> None:
        if record.levelno >= logging.WARNING:
            found.append(f"{self.name}: {record.getMessage()}")

    logging.Logger.callHandlers = note  # type: ignore[method-assign]  # in this process, which ends
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for category in (DeprecationWarning, PendingDeprecationWarning):  # which Python shows to no user
            warnings.simplefilter("ignore", category)
        value = run()
    found += [f"{each.filename}:{each.lineno}: {each.message}" for each in caught]
    return value, [line for line in found if not LIBRARIES_OWN.search(line)]


@pytest.mark.parametrize("program", ["train_deepspeed", "train_lightning", "train_fabric", "train_accelerate"])
def test_a_default_run_warns_of_nothing(program: str, tmp_path: Path) -> None:
    """It saves its weights too, which load without DeepSpeed."""
    safetensors = pytest.importorskip("safetensors.torch")

    def rank() -> list[str]:
        os.chdir(tmp_path)
        return heard(lambda: runpy.run_path(str(ROOT / "docs" / "code" / f"{program}.py"), run_name="__main__"))[1]

    assert run_ranks(rank) == [[], []]
    (saved,) = tmp_path.glob("out/**/model.safetensors")
    assert set(safetensors.load_file(saved)) == {"0.weight", "0.bias", "2.weight", "2.bias"}


def tiny() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2))


@pytest.mark.extended(but=("True",))
@pytest.mark.parametrize("is_held", [True, False])
def test_the_launch_configuration_trains_quietly_and_saves_the_model(is_held: bool, tmp_path: Path) -> None:
    """With the Trainer of transformers, under the launch configuration of the examples: ZeRO-3, all held, or none."""
    from transformers import LlamaForCausalLM, Trainer, TrainingArguments

    launch = yaml.safe_load((ROOT / "examples" / "accelerate" / "zerosync_cpu.yaml").read_text())
    inline = launch["deepspeed_config"]["deepspeed_config_file"]
    if not is_held:
        config = json.loads(inline)
        config["zero_optimization"]["stage3_param_persistence_threshold"] = config["zerosync"][
            "param_memory_budget"
        ] = 0
        inline = json.dumps(config)

    def train() -> Any:
        import zerosync_strategy.accelerate  # noqa: F401  as its runner does

        arguments = TrainingArguments(
            output_dir=str(tmp_path / "run"), max_steps=2, per_device_train_batch_size=2, gradient_accumulation_steps=2,
            learning_rate=0.01, save_steps=1, report_to="none", disable_tqdm=True,
        )  # fmt: skip
        tokens = torch.arange(8)
        trainer = Trainer(tiny(), arguments, train_dataset=[{"input_ids": tokens, "labels": tokens}] * 16)
        trainer.train()
        trainer.save_model(str(tmp_path / "model"))
        accelerator, model = trainer.accelerator, trainer.model_wrapped
        state = accelerator.get_state_dict(model)  # as docs/accelerate.md has it without a Trainer
        plain = accelerator.unwrap_model(model)
        plain.save_pretrained(tmp_path / "alone", is_main_process=accelerator.is_main_process, state_dict=state)
        return full_parameters(trainer.model)

    env = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": inline}
    (trained, said), (_, said_too) = run_ranks(lambda: heard(train), env=env)
    assert (said, said_too) == ([], [])
    before = dict(tiny().named_parameters())
    for folder in ("model", "run/checkpoint-2", "alone"):
        saved = dict(LlamaForCausalLM.from_pretrained(tmp_path / folder).named_parameters())
        assert saved.keys() == trained.keys()
        for name, value in trained.items():
            assert torch.equal(saved[name], value) and not torch.equal(saved[name], before[name]), name
