"""The Hugging Face Trainer, and optimizers and schedulers that DeepSpeed makes: exact against the oracle."""

import json
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DummyOptim, DummyScheduler
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback, TrainingArguments

from tests.accelerate.runs import launched
from tests.harness.engines import configuration
from tests.harness.extended import STAGES
from tests.harness.optimizers import Noted, ScheduleFree
from tests.harness.oracle import Oracle, distance, full_parameters
from tests.harness.problem import MICRO, WORLD, Data, backward_of, loss_of, network, oracle
from tests.harness.ranks import run_ranks
from tests.harness.trainer import InOrder, Model, Rows
from zerosync_strategy import ZeroSyncPlugin
from zerosync_strategy.core.optimizer.problems import drop_empty_groups

BATCHES, EVERY = 10, 4


def train_with_trainer(folder: Path, clip: float, resume: bool) -> Any:
    class Reports(TrainerCallback):
        def __init__(self) -> None:
            self.reports: list[tuple[int, int]] = []

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            report = trainer.accelerator.deepspeed_engine_wrapped.zerosync.report
            self.reports.append((report.backwards, report.reductions))

    arguments = TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=MICRO, gradient_accumulation_steps=EVERY,
        num_train_epochs=2, max_grad_norm=clip, learning_rate=1e-2, lr_scheduler_type="constant", weight_decay=0.0,
        optim="adamw_torch", save_strategy="epoch", report_to=[], disable_tqdm=True, bf16=False,
        dataloader_pin_memory=False, logging_steps=1, ignore_data_skip=False,
    )  # fmt: skip
    assert (arguments.world_size, arguments.process_index) == (WORLD, torch.distributed.get_rank())
    reports = Reports()
    trainer = InOrder(Model(), arguments, train_dataset=Rows(BATCHES), callbacks=[reports])
    trainer.train(resume_from_checkpoint=str(folder / "checkpoint-3") if resume else None)
    norms = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
    parameters = {name.removeprefix("net."): value for name, value in full_parameters(trainer.model).items()}
    return parameters, reports.reports, norms


class ByShapes(InOrder):
    """As LLaMA-Factory's `use_muon`: what its optimizer does with a parameter goes by the shape."""

    def create_optimizer(self, *_: Any) -> Any:
        if self.optimizer is None:
            self.optimizer = Noted(self.model.parameters())
        return self.optimizer


@pytest.mark.extended
@pytest.mark.parametrize("stage", [2, 3])
def test_an_optimizer_that_goes_by_shapes(stage: int, tmp_path: Path) -> None:
    """Also where the parameters are sharded from the beginning."""

    def train() -> Any:
        arguments = TrainingArguments(
            output_dir=str(tmp_path), per_device_train_batch_size=MICRO, gradient_accumulation_steps=EVERY,
            max_steps=2, max_grad_norm=0.0, lr_scheduler_type="constant", save_strategy="no", report_to=[],
            disable_tqdm=True, bf16=False, dataloader_pin_memory=False,
        )  # fmt: skip
        with deepspeed.zero.Init(config_dict_or_path=configuration(3), enabled=stage == 3):
            model = Model()
        assert all(param.dim() == 1 for param in model.parameters()) is (stage == 3)
        trainer = ByShapes(model, arguments, train_dataset=Rows(2 * EVERY))
        trainer.train()
        return {name.removeprefix("net."): value for name, value in full_parameters(trainer.model).items()}

    expected = oracle(Noted)
    for batch in range(2 * EVERY):
        backward_of(expected, batch, EVERY)
        if (batch + 1) % EVERY == 0:
            expected.step()
    for parameters in run_ranks(train, env=launched(stage)):
        assert distance(parameters, full_parameters(expected.module)) == 0.0


