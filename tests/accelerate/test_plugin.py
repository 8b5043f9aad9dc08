"""Configuration: where options come from, what is refused and how, and what stays as Accelerate made it."""

import json
import os
import re
import sys
from typing import Any

import accelerate
import pytest
import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import DeepSpeedPlugin
from accelerate.utils.deepspeed import DeepSpeedEngineWrapper, DeepSpeedOptimizerWrapper, HfDeepSpeedConfig
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from tests.accelerate.runs import start
from tests.harness.problem import WORLD, Data, loss_of, network, sgd
from tests.harness.ranks import run_ranks
from tests.harness.releases import except_from, since
from zerosync_strategy import ZeroSyncPlugin
from zerosync_strategy.accelerate.plugin import AccelerateConfig

LAUNCHED = "ACCELERATE_DEEPSPEED_CONFIG_FILE"


def config(stage: int = 2, **block: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage}, "zerosync": block}


def test_options_come_from_keywords_and_from_the_block() -> None:
    plugin = ZeroSyncPlugin(
        stage=3,
        hf_ds_config=config(3, grad_memory_budget="1MB", step_on="backward"),
        param_memory_budget="all",
        transformer_moe_cls_names="Block",
    )
    assert plugin.zerosync_config == AccelerateConfig(
        grad_memory_budget="1MB", param_memory_budget="all", step_on="backward"
    )
    assert (plugin.zero_stage, plugin.transformer_moe_cls_names) == (3, "Block")
    assert ZeroSyncPlugin(1, gradient_clipping=0.5).deepspeed_config["gradient_clipping"] == 0.5
    assert ZeroSyncPlugin().zero_stage == 2


