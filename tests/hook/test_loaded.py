"""What becomes of a program that does not name ZeroSync under ``zerosync run``."""

from pathlib import Path
from typing import Any

import deepspeed
import torch

from tests.harness.engines import configuration, rank, start
from tests.harness.oracle import distance, full_parameters
from tests.harness.problem import Data, adamw, backward_of, loss_of, network, oracle
from tests.harness.ranks import run_ranks
from zerosync_strategy import attach
from zerosync_strategy.core.announcement import NOTES
from zerosync_strategy.hook.loaded import loaded


def make(optimizer: Any = adamw, stage: int = 2, **config: Any) -> Any:
    """The engine that a program makes by ``deepspeed.initialize``."""
    start()
    loaded("deepspeed")
    net = network()
    made = None if optimizer is None else optimizer(net.parameters())
    return deepspeed.initialize(model=net, optimizer=made, config=configuration(stage, **config))[0]


def test_a_program_of_plain_deepspeed_trains_as_plain_torch(tmp_path: Path) -> None:
    """With DeepSpeed's own accumulation, on stages 2 and 3; the first rank of the node notes it down."""
    notes = tmp_path / "notes"
    notes.touch()

    def train(stage: int, block: dict[str, Any]) -> Any:
        engine = make(stage=stage, gradient_accumulation_steps=2, **block)
        data = Data(4)
        for batch in range(4):
            engine.backward(loss_of(engine, data.batch(batch, rank())))
            engine.step()
        report = engine._zerosync.report
        assert (report.step, report.backwards, report.reductions) == (2, 2, 1)
        return full_parameters(engine.module)

    plain = oracle(adamw)
    for batch in range(4):
        backward_of(plain, batch, over=2)
        if batch % 2:
            plain.step()
    for stage, block in ((2, {}), (3, {"zerosync": {"param_memory_budget": "all"}})):
        for trained in run_ranks(train, stage, block, env={NOTES: str(notes)}):
            assert distance(trained, full_parameters(plain.module)) == 0.0
    attached = "attached to Sequential, ZeRO-{} on 2 ranks"
    assert notes.read_text().splitlines() == [attached.format(2), attached.format(3)]


def test_what_is_not_ours_stays_stock(tmp_path: Path) -> None:
    """No ZeRO, or no optimizer; it is noted down why."""
    notes = tmp_path / "notes"
    notes.touch()

    def train() -> None:
        for engine in (
            make(stage=0), make(optimizer=None, stage=3), make(optimizer=None, stage=3, zerosync={}),
        ):  # fmt: skip
            assert not hasattr(engine, "_zerosync")

    run_ranks(train, env={NOTES: str(notes)}, world_size=1)
    assert notes.read_text().splitlines() == [
        "an engine without ZeRO (stage 0) was left as it is",
        "an engine without an optimizer was made, which trains nothing",
    ]


def test_a_program_that_attaches_itself_has_its_own_options() -> None:
    def train() -> None:
        engine = make()
        zerosync = attach(engine, coalesce=False)
        assert engine._zerosync is zerosync and not zerosync.config.coalesce
        engine.backward(loss_of(engine, Data(1).batch(0, rank())))
        engine.step()
        assert zerosync.report.step == 1

    run_ranks(train, world_size=1)


def test_a_block_in_lightnings_own_strategy_is_an_error() -> None:
    """It would be silently stock."""

    def train(block: dict[str, Any]) -> None:
        from lightning.fabric.strategies import DeepSpeedStrategy

        start()
        loaded("deepspeed")
        strategy = DeepSpeedStrategy(config=configuration(2, **block), parallel_devices=[torch.device("cpu", 0)])
        net = network()
        strategy._initialize_engine(net, adamw(net.parameters()))  # as Fabric's setup does

    run_ranks(train, {}, world_size=1)
    (outcome,) = run_ranks(train, {"zerosync": {}}, world_size=1, expect="any")
    assert outcome.error == "ValueError" and "strategy=ZeroSyncStrategy(config=...)" in outcome.message, str(outcome)