@pytest.mark.extended(but=("0.05-3",))
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("clip", [0.0, 0.05])
def test_the_trainer(stage: int, clip: float, tmp_path: Path) -> None:
    expected = oracle(lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.0))
    data, norms = Data(BATCHES), []
    for _ in range(2):
        for first in range(0, BATCHES, EVERY):
            size = min(EVERY, BATCHES - first)  # the Trainer divides by the true size of the tail
            for batch in range(first, first + size):
                expected.backward(
                    lambda rank, batch=batch, n=size: loss_of(expected.module, data.batch(batch, rank)) / n
                )
            norms.append(expected.step(clip or torch.inf))
    trained = run_ranks(train_with_trainer, tmp_path, clip, False, env=launched(stage))
    for parameters, reports, found in trained:
        assert distance(parameters, full_parameters(expected.module)) == 0.0
        assert reports == [(4, 1), (4, 1), (2, 1)] * 2
        assert found == pytest.approx(norms, rel=1e-4)  # logged, rounded
    if clip:
        resumed = run_ranks(train_with_trainer, tmp_path, clip, True, env=launched(stage))
        # To the bit: both make the same operations, from the same bits on the same layout.
        assert distance(resumed[0][0], trained[0][0]) == 0.0


@pytest.mark.extended
@pytest.mark.parametrize("stage", [2, 3])
def test_a_schedule_free_optimizer(stage: int, tmp_path: Path) -> None:
    """The Trainer calls `train()` in each backward, and `eval()` in each evaluation."""

    def train() -> Any:
        given = TrainingArguments(
            output_dir=str(tmp_path), per_device_train_batch_size=MICRO, gradient_accumulation_steps=2, max_steps=4,
            max_grad_norm=0.0, lr_scheduler_type="constant", eval_strategy="steps", eval_steps=2, save_strategy="no",
            report_to=[], disable_tqdm=True, bf16=False, dataloader_pin_memory=False,
        )  # fmt: skip
        model, seen = Model(), []
        optimizer = ScheduleFree(model.parameters())
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)

        class Evaluated(TrainerCallback):
            def on_evaluate(self, *_: Any, **__: Any) -> None:
                seen.append({name.removeprefix("net."): p for name, p in full_parameters(trainer.model).items()})

        trainer = InOrder(
            model, given, train_dataset=Rows(8), eval_dataset=Rows(2), callbacks=[Evaluated()],
            optimizers=(optimizer, scheduler),
        )  # fmt: skip
        trainer.train()
        return seen

    expected, right = oracle(ScheduleFree), []
    for batch in range(8):
        expected.switch("train")
        backward_of(expected, batch, 2)
        if batch % 2:
            expected.step()
        if batch % 4 == 3:
            expected.switch("eval")
            right.append(full_parameters(expected.module))
    for seen in run_ranks(train, env=launched(stage)):
        assert [distance(*pair) for pair in zip(seen, right, strict=True)] == [0.0, 0.0]


