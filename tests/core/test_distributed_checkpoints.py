"""Distributed checkpoints: any number of ranks on any stage goes on, as plain torch that never stopped."""

import contextlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.runtime.sequence_parallel import parallel_state_sp

from tests.core.test_checkpoints import error_of
from tests.core.test_fp16 import device
from tests.core.test_whole_checkpoints import adafactor, mixed
from tests.harness.checkpoints import die_instead
from tests.harness.engines import configuration, make_engine, rank, start
from tests.harness.optimizers import noted
from tests.harness.oracle import Oracle, distance, full_parameters
from tests.harness.parts import STEPS, Net, batch, plain_torch, started, train_run
from tests.harness.ranks import run_ranks
from zerosync_strategy import attach
from zerosync_strategy.core.checkpoints import dcp
from zerosync_strategy.core.checkpoints.readers import DCPReader

RUNS = ((2, 2), (3, 1), (1, 3), (3, 4), (2, 4), (3, 2), (3, 3), (1, 2), (2, 1))
"""Stage and ranks of each run; the next goes on where it has ended."""
DISTRIBUTED = {"checkpoint_format": "distributed"}


def test_other_stages_and_numbers_of_ranks(tmp_path: Path) -> None:
    def train(run: int) -> dict[str, torch.Tensor]:
        stage, ranks = RUNS[run]
        net = Net() if run else started(Net())
        zero = {"stage3_param_persistence_threshold": 12, "sub_group_size": 50} if stage == 3 else {}
        zero |= {"offload_optimizer": {"device": "cpu"}} if run == 5 else {}
        engine = make_engine(net, net.optimizer(), stage, zero)
        options: dict[str, Any] = DISTRIBUTED | {"checkpoint_background": run % 2 == 0}
        if ranks == 4:  # two nodes, and all in their shards
            of_nodes = {"device": 0, "node": "all"}
            options |= {"grad_memory_budget": of_nodes, "node_size": 2}
            options |= {"param_memory_budget": of_nodes} if stage == 3 else {}
        elif stage == 3:
            options |= {"param_memory_budget": "all"}
        attach(engine, **options)
        if run:
            if run % 3:
                engine.backward(engine(batch(9, 0, rank())))
                engine.step()
            _, said = engine.load_checkpoint(tmp_path)
            assert said == {"run": run - 1}
        train_run(engine, run)
        assert engine.global_steps == (run + 1) * STEPS
        engine.save_checkpoint(tmp_path, tag=f"run{run}", client_state={"run": run})
        engine.backward(engine(batch(8, 0, rank())))
        ended = full_parameters(engine.module)
        engine.destroy()
        return ended

    (oracle,) = run_ranks(plain_torch, Net.optimizer, [ranks for _, ranks in RUNS], world_size=1)
    for run, expected in enumerate(oracle):
        ended = run_ranks(train, run, world_size=RUNS[run][1])
        assert max(distance(parameters, expected) for parameters in ended) == 0.0, RUNS[run]


@pytest.mark.extended
def test_sequence_parallelism(tmp_path: Path) -> None:
    """By an ``mpu``, as Accelerate makes it, ZeRO shards over all ranks, and is saved so."""
    runs = ((2, 2), (3, 4), (1, 1))

    def train(run: int) -> dict[str, torch.Tensor]:
        start()
        (stage, ranks), net = runs[run], Net() if run else started(Net())
        if ranks > 1:
            parallel_state_sp.initialize_sequence_parallel(2)
        engine, *_ = deepspeed.initialize(
            model=net, optimizer=net.optimizer(), mpu=parallel_state_sp if ranks > 1 else None,
            config=configuration(stage), dist_init_required=False,
        )  # fmt: skip
        assert engine.sequence_parallel_size == min(2, ranks)
        attach(engine, **DISTRIBUTED, checkpoint_background=True)
        if run:
            engine.load_checkpoint(tmp_path)
            assert engine.global_steps == run * STEPS
        train_run(engine, run)
        engine.save_checkpoint(tmp_path)
        ended = full_parameters(engine.module)
        engine.destroy()
        return ended

    (oracle,) = run_ranks(plain_torch, Net.optimizer, [ranks for _, ranks in runs], world_size=1)
    for run, expected in enumerate(oracle):
        ended = run_ranks(train, run, world_size=runs[run][1])
        assert max(distance(parameters, expected) for parameters in ended) == 0.0, runs[run]