def test_a_configuration_may_leave_the_stage_open(monkeypatch: pytest.MonkeyPatch) -> None:
    def auto() -> Any:
        return {"zero_optimization": {"stage": "auto"}, "zerosync": {}}

    assert ZeroSyncPlugin(hf_ds_config=auto()).deepspeed_config["zero_optimization"]["stage"] == 2
    for plugin in (
        ZeroSyncPlugin(stage=3, hf_ds_config=auto()),
        ZeroSyncPlugin(stage=3, hf_ds_config=HfDeepSpeedConfig(auto())),
        DeepSpeedPlugin(zero_stage=3, hf_ds_config=auto()),
        ZeroSyncPlugin(stage=3, hf_ds_config={"zerosync": {}}),
    ):
        assert plugin.zero_stage == plugin.deepspeed_config["zero_optimization"]["stage"] == 3
        assert plugin.hf_ds_config.is_zero3() and plugin.zero3_init_flag
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO_STAGE", "1")
    assert ZeroSyncPlugin(hf_ds_config=auto()).zero_stage == 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ZeroSyncPlugin(coalesc=True), r"unknown option 'coalesc'.*'coalesce'"),
        (lambda: ZeroSyncPlugin(hf_ds_config=config(coalesc=True)), r"Unknown ZeroSync option 'coalesc'.*'coalesce'"),
        (lambda: ZeroSyncPlugin(step_on="forward"), r"'step_on' takes one of auto, optimizer, backward, got 'forward'"),
        (lambda: ZeroSyncPlugin(hf_ds_config=config(step_on="optimizer"), step_on="backward"), r"'step_on' is 'optim"),
        (lambda: ZeroSyncPlugin(hf_ds_config={"zerosync": 3}), "zerosync"),
        (lambda: ZeroSyncPlugin(stage=0), r"stage 1, 2 or 3, got stage = 0"),
        (lambda: ZeroSyncPlugin(zero_stage=4), r"stage 1, 2 or 3, got zero_stage = 4"),
        (lambda: ZeroSyncPlugin(stage=1, zero_stage=2), r"stage = 1, zero_stage = 2\. Give the stage in one place"),
        (lambda: ZeroSyncPlugin(stage=2, hf_ds_config=config(3)), r"stage = 2, 'zero_optimization.stage' .* = 3"),
    ],
)
def test_a_wrong_configuration_is_an_error_that_names_it(make: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        make()


def test_a_model_that_is_saved_under_zero_3_has_its_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    def saves(plugin: Any) -> Any:
        return plugin.deepspeed_config["zero_optimization"].get("stage3_gather_16bit_weights_on_model_save")

    no = {"stage": 3, "stage3_gather_16bit_weights_on_model_save": False}
    assert saves(ZeroSyncPlugin(stage=3)) and saves(ZeroSyncPlugin(hf_ds_config=config(3)))
    assert saves(ZeroSyncPlugin(hf_ds_config=HfDeepSpeedConfig(config(3))))
    assert not saves(ZeroSyncPlugin(stage=2)) and not saves(ZeroSyncPlugin(hf_ds_config=config(2)))
    assert saves(ZeroSyncPlugin(hf_ds_config={"zero_optimization": no})) is False
    assert saves(ZeroSyncPlugin(stage=3, zero3_save_16bit_model=False)) is False
    assert saves(ZeroSyncPlugin(hf_ds_config=config(3), zero3_save_16bit_model=False)) is False
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL", "false")
    assert saves(ZeroSyncPlugin(stage=3)) is False


def test_the_launchers_stage_must_agree_with_the_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO_STAGE", "3")
    assert ZeroSyncPlugin().zero_stage == ZeroSyncPlugin(stage=3).zero_stage == 3
    with pytest.raises(ValueError, match=r"stage = 2, zero_stage of the Accelerate configuration = 3"):
        ZeroSyncPlugin(stage=2)
    monkeypatch.delenv("ACCELERATE_DEEPSPEED_ZERO_STAGE")
    monkeypatch.setenv(LAUNCHED, json.dumps(config(3)))
    with pytest.raises(ValueError, match=r"stage = 2, 'zero_optimization.stage' of the DeepSpeed configuration = 3"):
        ZeroSyncPlugin(stage=2)


def test_a_configuration_with_a_block_trains_with_zerosync_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    assert type(DeepSpeedPlugin(hf_ds_config=config(3))) is ZeroSyncPlugin
    assert type(DeepSpeedPlugin(hf_ds_config={"zero_optimization": {"stage": 3}})) is DeepSpeedPlugin
    monkeypatch.setenv(LAUNCHED, json.dumps(config(1, reduction="ordered")))
    plugin = DeepSpeedPlugin()
    assert isinstance(plugin, ZeroSyncPlugin)
    assert (plugin.zero_stage, plugin.zerosync_config.reduction) == (1, "ordered")
    monkeypatch.setenv(LAUNCHED, json.dumps(config(1, overlap=True)))
    with pytest.raises(ValueError, match=r"Unknown ZeroSync option 'overlap' in the 'zerosync' block"):
        DeepSpeedPlugin()


@except_from("0.18.7", "0.19.0", "stock cannot step on stages 1 and 2 with this torch")
def test_stock_deepspeed_in_the_same_process_is_stock() -> None:
    """Its defects included: every backward steps, optimizer.step() does nothing, max_norm is ignored."""

    def job() -> Any:
        ours = start(2)
        assert ours.accelerator.num_processes == WORLD
        plugin = DeepSpeedPlugin(zero_stage=2, gradient_clipping=0.0)
        ours.accelerator.state._reset_state()
        accelerator = Accelerator(deepspeed_plugin=plugin)
        model = network()
        engine, optimizer, _ = accelerator.prepare(model, sgd(model.parameters()), DataLoader(Data(4), batch_size=2))
        assert type(accelerator) is Accelerator
        assert type(accelerator.deepspeed_engine_wrapped) is DeepSpeedEngineWrapper
        assert type(optimizer) is DeepSpeedOptimizerWrapper
        for index in range(3):
            accelerator.backward(loss_of(engine, Data(4).batch(index, accelerator.process_index)))
        optimizer.step()
        assert engine.global_steps == 3
        assert engine.gradient_accumulation_steps() == 1
        norm = accelerator.clip_grad_norm_(engine.parameters(), 1e-9)
        # ... while the other engine goes on with its own window.
        ours.accelerator.backward(loss_of(ours.model, ours.batch(0)))
        ours.accelerator.backward(loss_of(ours.model, ours.batch(1)))
        ours.optimizer.step()
        return norm, ours.zerosync.report.backwards, ours.model.global_steps

    for norm, backwards, steps in run_ranks(job):
        assert norm > 1e-3
        assert (backwards, steps) == (2, 1)


@pytest.mark.parametrize("stage", [2, 3])
def test_transformers_are_not_needed(stage: int) -> None:
    def job() -> Any:
        for name in [name for name in sys.modules if name.split(".")[0] == "transformers"]:
            del sys.modules[name]
        sys.modules["transformers"] = None  # type: ignore[assignment]
        run = start(stage)
        run.accelerator.backward(loss_of(run.model, run.batch(0)))
        run.optimizer.step()
        return run.model.global_steps

    assert run_ranks(job) == [1, 1]


def test_loaders_need_not_say_a_batch_size() -> None:
    def job(loader: Any) -> Any:
        accelerator = Accelerator(deepspeed_plugin=ZeroSyncPlugin(stage=2), gradient_accumulation_steps=3)
        model = network()
        prepared = accelerator.prepare(model, sgd(model.parameters()), *([loader] if loader else []))
        return prepared[0].gradient_accumulation_steps(), accelerator.gradient_accumulation_steps

    sampled = DataLoader(Data(4), batch_sampler=BatchSampler(SequentialSampler(Data(4)), 2, False))
    for loader in (None, sampled):
        assert run_ranks(job, loader) == [(1, 3)] * WORLD


def test_several_accelerators_fill_in_auto_for_themselves() -> None:
    def job() -> Any:
        config: dict[str, Any] = {"zero_optimization": {"stage": 2}, "train_batch_size": 8}
        config |= dict.fromkeys(("gradient_accumulation_steps", "train_micro_batch_size_per_gpu"), "auto")
        first = Accelerator(deepspeed_plugin=ZeroSyncPlugin(hf_ds_config=config), gradient_accumulation_steps=1)
        first.prepare(*_model_and_optimizer(), DataLoader(Data(4), batch_size=4))
        Accelerator().prepare(*_model_and_optimizer())  # of the same batch size: nothing says another
        third = Accelerator(gradient_accumulation_steps=2)
        third.prepare(*_model_and_optimizer(), DataLoader(Data(4), batch_size=2))
        return third.gradient_accumulation_steps

    assert run_ranks(job) == [2, 2]


def test_what_is_filled_in_stays_when_something_else_is_prepared() -> None:
    """TRL makes engines of the plugin's configuration for reward models, after it has prepared a loader to evaluate."""

    def job() -> Any:
        config: dict[str, Any] = {"zero_optimization": {"stage": 2}, "gradient_clipping": "auto"}
        accelerator = Accelerator(deepspeed_plugin=ZeroSyncPlugin(hf_ds_config=config), gradient_accumulation_steps=2)
        accelerator.prepare(*_model_and_optimizer(), DataLoader(Data(4), batch_size=2))
        names = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
        filled = accelerator.deepspeed_plugin.deepspeed_config
        before = [filled[name] for name in names]
        accelerator.prepare(DataLoader(Data(4), batch_size=4))
        assert [filled[name] for name in names] == before
        return before

    assert run_ranks(job) == [[2, 2, 0.0]] * WORLD


def _model_and_optimizer() -> tuple[Any, Any]:
    model = network()
    return model, sgd(model.parameters())


def test_without_a_launcher_there_is_one_rank() -> None:
    def job() -> Any:
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            del os.environ[name]
        run = start(3)
        run.accelerator.backward(loss_of(run.model, run.batch(0)))
        run.optimizer.step()
        return run.accelerator.num_processes, run.zerosync.report.bytes_sent

    assert run_ranks(job, world_size=1) == [(1, 0)]


def test_a_model_without_an_optimizer_evaluates() -> None:
    """On stage 3, that is: DeepSpeed itself wants an optimizer on the others."""

    def job() -> Any:
        accelerator = Accelerator(deepspeed_plugin=ZeroSyncPlugin(stage=3))
        model, loader = accelerator.prepare(network(), DataLoader(Data(4), batch_size=2))
        with torch.no_grad():
            return torch.cat([accelerator.gather_for_metrics(model(x)) for x, _ in loader])

    expected = network()(Data(4).x).detach()
    for outputs in run_ranks(job):
        torch.testing.assert_close(outputs, expected)


def refused_on_every_rank(job: Any, message: str) -> None:
    def run() -> None:
        with pytest.raises((ValueError, RuntimeError), match=re.escape(message)):
            job()

    run_ranks(run)


def test_cpu_true_would_switch_deepspeed_off() -> None:
    def job(before: bool) -> None:
        if before:
            PartialState(cpu=True)
        Accelerator(cpu=True, deepspeed_plugin=ZeroSyncPlugin(stage=2))

    for before in (False, True):
        refused_on_every_rank(lambda before=before: job(before), "switches DeepSpeed off")


@since("1.15", "it knows them, and DeepSpeed compiles an operator on CPU", package="accelerate")
def test_a_state_made_before_the_plugin_does_not_know_the_ranks() -> None:
    def job() -> None:
        PartialState()
        start(2)

    refused_on_every_rank(job, "one of 1, but 2 run")


def test_clipping_that_zero_cannot_do_is_refused() -> None:
    def job(**options: Any) -> None:
        run = start(2)
        run.accelerator.backward(loss_of(run.model, run.batch(0)))
        parameters = list(run.model.parameters())[options.pop("first", 0) :]
        run.accelerator.clip_grad_norm_(parameters, 1.0, **options)

    refused_on_every_rank(lambda: job(norm_type=1), "norm_type=2, got 1")
    refused_on_every_rank(lambda: job(first=2), "2 of 6 were not among those given")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda model: torch.optim.LBFGS(model.parameters()), "LBFGS computes with all parameters"),
        (lambda model: sgd([*model.parameters(), torch.nn.Parameter(torch.ones(3))]), "number 6 of group 0"),
        (lambda model: accelerate.utils.DummyOptim([torch.nn.Parameter(torch.ones(3))]), "number 0 of group 0"),
    ],
)
def test_optimizers_that_zero_cannot_step_are_refused(make: Any, message: str) -> None:
    def job() -> None:
        accelerator = Accelerator(deepspeed_plugin=ZeroSyncPlugin(stage=3))
        model = network()
        accelerator.prepare(model, make(model))

    refused_on_every_rank(job, message)


def test_an_optimizer_is_prepared_once() -> None:
    def job() -> None:
        accelerator = Accelerator(deepspeed_plugin=ZeroSyncPlugin(stage=2))
        model, optimizer = _model_and_optimizer()
        accelerator.prepare(model, optimizer)
        accelerator.free_memory()
        accelerator.prepare(model, optimizer)

    refused_on_every_rank(job, "SGD has been given to an engine before")


def test_what_a_block_leaves_to_zerosync_is_not_for_accelerate() -> None:
    """`"auto"` is a value of the block's own; Accelerate fills in those of DeepSpeed."""

    def run() -> None:
        given = config(2, node_size="auto", step_on="auto", grad_memory_budget={"auto": "64GiB"})
        run = start(2, hf_ds_config=given | {"train_micro_batch_size_per_gpu": 1})
        run.accelerator.backward(loss_of(run.model, run.batch(0)))
        run.optimizer.step()
        plugin = run.accelerator.deepspeed_plugin
        assert plugin.deepspeed_config["zerosync"]["node_size"] == "auto" and run.zerosync.report.reductions == 1

    run_ranks(run)