class OwnStep(InOrder):
    """As TRL's OnlineDPOTrainer: gives the Accelerator a loss that nobody has divided, so that gradients are summed."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        loss = self.compute_loss(model, self._prepare_inputs(inputs))
        self.accelerator.backward(loss)
        return loss.detach()


@pytest.mark.extended(but=("2",))
@pytest.mark.parametrize("stage", [2, 3])
def test_a_training_step_that_does_not_divide_sums(stage: int, tmp_path: Path) -> None:
    def train() -> Any:
        given = TrainingArguments(
            output_dir=str(tmp_path), per_device_train_batch_size=MICRO, gradient_accumulation_steps=2, max_steps=2,
            max_grad_norm=0.0, learning_rate=1e-2, lr_scheduler_type="constant", optim="sgd", save_strategy="no",
            report_to=[], disable_tqdm=True, bf16=False, dataloader_pin_memory=False,
        )  # fmt: skip
        trainer = OwnStep(Model(), given, train_dataset=Rows(BATCHES))
        trainer.train()
        return {name.removeprefix("net."): value for name, value in full_parameters(trainer.model).items()}

    expected = oracle(lambda parameters: torch.optim.SGD(parameters, lr=1e-2))
    for batch in range(4):
        backward_of(expected, batch)
        if batch % 2:
            expected.step()
    for parameters in run_ranks(train, env=launched(stage)):
        assert distance(parameters, full_parameters(expected.module)) == 0.0


def test_use_cpu_of_two_trainers(tmp_path: Path) -> None:
    """``TrainingArguments(use_cpu=True, deepspeed=...)`` under torchrun trains with DeepSpeed, again and again."""
    config = {"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": "auto", "zerosync": {}}

    def job() -> Any:
        found = []
        for _ in range(2):
            given = arguments(tmp_path, use_cpu=True, deepspeed=dict(config), lr_scheduler_type="constant")
            trainer = InOrder(Model(), given, train_dataset=Rows(4))
            trainer.train()
            assert trainer.accelerator.deepspeed_engine_wrapped.zerosync.report.step == 4
            found.append({name.removeprefix("net."): value for name, value in full_parameters(trainer.model).items()})
        return found

    expected = oracle(lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.0))
    for batch in range(4):
        expected.backward(lambda rank, batch=batch: loss_of(expected.module, Data(4).batch(batch, rank)))
        expected.step()
    for both in run_ranks(job):
        assert [distance(parameters, full_parameters(expected.module)) for parameters in both] == [0.0, 0.0]


@pytest.mark.extended
def test_use_cpu_with_a_model_that_stage_3_shards_as_it_is_loaded(tmp_path: Path) -> None:
    """``from_pretrained`` reads the configuration before there is an engine; its batch sizes are of all ranks."""
    config = {"zero_optimization": {"stage": 3}, "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto",
              "gradient_accumulation_steps": "auto", "zerosync": {}}  # fmt: skip
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2))
    model.save_pretrained(tmp_path / "model")
    tokens = torch.randint(32, (MICRO * WORLD * EVERY, 8))

    def job() -> Any:
        given = arguments(tmp_path, use_cpu=True, deepspeed=dict(config), gradient_accumulation_steps=EVERY)
        loaded = LlamaForCausalLM.from_pretrained(tmp_path / "model")
        assert all(hasattr(param, "ds_id") for param in loaded.parameters())
        trainer = InOrder(loaded, given, train_dataset=[{"input_ids": row, "labels": row} for row in tokens])
        trainer.train()
        return full_parameters(trainer.model)

    expected = Oracle(model, torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0))
    for batch in tokens.view(EVERY, WORLD, MICRO, 8):
        expected.backward(lambda rank, batch=batch: expected.module(batch[rank], labels=batch[rank]).loss / EVERY)
    expected.step()
    for parameters in run_ranks(job):
        assert distance(parameters, full_parameters(expected.module)) == 0.0


def arguments(folder: Path, **options: Any) -> TrainingArguments:
    return TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=MICRO, num_train_epochs=1, max_grad_norm=0.0,
        learning_rate=1e-2, optim="adamw_torch", save_strategy="no", report_to=[], disable_tqdm=True, bf16=False,
        dataloader_pin_memory=False, **{"lr_scheduler_type": "linear", **options},
    )  # fmt: skip


@pytest.mark.extended(but=("True-3",))
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("given", [False, True])
def test_the_trainer_trains_on_with_the_optimizer_that_it_was_given(stage: int, given: bool, tmp_path: Path) -> None:
    """Two calls of ``train()``: as without DeepSpeed, moments and rates go on, and a scheduler that it makes is new."""

    def made(parameters: Any) -> torch.optim.Optimizer:
        if given:
            return torch.optim.SGD(parameters, lr=0.5, momentum=0.9)
        return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.0)

    def job() -> Any:
        model, optimizers = Model(), (None, None)
        if given:
            optimizer = made(model.parameters())
            optimizers = (optimizer, _decay(optimizer))
        trainer = InOrder(model, arguments(tmp_path), train_dataset=Rows(4), optimizers=optimizers)
        trainer.train()
        trainer.train()
        assert trainer.accelerator.deepspeed_engine_wrapped.zerosync.report.step == 8
        return {name.removeprefix("net."): value for name, value in full_parameters(model).items()}

    module, data = network(), Data(4)
    expected = Oracle(module, made(module.parameters()), WORLD)
    scheduler = _decay(expected.optimizer) if given else None
    for _ in range(2):
        if not given:  # what the Trainer's linear schedule is
            scheduler = torch.optim.lr_scheduler.LambdaLR(expected.optimizer, lambda step: max(0.0, (4 - step) / 4))
        for batch in range(4):
            expected.backward(lambda rank, batch=batch: loss_of(module, data.batch(batch, rank)))
            expected.step()
            scheduler.step()
    for parameters in run_ranks(job, env=launched(stage)):
        assert distance(parameters, full_parameters(module)) == 0.0


class ChangesGradients(TrainerCallback):
    """Behind a guard, as callbacks do that clamp gradients or add noise."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_pre_optimizer_step(self, *_: Any, model: Any, **__: Any) -> None:
        self.seen.append(change_gradients(model))