def test_sequence_parallelism_over_which_nothing_is_sharded_is_refused() -> None:
    """DeepSpeed's mesh of the configuration's sizes leaves its ranks with parameters of their own."""

    def run() -> None:
        engine = make_engine(net := Net(), net.optimizer(), 2, data_parallel_size=1, sequence_parallel_size=2)
        with pytest.raises(ValueError, match=r"'checkpoint_format' got 'distributed'.*'sequence_parallel_size'"):
            attach(engine, **DISTRIBUTED)

    run_ranks(run)


OPTIMIZERS: dict[str, Callable[[Net], torch.optim.Optimizer]] = {
    "adamw": Net.optimizer,
    "nadam": lambda net: torch.optim.NAdam([net.first.weight, net.first.bias, *net.last.parameters()], lr=0.01),
    "no states": lambda net: torch.optim.SGD(net.first.parameters(), lr=0.1),
    "mixed": mixed,
    "adafactor": adafactor,
    "noted": noted,
    "compiled": Net.optimizer,
}
BF16: dict[str, Any] = {"bf16": {"enabled": True}}
FP16: dict[str, Any] = {"fp16": {"enabled": True, "initial_scale_power": 4, "loss_scale_window": 2}}
Run = tuple[int, int, dict[str, Any]]
"""Stage, ranks, and options of DeepSpeed."""


@pytest.mark.extended(
    but=(
        "no states-first2-second2",
        "noted-first5-second5",
        "compiled-first6-second6",
    )
)
@pytest.mark.parametrize(
    ("name", "first", "second"),
    [
        ("adamw", (2, 2, BF16), (3, 3, BF16)),
        ("nadam", (3, 3, FP16), (1, 2, FP16)),
        ("no states", (3, 2, {}), (2, 1, {})),
        ("mixed", (1, 2, BF16), (3, 3, BF16)),
        ("adafactor", (3, 3, {}), (2, 2, {})),
        ("noted", (2, 1, {}), (3, 2, {})),
        ("compiled", (2, 2, {}), (3, 1, {})),
    ],
)
def test_all_that_a_checkpoint_has_is_loaded(name: str, first: Run, second: Run, tmp_path: Path) -> None:
    """What is saved again right after loading is the same, to the bit."""

    def run(stage: int, config: dict[str, Any], number: int) -> dict[str, torch.Tensor]:
        with device() if "fp16" in config else contextlib.nullcontext():
            net = started(Net()) if number == 0 else Net()
            model = torch.compile(net, backend="eager") if name == "compiled" else net
            engine = make_engine(model, OPTIMIZERS[name](net), stage, {"sub_group_size": 50}, **config)
            scheduler = torch.optim.lr_scheduler.ExponentialLR(engine.optimizer.optimizer, 0.9)
            engine.lr_scheduler = scheduler
            attach(engine, **DISTRIBUTED)
            dtype = next(iter(net.parameters())).dtype
            for step in range(3 * (1 - number)):  # the last layer is never stepped before the second
                net.last.requires_grad_(step > 0)
                engine.backward(engine(batch(step, 0, rank()).to(dtype)))
                engine.step()
            if number:
                engine.load_checkpoint(tmp_path, tag="0")
            assert scheduler.last_epoch == 3
            engine.save_checkpoint(tmp_path, tag=str(number))
            return full_parameters(net)

    (before, *_) = run_ranks(run, first[0], first[2], 0, world_size=first[1])
    (after, *_) = run_ranks(run, second[0], second[2], 1, world_size=second[1])
    if first[2] == second[2]:
        assert distance(after, before) == 0.0
    expected, found = everything(tmp_path / "0"), everything(tmp_path / "1")
    assert expected.keys() == found.keys()
    for key, value in expected.items():
        same = torch.equal(value, found[key]) if torch.is_tensor(value) else value == found[key]
        assert same, key
    names = {str(key[2]) for key in expected if key[:2] == ("optimizer", "state")}
    assert names == (set() if name == "no states" else {"first.weight", "first.bias", "last.weight", "last.bias"})
    engine = DCPReader(tmp_path / "1").object(("engine",))
    assert engine["counters"] | {"global_samples": 0} == {
        "global_steps": 3, "global_samples": 0, "micro_steps": 3, "skipped_steps": 0
    }  # fmt: skip
    assert first[2] is not FP16 or engine["loss_scaler"]["cur_scale"] > 2**4


