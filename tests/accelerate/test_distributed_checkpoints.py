"""Under Accelerate and the Trainer: another stage and number of ranks, and what is kept while a thread writes."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration
from transformers import TrainerCallback, TrainingArguments

from tests.accelerate.runs import launched
from tests.accelerate.test_trainer import InOrder, Model, Rows
from tests.harness.engines import rank
from tests.harness.oracle import distance, full_parameters
from tests.harness.parts import STEPS, Net, batch, plain_torch, started
from tests.harness.problem import MICRO
from tests.harness.ranks import run_ranks
from zerosync_strategy import ZeroSyncPlugin
from zerosync_strategy.core.checkpoints import dcp
from zerosync_strategy.frontend import wait_for_save

RUNS = ((3, 2), (2, 3), (3, 1))
"""Stage and ranks of each run; the next goes on where it has ended."""
BACKGROUND = {"checkpoint_format": "distributed", "checkpoint_background": True}


def complete(folder: Path) -> list[str]:
    """The directories of complete checkpoints."""
    found = [path for path in folder.glob("**/.metadata") if ".writing" not in str(path)]
    return sorted(path.relative_to(folder).parts[-3] for path in found)


def slowly(patch: pytest.MonkeyPatch) -> None:
    write = dcp.write
    patch.setattr(dcp, "write", lambda *arguments: time.sleep(0.3) or write(*arguments))


def test_scripts_of_other_stages_and_numbers_of_ranks(tmp_path: Path) -> None:
    """Of automatic names, the last complete one is kept."""

    def train(run: int) -> dict[str, torch.Tensor]:
        project = ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True, total_limit=1, iteration=run)
        plugin = ZeroSyncPlugin(stage=RUNS[run][0], **BACKGROUND)
        accelerator = Accelerator(deepspeed_plugin=plugin, project_config=project)
        accelerator.state.deepspeed_plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = 2
        net = Net() if run else started(Net())
        model, optimizer = accelerator.prepare(net, net.optimizer())
        if run:
            accelerator.load_state(str(tmp_path / "checkpoints" / f"checkpoint_{run - 1}"))
        for step in range(run * STEPS, (run + 1) * STEPS):
            for backward in range(2):
                accelerator.backward(model(batch(step, backward, rank())))
            optimizer.step()
            optimizer.zero_grad()
        with pytest.MonkeyPatch.context() as patch:
            slowly(patch)
            accelerator.save_state()
            assert complete(tmp_path) == [f"checkpoint_{run - 1}"] * (run > 0)
            ended = full_parameters(accelerator.unwrap_model(model))
            accelerator.end_training()
        assert f"checkpoint_{run}" in complete(tmp_path)
        return ended

    (oracle,) = run_ranks(plain_torch, Net.optimizer, [ranks for _, ranks in RUNS], world_size=1)
    for run, expected in enumerate(oracle):
        ended = run_ranks(train, run, world_size=RUNS[run][1])
        assert max(distance(parameters, expected) for parameters in ended) == 0.0, run


class Sees(TrainerCallback):
    """With which parameters the first step begins, and which checkpoints are complete after each."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.complete = folder, list[list[str]]()
        self.first: dict[str, torch.Tensor] = {}

    def on_step_begin(self, *_: Any, model: Any = None, **__: Any) -> None:
        self.first = self.first or full_parameters(model)

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.complete.append(complete(self.folder))


def test_a_trainer_that_keeps_one_checkpoint(tmp_path: Path) -> None:
    """It deletes the others as soon as a save returns; the best is loaded at the end, and one rank goes on."""

    def train(steps: int, resume: bool) -> tuple[dict[str, torch.Tensor], list[list[str]]]:
        arguments = TrainingArguments(
            output_dir=str(tmp_path), per_device_train_batch_size=MICRO, max_steps=steps, max_grad_norm=0.0,
            learning_rate=1e-2, lr_scheduler_type="constant", optim="adamw_torch", save_strategy="steps", save_steps=1,
            save_total_limit=1, eval_strategy="steps", eval_steps=1, load_best_model_at_end=not resume, report_to=[],
            disable_tqdm=True, bf16=False, dataloader_pin_memory=False,
        )  # fmt: skip
        data = {"train_dataset": Rows(10), "eval_dataset": Rows(2)}
        trainer = InOrder(Model(), arguments, callbacks=[sees := Sees(tmp_path)], **data)
        trainer.can_return_loss = True
        with pytest.MonkeyPatch.context() as patch:
            slowly(patch)
            trainer.train(resume_from_checkpoint=resume)
            wait_for_save()  # of the resumed run's last one, which the Trainer deletes, as it is not the best
        if not resume:
            assert trainer.state.best_global_step == 4, "the test wants the last one to be the best"
        assert trainer.state.global_step == steps
        return sees.first if resume else full_parameters(trainer.model), sees.complete

    trained = run_ranks(train, 4, False, env=launched(3, **BACKGROUND))
    for _, seen in trained:
        assert seen[0] == [] and all(1 <= len(found) <= 3 for found in seen[2:]), seen
    (resumed, _), *_ = run_ranks(train, 5, True, env=launched(2, **BACKGROUND), world_size=1)
    assert distance(resumed, trained[0][0]) == 0.0