def change_gradients(model: torch.nn.Module) -> float:
    found = [param.grad for param in model.parameters() if param.grad is not None]
    norm = float(torch.stack([gradient.norm() for gradient in found]).norm()) if found else 0.0
    for index, gradient in enumerate(found):
        gradient.clamp_(-1e-3, 1e-3).add_(index * 1e-4)
    return norm


@pytest.mark.extended(but=("0.0-2",))
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("clip", [0.0, 0.05])
def test_callbacks_before_the_step_have_averaged_gradients(stage: int, clip: float, tmp_path: Path) -> None:
    def job() -> Any:
        given = arguments(tmp_path, gradient_accumulation_steps=2, lr_scheduler_type="constant")
        given.max_grad_norm, given.optim = clip, "sgd"
        callback = ChangesGradients()
        trainer = InOrder(Model(), given, train_dataset=Rows(4))
        trainer.add_callback(callback)
        trainer.train()
        return {name.removeprefix("net."): p for name, p in full_parameters(trainer.model).items()}, callback.seen

    expected, norms = oracle(lambda parameters: torch.optim.SGD(parameters, lr=1e-2)), []
    expected.optimizer.register_step_pre_hook(lambda *_: norms.append(change_gradients(expected.module)))
    for batch in range(4):
        backward_of(expected, batch, 2)
        if batch % 2:
            expected.step(clip)
    for parameters, seen in run_ranks(job, env=launched(stage)):
        assert seen == pytest.approx(norms[1::2], rel=1e-4)  # each step is made twice, first rounded otherwise
        assert distance(parameters, full_parameters(expected.module)) == 0.0


class TooLarge(Model):
    """Has no memory for a backward of so many rows, which comes second."""

    calls = 0

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        out = super().forward(x, y)
        self.calls += 1
        if self.calls == 2:
            out["loss"].register_hook(_no_memory)
        return out


def _no_memory(_: torch.Tensor) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")