def everything(folder: Path) -> dict[Any, Any]:
    """All values of a checkpoint but those of the engine and of ranks."""
    reader = DCPReader(folder)
    return {key: reader.object(key) for key in reader.stored if key[0] in ("model", "optimizer")}


@pytest.mark.extended(but=("stages0",))
@pytest.mark.parametrize("stages", [(2, 3), (3, 1)])
def test_layers_that_were_stepped_in_other_steps(stages: tuple[int, int], tmp_path: Path) -> None:
    """Each parameter goes on with its own step count: a frozen one was not stepped."""

    def frozen(net: Net, step: int) -> None:
        net.first.requires_grad_(step not in (1, 2, 5))
        net.last.requires_grad_(step not in (0, 5) or step == 5)

    def train(run: int) -> dict[str, torch.Tensor]:
        net = Net()
        engine = make_engine(net, torch.optim.AdamW([*net.first.parameters(), *net.last.parameters()]), stages[run])
        attach(engine, **DISTRIBUTED)
        if run:
            engine.load_checkpoint(tmp_path)
        for step in range(3 * run, 3 * run + 3):
            frozen(net, step)
            engine.backward(engine(batch(step, 0, rank())))
            engine.step()
        engine.save_checkpoint(tmp_path)
        return full_parameters(engine.module)

    def plain() -> list[dict[str, torch.Tensor]]:
        ended, net = [], Net()
        optimizer = torch.optim.AdamW([*net.first.parameters(), *net.last.parameters()])
        for run, ranks in enumerate((2, 3)):
            oracle = Oracle(net, optimizer, ranks)
            for step in range(3 * run, 3 * run + 3):
                frozen(net, step)
                oracle.backward(lambda rank, step=step: net(batch(step, 0, rank)))
                oracle.step()
            ended.append(full_parameters(net))
        return ended

    (oracle,) = run_ranks(plain, world_size=1)
    for run, expected in enumerate(oracle):
        for ended in run_ranks(train, run, world_size=run + 2):
            assert distance(ended, expected) == 0.0, run


@pytest.mark.extended
def test_another_number_of_backwards(tmp_path: Path) -> None:
    """For the same global batch, on fewer ranks; a load in the middle of accumulation begins anew."""

    def train(ranks: int, steps: range) -> dict[str, torch.Tensor]:
        backwards = 4 // ranks
        engine = make_engine(net := Net(), net.optimizer(), 2, gradient_accumulation_steps=backwards)
        attach(engine, **DISTRIBUTED)
        if steps.start:
            engine.backward(engine(batch(9, 0, 0)))
            engine.step()
            engine.load_checkpoint(tmp_path)
        for step in steps:
            for backward in range(backwards):
                engine.backward(engine(batch(step, backward * ranks + rank(), 0)))
                engine.step()
            assert engine.global_steps == step + 1
        engine.save_checkpoint(tmp_path)
        return full_parameters(engine.module)

    def plain() -> dict[str, torch.Tensor]:
        oracle = Oracle(net := Net(), net.optimizer(), 1)
        for step in range(5):
            for backward in range(4):
                oracle.backward(lambda _, step=step, backward=backward: net(batch(step, backward, 0)) / 4)
            oracle.step()
        return full_parameters(net)

    run_ranks(train, 2, range(3))
    (ended,), (expected,) = run_ranks(train, 1, range(3, 5), world_size=1), run_ranks(plain, world_size=1)
    assert distance(ended, expected) == 0.0


