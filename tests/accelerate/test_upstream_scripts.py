"""Accelerate's own test scripts (``accelerate.test_utils.scripts``) under ZeroSync, on two CPU ranks.

The code that runs is the scripts' own. What they fetch from the Hub is replaced by tiny models and made-up data.

| Script | Here | What is left out, and why |
| --- | --- | --- |
| ``test_ops`` | whole | |
| ``test_script`` | whole, with the training that it leaves out under DeepSpeed | mixed precision: compared with fp32 to 1e-6, but DeepSpeed keeps the parameters in half precision |
| ``test_distributed_data_loop`` | whole but for ``LEFT_OUT`` | see there |
| ``test_sync`` | what has an optimizer, norms in place of ``param.grad`` | the rest prepares a model alone, which ZeRO-1 and 2 refuse, and reads ``param.grad``, which ZeRO does not keep |
| ``test_metrics`` | whole, on stage 3 | it prepares a model alone, see above |
| ``test_performance`` | whole | |
| ``test_checkpointing`` | whole | |
| ``test_ds_multiple_model`` | whole | |
| ``test_zero3_integration`` | whole, NCCL replaced by gloo | |
| ``test_ds_alst_ulysses_sp`` | whole | |
| ``test_cli``, ``test_pippy`` | no | without a GPU they do nothing but say so |
| ``test_peak_memory_usage`` | no | measures the memory of a GPU |
| ``test_notebook`` | no | its ``test_fault_tolerant`` hangs on gloo, where a process group waits for all ranks |
| ``test_ddp_comm_hook`` | no | about ``DistributedDataParallel`` |
| ``test_merge_weights`` | no | about FSDP's checkpoints |
"""  # noqa: E501

import argparse
import importlib.util
import inspect
import json
import math
import os
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from accelerate.state import AcceleratorState, GradientState
from accelerate.test_utils.training import RegressionModel
from accelerate.utils import DistributedType, is_torchdata_stateful_dataloader_available
from torch.utils.data import DataLoader, default_collate
from transformers import BatchEncoding, BertConfig, BertForSequenceClassification, LlamaConfig, LlamaForCausalLM

from tests.harness.extended import STAGES
from tests.harness.ranks import run_ranks
from tests.harness.releases import since
from zerosync_strategy import ZeroSyncPlugin
from zerosync_strategy.accelerate import run
from zerosync_strategy.accelerate.install import install

SCRIPTS = "accelerate.test_utils.scripts"
ACCURATE = 0.82  # what Accelerate asks of test_performance


def launch(
    job: Callable[[], Any], folder: Path, stage: int = 2, zero: dict[str, Any] | None = None, **config: Any
) -> None:
    """Call ``job`` on ranks as ``accelerate launch -m zerosync_strategy.accelerate.run`` starts them."""
    auto = dict.fromkeys(("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"), "auto")
    deepspeed_config = {"zero_optimization": {"stage": stage, **(zero or {})}, **auto, **config}

    def rank() -> bool:
        os.chdir(folder)
        install(always=True)
        job()
        return ZeroSyncPlugin.used

    env = {
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_DEEPSPEED_CONFIG_FILE": json.dumps(deepspeed_config),
        "ACCELERATE_DEEPSPEED_ZERO3_INIT": str(stage == 3).lower(),
    }
    assert all(run_ranks(rank, env=env))


def run_file(name: str) -> None:
    """Run a script as it is."""
    sys.argv = ["run", str(Path(importlib.util.find_spec(f"{SCRIPTS}.{name}").origin))]
    run.main()


def script(name: str) -> ModuleType:
    """A script, imported on a rank, which can be changed there: no other test sees it."""
    for package in ("datasets", "evaluate"):  # for the Hub, which the tests do without
        sys.modules[package] = mock.MagicMock(__spec__=ModuleSpec(package, None))
    sys.modules["evaluate"].load = lambda *_: Accuracy()
    module = importlib.import_module(f"{SCRIPTS}.{name}")
    for known, ours in {"RegressionModel": Regression, "get_dataloaders": loaders}.items():
        if hasattr(module, known):
            setattr(module, known, ours)
    return module


class Regression(RegressionModel):
    """With parameters of one element. DeepSpeed 0.19.8 refuses parameters without a dimension, on every stage."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.a, self.b = (torch.nn.Parameter(p.detach().reshape(1)) for p in (self.a, self.b))


class Accuracy:
    """In place of the Hub's metric."""

    def __init__(self) -> None:
        self.hits: list[torch.Tensor] = []

    def add_batch(self, predictions: torch.Tensor, references: torch.Tensor) -> None:
        self.hits.append(predictions == references)

    def compute(self) -> dict[str, float]:
        hits, self.hits = torch.cat(self.hits), []
        return {"accuracy": hits.float().mean().item()}