@pytest.mark.extended(but=("True",))
@pytest.mark.parametrize("configured", [False, True])
def test_auto_find_batch_size(configured: bool, tmp_path: Path) -> None:
    """After an out-of-memory error, model and moments go on, as without DeepSpeed; the schedule begins anew."""

    def job() -> Any:
        environment = json.loads(launched(2)["ACCELERATE_DEEPSPEED_CONFIG_FILE"])
        if configured:  # an engine that has made no step is built anew, with a schedule for the new number of steps
            environment["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True, "weight_decay": 0}}
        given = arguments(
            tmp_path, use_cpu=True, deepspeed=environment, auto_find_batch_size=True, gradient_accumulation_steps=2
        )  # fmt: skip
        trainer = InOrder(model := TooLarge(), given, train_dataset=Rows(4 // MICRO))
        trainer.train()
        assert trainer._train_batch_size == 1 and trainer.deepspeed._zerosync.report.step == 2
        return {name.removeprefix("net."): value for name, value in full_parameters(model).items()}

    expected, data = oracle(lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.0)), Data(2)
    schedule = torch.optim.lr_scheduler.LambdaLR(expected.optimizer, lambda step: (2 - step) / 2)
    for first in (0, 4):
        for row in (first, first + 2):
            expected.backward(lambda rank, i=row: loss_of(expected.module, (data.x[i + rank], data.y[i + rank])) / 2)
        expected.step()
        schedule.step()
    for parameters in run_ranks(job):
        assert distance(parameters, full_parameters(expected.module)) == 0.0


@pytest.mark.extended(but=("3",))
@pytest.mark.parametrize("stage", [2, 3])
def test_a_new_optimizer_or_trainer_for_a_trained_model(
    stage: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No other engine's hooks take part: not of the one before, and not of one that was refused."""
    for optimizer in (DeepSpeedZeroOptimizer, DeepSpeedZeroOptimizer_Stage3):
        monkeypatch.setattr(optimizer, "reduce_ready_partitions_and_remove_grads", None)

    def job() -> Any:
        trainer = InOrder(model := Model(), arguments(tmp_path), train_dataset=Rows(4))
        trainer.train()
        trainer.optimizer = None
        trainer.train()
        other = InOrder(model, arguments(tmp_path), train_dataset=Rows(4))
        if stage == 3:
            with pytest.raises(ValueError, match=r"trainer\.model_wrapped\.destroy\(\)"):
                other.train()
        trainer.model_wrapped.destroy()
        InOrder(model, arguments(tmp_path), train_dataset=Rows(4)).train()
        return {name.removeprefix("net."): value for name, value in full_parameters(model).items()}

    expected = oracle(lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.0))
    for _ in range(3):
        expected.optimizer = torch.optim.AdamW(expected.module.parameters(), lr=1e-2, weight_decay=0.0)
        scheduler = torch.optim.lr_scheduler.LambdaLR(expected.optimizer, lambda step: (4 - step) / 4)
        for batch in range(4):
            backward_of(expected, batch)
            expected.step()
            scheduler.step()
    for parameters in run_ranks(job, env=launched(stage)):
        assert distance(parameters, full_parameters(expected.module)) == 0.0


class WithAnEmptyGroup(InOrder):
    """As Trainers of LoRA before transformers 5, and LLaVA's: DeepSpeed takes such a group away."""

    def create_optimizer(self, *_: Any) -> Any:
        self.optimizer = torch.optim.SGD(_groups(self.model), lr=0.5)
        return self.optimizer


def _groups(model: torch.nn.Module) -> list[dict[str, Any]]:
    first, *others = model.parameters()
    return [{"params": [first], "lr": 0.1}, {"params": []}, {"params": others, "lr": 0.05}]


def test_a_scheduler_goes_without_empty_groups() -> None:
    model = Model()
    optimizer = torch.optim.SGD(_groups(model), lr=0.5)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda _: 0.5, lambda _: 0.0, lambda _: 0.25])
    drop_empty_groups(optimizer)
    optimizer.step()
    scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.05, 0.0125] == scheduler.get_last_lr()


def test_schedulers_in_a_row_go_without_empty_groups() -> None:
    optimizer, of = torch.optim.SGD(_groups(Model()), lr=0.5), torch.optim.lr_scheduler
    parts = [of.ConstantLR(optimizer, 0.5, 1), of.StepLR(optimizer, 1, 0.1)]
    scheduler = of.SequentialLR(optimizer, parts, [1])
    drop_empty_groups(optimizer)
    optimizer.step()
    scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.1, 0.05])
    scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.01, 0.005]) == scheduler.get_last_lr()


@pytest.mark.extended
def test_a_group_without_parameters(tmp_path: Path) -> None:
    def job() -> Any:
        trainer = WithAnEmptyGroup(model := Model(), arguments(tmp_path), train_dataset=Rows(4))
        trainer.train()
        return full_parameters(model), [_rates_with_accelerate(prepared) for prepared in (True, False)]

    model, data = Model(), Data(4)
    expected = Oracle(model, torch.optim.SGD(_groups(model), lr=0.5), WORLD)
    scheduler = torch.optim.lr_scheduler.LambdaLR(expected.optimizer, lambda step: (4 - step) / 4)
    for batch in range(4):
        expected.backward(lambda rank, batch=batch: loss_of(model.net, data.batch(batch, rank)))
        expected.step()
        scheduler.step()
    for parameters, rates in run_ranks(job, env=launched(2)):
        assert distance(parameters, full_parameters(model)) == 0.0
        assert rates == [[0.05, 0.0125]] * 2


def _rates_with_accelerate(prepared: bool) -> list[float]:
    """After a step with a scheduler that was made for the empty group, too, as in transformers' run_clm_no_trainer."""
    accelerator = Accelerator(step_scheduler_with_optimizer=False)
    optimizer = torch.optim.SGD(_groups(model := Model()), lr=0.5)
    scheduler: Any = torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda _: 0.5, lambda _: 0.0, lambda _: 0.25])
    engine, optimizer, *others = accelerator.prepare(model, optimizer, *([scheduler] if prepared else []))
    scheduler = others[0] if prepared else scheduler
    x, y = Data(1).batch(0, 0)
    accelerator.backward(engine(x, y)["loss"])
    optimizer.step()
    scheduler.step()
    return [group["lr"] for group in optimizer.param_groups]


