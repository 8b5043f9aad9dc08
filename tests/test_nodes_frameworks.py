"""Gradients and parameters in shards of the node, under each framework on two nodes of two ranks: plain torch."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainingArguments

import tests.accelerate.runs
import tests.fabric.runs
import tests.lightning.runs
from tests.fabric.runs import losses, make_fabric, trained
from tests.harness import problem
from tests.harness.oracle import Oracle, distance, full_parameters
from tests.harness.problem import MICRO, adamw, backward_of, loss_of, network, oracle
from tests.harness.ranks import run_ranks
from tests.harness.trainer import InOrder, Model, Rows
from tests.lightning.runs import Module, accumulate, fit
from zerosync_strategy.lightning import ZeroSyncStrategy

RANKS, NODE_RANKS, N = 4, 2, 3
NODES = {"LOCAL_WORLD_SIZE": str(NODE_RANKS)}
NODE = {"device": 0, "node": "all"}
STAGES = pytest.mark.parametrize("stage", [2, 3])


@pytest.fixture(autouse=True)
def four_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (problem, tests.lightning.runs, tests.fabric.runs):
        monkeypatch.setattr(module, "WORLD", RANKS)


def budgets(stage: int) -> dict[str, Any]:
    return {"grad_memory_budget": NODE} | ({"param_memory_budget": NODE} if stage == 3 else {})


def block(stage: int, **config: Any) -> dict[str, Any]:
    """A configuration with the options, whose parameters are all sharded."""
    sharded = {"stage3_param_persistence_threshold": 0} if stage == 3 else {}
    return {**config, "zero_optimization": {"stage": stage, **sharded}, "zerosync": budgets(stage)}


def crosses_once(report: Any, stage: int) -> bool:
    """Whether what had to cross between nodes did, and no more but a norm."""
    minimum = report.floor_bytes_between_nodes
    in_shards = report.peak_node_bytes > 0 or stage < 3
    return bool(in_shards and minimum > 0 and report.bytes_sent_between_nodes <= 1.03 * minimum + 100)


class Manual(Module):
    """A step every `N` batches; the loss is a share of their mean."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(loss_of(self.net, batch) / N)
        if (batch_idx + 1) % N == 0:
            self.optimizers().step()
            self.optimizers().zero_grad()