def loaders(_: Any, batch_size: int = 16, *__: Any, **___: Any) -> tuple[DataLoader, DataLoader]:
    """In place of the Hub's sentences: tokens of which the first one says the label."""
    generator = torch.Generator().manual_seed(1)

    def loader(length: int, **options: Any) -> DataLoader:
        tokens = torch.randint(0, 16, (length, 8), generator=generator)
        rows = [{"input_ids": row, "labels": (row[0] >= 8).long()} for row in tokens]
        return DataLoader(rows, collate_fn=lambda rows: BatchEncoding(default_collate(rows)), **options)

    return loader(8 * batch_size, batch_size=batch_size, shuffle=True), loader(90, batch_size=32)


@pytest.fixture
def bert(tmp_path: Path) -> str:
    """In place of the Hub's model: the folder of one that has learned nothing."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=16, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=8, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    BertForSequenceClassification(config).save_pretrained(tmp_path / "bert")
    return str(tmp_path / "bert")


def test_ops(tmp_path: Path) -> None:
    def job() -> None:
        run_file("test_ops")
        ZeroSyncPlugin()  # for launch() to find: the script has no Accelerator, which would make one

    launch(job, tmp_path)


@pytest.mark.extended(but=("2",))
@pytest.mark.parametrize("stage", STAGES)
def test_script_and_the_training_that_it_leaves_out_under_deepspeed(stage: int, tmp_path: Path) -> None:
    """Left out because "trainings are not exactly the same in DeepSpeed and CPU mode". Under ZeroSync they are (W2)."""

    def job() -> None:
        module = script("test_script")
        module.DistributedType = SimpleNamespace(**{**DistributedType.__members__, "DEEPSPEED": None})
        module.is_bf16_available = module.is_fp16_available = lambda *_: False
        module.main()

    launch(job, tmp_path, stage)


JOIN = (
    "join_uneven_inputs() is for DistributedDataParallel; DeepSpeed refuses the model alone, or the join does nothing"
)
LEFT_OUT = {
    "test_can_join_uneven_inputs": JOIN,
    "test_join_can_override_even_batches": JOIN,
    "test_join_can_override_for_mixed_type_dataloaders": JOIN,
    "test_join_raises_warning_for_iterable_when_overriding_even_batches": JOIN,
    "test_pickle_accelerator": "asks an unpickled DeepSpeedPlugin to equal its original; no DeepSpeedPlugin does",
}
if not is_torchdata_stateful_dataloader_available():
    LEFT_OUT |= dict.fromkeys(("test_stateful_dataloader", "test_stateful_dataloader_save_state"), "needs torchdata")


@pytest.mark.extended
def test_distributed_data_loop(tmp_path: Path) -> None:
    def job() -> None:
        module = script("test_distributed_data_loop")
        for name in LEFT_OUT:
            assert callable(getattr(module, name))
            setattr(module, name, lambda *_: None)
        module.main()

    launch(job, tmp_path)


class NormsInSync:
    """In place of a look at ``param.grad``, which ZeRO does not keep: the norm of what a step was taken with."""

    def __init__(self) -> None:
        self.steps = 0

    def __call__(self, model: Any, engine: Any, did_step: bool, iteration: int, rtol: float) -> None:
        stepped = engine.global_steps > self.steps
        self.steps += stepped
        assert stepped == GradientState().sync_gradients, f"iteration {iteration}"
        assert did_step or not stepped, f"iteration {iteration}"
        if stepped:
            expected = math.hypot(*(p.grad.item() for p in model.parameters()))
            assert float(engine.get_global_grad_norm()) == pytest.approx(expected, rel=rtol), f"iteration {iteration}"


@pytest.mark.extended(but=("3",))
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.off_device("its own plain model is on the CPU")
def test_sync(stage: int, tmp_path: Path) -> None:
    def job() -> None:
        module = script("test_sync")
        for split_batches in (False, True):
            for dispatch_batches in (False, True):
                module.check_model_parameters = NormsInSync()
                module.test_gradient_accumulation_with_opt_and_scheduler(
                    split_batches, dispatch_batches, sync_each_batch=split_batches
                )
                assert module.check_model_parameters.steps == (3 if split_batches else 2)
        module.test_dataloader_break()

    launch(job, tmp_path, stage)


def test_sync_after_another_accelerator(tmp_path: Path) -> None:
    def job() -> None:
        module = script("test_sync")
        module.check_model_parameters = NormsInSync()
        module.main()

    launch(job, tmp_path)


def test_metrics(tmp_path: Path) -> None:
    launch(lambda: script("external_deps.test_metrics").main(), tmp_path, stage=3)


@pytest.mark.extended(but=("2",))
@pytest.mark.parametrize("stage", STAGES)
def test_performance(stage: int, tmp_path: Path, bert: str) -> None:
    def job() -> None:
        arguments = argparse.Namespace(
            model_name_or_path=bert, output_dir=tmp_path, performance_lower_bound=ACCURATE, num_epochs=2,
            add_pad_token=False, tp_plan=None, tp_size=None, model_dtype=None,
        )  # fmt: skip
        hyperparameters = {"lr": 1e-2, "num_epochs": 2, "seed": 42, "batch_size": 16}
        script("external_deps.test_performance").training_function(hyperparameters, arguments)

    launch(job, tmp_path, stage, zero={"stage3_gather_16bit_weights_on_model_save": True}, gradient_clipping=1.0)


@pytest.mark.extended(but=("3",))
@pytest.mark.parametrize("stage", STAGES)
def test_checkpointing(stage: int, tmp_path: Path, bert: str) -> None:
    """With two backwards per step, so that the last one of the epoch is in the window that is open when it is saved."""

    def job(resume: bool) -> None:
        arguments = argparse.Namespace(
            model_name_or_path=bert, output_dir=tmp_path, partial_train_epoch=1,
            resume_from_checkpoint=str(tmp_path / "epoch_0") if resume else None,
        )  # fmt: skip
        hyperparameters = {"lr": 1e-2, "num_epochs": 2, "seed": 42, "batch_size": 16}
        script("external_deps.test_checkpointing").training_function(hyperparameters, arguments)

    launch(lambda: job(False), tmp_path, stage, gradient_accumulation_steps=2)
    assert json.loads((tmp_path / "state_0.json").read_text())["accuracy"] > ACCURATE  # and not what it was at first
    launch(lambda: job(True), tmp_path, stage, gradient_accumulation_steps=2)


@pytest.mark.extended
def test_ds_multiple_model(tmp_path: Path, bert: str) -> None:
    def job() -> None:
        module = script("external_deps.test_ds_multiple_model")

        class NoiseModel(module.NoiseModel):
            def __init__(self) -> None:  # see Regression
                super().__init__()
                self.noise_factor = torch.nn.Parameter(self.noise_factor.detach().reshape(1))

        module.NoiseModel = NoiseModel
        # Accelerate's configurations of the same names, without the offload, which would be compiled.
        half = {"fp16": {"enabled": "auto"}, "bf16": {"enabled": "auto"}}
        zero2 = {"stage": 2, "reduce_bucket_size": "auto"}
        left_open = dict.fromkeys(("gradient_clipping", "train_batch_size", "train_micro_batch_size_per_gpu"), "auto")
        module.ds_config_file = {
            "zero2": {"zero_optimization": zero2, "gradient_accumulation_steps": 1, **left_open, **half},
            "zero3": {"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 1, **half},
        }
        arguments = argparse.Namespace(model_name_or_path=bert)
        hyperparameters = {"lr": 1e-3, "num_epochs": 4, "seed": 42, "batch_size": 8}
        module.single_model_training(hyperparameters, arguments)
        AcceleratorState._reset_state(True)
        module.multiple_model_training(hyperparameters, arguments)

    launch(job, tmp_path)


def test_zero3_integration(tmp_path: Path, bert: str) -> None:
    def job() -> None:
        module = script("external_deps.test_zero3_integration")
        module.GPT2_TINY = bert
        connect = torch.distributed.init_process_group
        torch.distributed.init_process_group = lambda backend: connect("gloo")
        inspect.unwrap(module.init_torch_dist_then_launch_deepspeed)()  # is skipped without the real datasets

    launch(job, tmp_path)


@pytest.mark.extended(but=("3",))
@since("1.12", "it has no sequence parallelism", package="accelerate")
@since("0.19.8", "its loader of parts of sequences does not run on gloo")
@pytest.mark.parametrize("stage", STAGES)
def test_ds_alst_ulysses_sp(stage: int, tmp_path: Path) -> None:
    config = LlamaConfig(
        vocab_size=512, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=512,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path / "llama")

    def job() -> None:
        load = transformers.AutoModelForCausalLM.from_pretrained
        transformers.AutoModelForCausalLM.from_pretrained = lambda _: load(tmp_path / "llama")
        transformers.AutoTokenizer.from_pretrained = lambda _: None
        run_file("external_deps.test_ds_alst_ulysses_sp")

    launch(job, tmp_path, stage)