class SavesTheModule(InOrder):
    """As sentence-transformers' Trainer: it leaves what transformers has gathered, and ranks read in any order."""

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        state, rank = self.model.state_dict(), torch.distributed.get_rank()
        names = sorted(state, reverse=bool(rank))
        torch.save({name: state[name] + 0.0 for name in names}, Path(output_dir or "") / f"{rank}.pt")


def test_a_trainer_that_saves_its_module_itself(tmp_path: Path) -> None:
    def job() -> Any:
        trainer = SavesTheModule(Model(), arguments(tmp_path), train_dataset=Rows(4))
        for _ in range(2):
            trainer.train()
            trainer.save_model(str(tmp_path))
        saved = torch.load(tmp_path / f"{torch.distributed.get_rank()}.pt")
        return distance(saved, full_parameters(trainer.model))

    environment = launched(3)
    config = json.loads(environment["ACCELERATE_DEEPSPEED_CONFIG_FILE"])
    config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    environment["ACCELERATE_DEEPSPEED_CONFIG_FILE"] = json.dumps(config)
    assert run_ranks(job, env=environment) == [0.0, 0.0]


def test_an_optimizer_beside_a_configured_one_is_refused(tmp_path: Path) -> None:
    def job() -> None:
        trainer = InOrder(model := Model(), arguments(tmp_path), train_dataset=Rows(4))
        trainer.optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        trainer.accelerator.state.deepspeed_plugin.deepspeed_config["optimizer"] = {"type": "AdamW"}
        with pytest.raises(ValueError, match=r"Trainer got the optimizer SGD, and .* configuration has one, too"):
            trainer.train()

    run_ranks(job, env=launched(2))


def test_deepspeeds_own_muon_is_refused_before_it_compiles() -> None:
    def job() -> None:
        config = {"zero_optimization": {"stage": 2}, "optimizer": {"type": "Muon", "params": {"lr": 0.05}}}
        accelerator = Accelerator(deepspeed_plugin=ZeroSyncPlugin(hf_ds_config=config))
        model = network()
        deepspeed.DeepSpeedEngine._configure_optimizer = None  # is not reached
        with pytest.raises(ValueError, match="does not support DeepSpeed's own Muon"):
            accelerator.prepare(model, DummyOptim(model.parameters()))

    run_ranks(job)


@pytest.mark.extended(but=("2",))
@pytest.mark.parametrize("stage", STAGES)
def test_optimizers_and_schedulers_that_deepspeed_makes(stage: int) -> None:
    def job() -> Any:
        optimizer = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.01, "torch_adam": True}}
        config = {"zero_optimization": {"stage": stage}, "optimizer": optimizer}
        accelerator = Accelerator(deepspeed_plugin=ZeroSyncPlugin(hf_ds_config=config), gradient_accumulation_steps=2)
        model = network()
        dummy = DummyOptim(model.parameters())
        scheduler = DummyScheduler(dummy, lr_scheduler_callable=_decay)
        engine, optimizer, scheduler = accelerator.prepare(model, dummy, scheduler)
        for index in range(6):
            accelerator._do_sync()
            accelerator.backward(loss_of(engine, Data(12).batch(index, accelerator.process_index)))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        return full_parameters(model), scheduler.get_last_lr(), engine.global_steps

    module = network()
    expected = Oracle(module, torch.optim.AdamW(module.parameters(), lr=1e-2, weight_decay=0.01), WORLD)
    decay, data = _decay(expected.optimizer), Data(12)
    for index in range(6):
        expected.backward(lambda rank, index=index: loss_of(module, data.batch(index, rank)) / 2)
        if index % 2:
            expected.step()
            decay.step()
    for parameters, rate, steps in run_ranks(job):
        assert distance(parameters, full_parameters(module)) == 0.0
        assert (rate, steps) == (decay.get_last_lr(), 3)


def _decay(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