class Two(Module):
    """An optimizer for the first layer and one for the others, which take turns."""

    automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return [adamw(params) for params in halves(self.net)]

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()[batch_idx // N % 2]
        self.toggle_optimizer(optimizer)
        self.manual_backward(loss_of(self.net, batch) / N)
        if (batch_idx + 1) % N == 0:
            optimizer.step()
            optimizer.zero_grad()
        self.untoggle_optimizer(optimizer)


def halves(net: Any) -> list[list[Any]]:
    return [list(net[0].parameters()), [*net[2].parameters(), *net[4].parameters()]]


@pytest.mark.extended
@STAGES
def test_lightning(stage: int) -> None:
    """By keywords and by the block of a configuration; automatic, manual, and two optimizers."""

    def run() -> tuple[list[float], list[bool]]:
        sharded = block(stage)
        del sharded["zerosync"]
        by_keyword = ZeroSyncStrategy(config=sharded, node_size=NODE_RANKS, **budgets(stage))
        automatic, _ = fit(Module(adamw), by_keyword, 2 * N, accumulate_grad_batches=N)
        manual, _ = fit(Manual(adamw), ZeroSyncStrategy(config=block(stage)), 2 * N)
        two, _ = fit(Two(), ZeroSyncStrategy(config=block(stage)), 4 * N)
        expected = accumulate(oracle(adamw), 2 * N, N)
        net = network()
        oracles = [Oracle(net, adamw(params), RANKS) for params in halves(net)]
        for batch in range(4 * N):
            turn = oracles[batch // N % 2]
            backward_of(turn, batch, N)
            if (batch + 1) % N == 0:
                turn.step()
        errors = [distance(recorder.parameters, expected) for recorder in (automatic, manual)]
        errors.append(distance(two.parameters, full_parameters(net)))
        reports = [recorder.reports[-1] for recorder in (automatic, manual)]
        return errors, [crosses_once(report, stage) for report in reports]

    assert run_ranks(run, world_size=RANKS, env=NODES) == [([0.0] * 3, [True] * 2)] * RANKS


@pytest.mark.extended
@STAGES
def test_fabric(stage: int) -> None:
    """Two models, and clipping."""

    def run() -> list[float]:
        fabric = make_fabric(stage, config=block(stage))
        pairs, plains = [trained(fabric, adamw) for _ in range(2)], [oracle(adamw) for _ in range(2)]
        for step in range(2):
            for (model, optimizer), plain in zip(pairs, plains, strict=True):
                batches = range(N * step, N * step + N)
                for loss in losses(fabric, model, batches, N):
                    fabric.backward(loss, model=model)
                fabric.clip_gradients(model, optimizer, max_norm=0.05)
                optimizer.step()
                optimizer.zero_grad()
                for batch in batches:
                    backward_of(plain, batch, N)
                plain.step(0.05)
        assert all(crosses_once(model._forward_module._zerosync.report, stage) for model, _ in pairs)
        return [
            distance(full_parameters(model.module), full_parameters(plain.module))
            for (model, _), plain in zip(pairs, plains, strict=True)
        ]

    assert run_ranks(run, world_size=RANKS, env=NODES) == [[0.0, 0.0]] * RANKS


@pytest.mark.extended
@STAGES
def test_accelerate(stage: int) -> None:
    def run() -> float:
        sharded = {"zero_optimization": block(stage)["zero_optimization"], "train_micro_batch_size_per_gpu": MICRO}
        run = tests.accelerate.runs.start(
            stage, batches=2 * N, accumulate=N, optimizer=adamw, hf_ds_config=sharded, **budgets(stage)
        )
        for x, y in run.loader:
            with run.accelerator.accumulate(run.model):
                run.accelerator.backward(loss_of(run.model, (x, y)))
                run.optimizer.step()
                run.optimizer.zero_grad()
        plain = oracle(adamw)
        for batch in range(2 * N):
            backward_of(plain, batch, N)
            if (batch + 1) % N == 0:
                plain.step()
        assert crosses_once(run.zerosync.report, stage)
        return distance(run.parameters(), full_parameters(plain.module))

    assert run_ranks(run, world_size=RANKS, env=NODES) == [0.0] * RANKS


@pytest.mark.extended(but=("3",))
@STAGES
def test_the_trainer(stage: int, tmp_path: Path) -> None:
    """By the configuration that a launcher gives."""
    automatic = {"gradient_accumulation_steps": "auto", "train_micro_batch_size_per_gpu": "auto"}
    config = block(stage, gradient_clipping="auto", **automatic)
    launched = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": json.dumps(config)}

    def run() -> float:
        arguments = TrainingArguments(
            output_dir=str(tmp_path), per_device_train_batch_size=MICRO, gradient_accumulation_steps=N, max_steps=2,
            max_grad_norm=0.05, learning_rate=1e-2, lr_scheduler_type="constant", weight_decay=0.0,
            optim="adamw_torch", save_strategy="no", report_to=[], disable_tqdm=True, bf16=False,
            dataloader_pin_memory=False,
        )  # fmt: skip
        trainer = InOrder(Model(), arguments, train_dataset=Rows(2 * N))
        trainer.train()
        plain = oracle(lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.0))
        for batch in range(2 * N):
            backward_of(plain, batch, N)
            if (batch + 1) % N == 0:
                plain.step(0.05)
        assert crosses_once(trainer.accelerator.deepspeed_engine_wrapped.zerosync.report, stage)
        trained = {name.removeprefix("net."): value for name, value in full_parameters(trainer.model).items()}
        return distance(trained, full_parameters(plain.module))

    assert run_ranks(run, world_size=RANKS, env=NODES | launched) == [0.0] * RANKS