def test_where_a_tag_is_no_directory_of_its_own(tmp_path: Path) -> None:
    """What is there stays; a link is followed; a save in DeepSpeed's files leaves none of the others."""

    def run() -> None:
        engine = make_engine(net := Net(), net.optimizer(), 2)
        attach(engine, **DISTRIBUTED)
        for tag in ("", ".", "..", "latest", "notes"):
            text = error_of(engine.save_checkpoint, tmp_path / "run", tag=tag)
            assert f"the tag {tag!r} names" in text and "which is something else. Give another" in text
        engine.save_checkpoint(tmp_path / "run", tag="link")
        engine.save_checkpoint(tmp_path / "run", tag="other")
        engine.destroy()
        engine = make_engine(net := Net(), net.optimizer(), 2)
        attach(engine)
        engine.save_checkpoint(tmp_path / "run", tag="other")

    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes").write_text("of the program")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "notes").write_text("of the program")
    (tmp_path / "run" / "link").symlink_to(tmp_path / "elsewhere")
    run_ranks(run)
    for folder in ("run", "elsewhere"):
        assert (tmp_path / folder / "notes").read_text() == "of the program"
    assert (tmp_path / "elsewhere" / ".metadata").exists() and (tmp_path / "run" / "link").is_symlink()
    assert not [path for path in (tmp_path / "run" / "other").iterdir() if "distcp" in path.name]


KILLS: dict[str, tuple[Callable[[], None], int]] = {
    "before it takes the tag": (die_instead(os, "rename", 1), 1),
    "between the two": (die_instead(os, "rename", 2), 1),
    "before the program's files are moved": (die_instead(os, "rename", 3), 2),
    "before the older one is removed": (die_instead(shutil, "rmtree", 0), 2),
}
"""What the first rank does last of a save over an existing tag, and the step of what has the tag then.

Its first renaming is that of torch's ``.metadata.tmp``.
"""


def step_once(engine: Any) -> None:
    engine.backward(engine(batch(engine.global_steps, 0, rank())))
    engine.step()


def test_a_save_that_is_killed_while_it_takes_the_place_of_another(tmp_path: Path) -> None:
    """Whatever comes next, one of the two has the tag, with the program's files, and nothing is left beside it."""

    def killed(where: str) -> None:
        engine = make_engine(net := Net(), net.optimizer(), 2)
        attach(engine, **DISTRIBUTED)
        step_once(engine)
        engine.save_checkpoint(tmp_path / where, tag="best")
        if rank() == 0:
            (tmp_path / where / "best" / "notes").write_text("of the program")
            KILLS[where][0]()
        step_once(engine)
        engine.save_checkpoint(tmp_path / where, tag="best")

    def left(where: str, then: str) -> None:
        folder, (_, step) = tmp_path / then / where, KILLS[where]
        engine = make_engine(net := Net(), net.optimizer(), 2)
        attach(engine, **({} if then == "a save of DeepSpeed's files" else DISTRIBUTED))
        if then == "a failed save":
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(dcp, "write", lambda *_: 1 / 0)
                error_of(engine.save_checkpoint, folder, tag="best")
        if then in ("a load", "a failed save"):
            engine.load_checkpoint(folder)
            assert engine.global_steps == step, (where, then)
        step_once(engine)
        engine.save_checkpoint(folder, tag="best")
        engine.load_checkpoint(folder)
        engine.destroy()
        assert (folder / "best" / "notes").read_text() == "of the program", (where, then)
        if "DeepSpeed" not in then:
            assert sorted(path.name for path in folder.iterdir()) == ["best", "latest"], (where, then)

    def all_left() -> None:
        for then in ("a load", "a save", "a failed save", "a save of DeepSpeed's files"):
            for where in KILLS:
                if "DeepSpeed" not in then or where == "between the two":
                    shutil.copytree(tmp_path / where, tmp_path / then / where)
                    left(where, then)

    for where in KILLS:
        run_ranks(killed, where, expect="any")
    run_ranks(all_left, world_size=1)
