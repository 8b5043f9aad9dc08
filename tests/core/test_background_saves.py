"""Saves that a thread writes: what is there is complete, and a failure is an error of all in the same step (K3)."""

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.core.test_checkpoints import error_of, train
from tests.harness.checkpoints import die
from tests.harness.copying import make_engine, oracle
from tests.harness.ending import ending
from tests.harness.engines import rank
from tests.harness.oracle import distance, full_parameters
from tests.harness.ranks import run_ranks
from zerosync_strategy import CheckpointError, attach
from zerosync_strategy.core.checkpoints import background, dcp, readers

OPTIONS: dict[str, Any] = {"checkpoint_format": "distributed", "checkpoint_background": True}


@contextmanager
def writing(instead: Callable[..., Any], ranks: tuple[int, ...] = (0, 1)) -> Iterator[None]:
    """While active, ``instead(write, *arguments)`` writes the data of ``ranks``."""
    with pytest.MonkeyPatch.context() as patch:
        write = dcp.write
        if rank() in ranks:
            patch.setattr(dcp, "write", lambda *arguments: instead(write, *arguments))
        yield


@contextmanager
def late(number: int) -> Iterator[None]:
    """While active, the other ranks look how a save has ended before rank ``number`` does."""
    with pytest.MonkeyPatch.context() as patch:
        look = background.Background.step_begins
        if rank() == number:
            patch.setattr(background.Background, "step_begins", lambda self: time.sleep(0.02) or look(self))
        yield


def until(is_so: Callable[[], bool]) -> None:
    while not is_so():
        time.sleep(0.01)


def full(*_: Any) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("stage", [2, 3])
def test_what_is_trained_meanwhile_is_not_in_it(stage: int, tmp_path: Path) -> None:
    """Nothing can be loaded before it is complete; a second save waits for the first."""
    proceed = threading.Event()

    def slowly(write: Callable[..., Any], *arguments: Any) -> Any:
        proceed.wait(60)
        return write(*arguments)

    def run() -> float:
        attach(engine := make_engine(stage), **OPTIONS)
        train(engine, range(2))
        with writing(slowly):
            engine.save_checkpoint(tmp_path, tag="two", client_state={"at": [2]})
            train(engine, range(2, 4))
            assert not (tmp_path / "two").exists() and not (tmp_path / "latest").exists()
            proceed.set()
            engine.save_checkpoint(tmp_path, tag="four")
            assert (tmp_path / "latest").read_text() == "two"
        _, said = engine.load_checkpoint(tmp_path)  # waits, too
        assert (tmp_path / "latest").read_text() == "four" and said == {}
        _, said = engine.load_checkpoint(tmp_path, tag="two")
        assert said == {"at": [2]} and engine.global_steps == 2
        train(engine, range(2, 3))
        return distance(full_parameters(engine.module), oracle(3, 1))

    assert run_ranks(run) == [0.0] * 2


@pytest.mark.parametrize("in_background", [True, False])
def test_a_rank_that_cannot_write_is_an_error_of_all(in_background: bool, tmp_path: Path) -> None:
    """In the same step, or of the save; what had the tag before, and ``latest``, are as they were."""

    def run() -> int:
        attach(engine := make_engine(2), **OPTIONS | {"checkpoint_background": in_background})
        train(engine, range(1))
        engine.save_checkpoint(tmp_path, tag="one")
        train(engine, range(1, 2))
        engine.save_checkpoint(tmp_path, tag="two")
        background.background().wait()
        if rank() == 0:
            (tmp_path / "two" / "notes.txt").write_text("of the program")
        with writing(full, ranks=(1,)), late(0), pytest.raises(CheckpointError) as error:
            engine.save_checkpoint(tmp_path, tag="two")
            for k in range(2, 10_000):
                train(engine, range(k, k + 1))
        steps = engine.global_steps
        assert "rank 1: OSError: [Errno 28] No space left on device. Is the disk full?" in str(error.value)
        torch.distributed.barrier()
        assert (tmp_path / "latest").read_text() == "two"
        assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "one", "two"]
        engine.zero_grad()
        engine.load_checkpoint(tmp_path)
        train(engine, range(2, 3))
        engine.save_checkpoint(tmp_path, tag="two")
        engine.load_checkpoint(tmp_path)
        assert engine.global_steps == 3 and (tmp_path / "two" / "notes.txt").exists()
        assert distance(full_parameters(engine.module), oracle(3, 1)) == 0.0
        return steps

    first, second = run_ranks(run)
    assert first == second > (2 if in_background else 1)


def test_a_rank_that_is_killed_while_it_writes(tmp_path: Path) -> None:
    """What is complete loads, on the rank that is left; what was begun goes with the next save."""

    def half(write: Callable[..., Any], folder: Path, number: int, content: Any) -> None:
        (folder / dcp.name_of(number)).write_bytes(b"half")
        die()

    def killed() -> None:
        attach(engine := make_engine(3), **OPTIONS)
        train(engine, range(1))
        engine.save_checkpoint(tmp_path, tag="one")
        train(engine, range(1, 2))
        with writing(half, ranks=(1,)):
            engine.save_checkpoint(tmp_path, tag="two")
            train(engine, range(2, 100))

    def left() -> None:
        attach(engine := make_engine(3), **OPTIONS)
        assert (tmp_path / ".two.writing").exists()
        engine.load_checkpoint(tmp_path)
        assert engine.global_steps == 1 and distance(full_parameters(engine.module), oracle(1, 1)) == 0.0
        engine.save_checkpoint(tmp_path, tag="two")
        engine.destroy()
        assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "one", "two"]

    run_ranks(killed, expect="any")
    run_ranks(left, world_size=1)


def test_two_runs_that_write_to_one_directory(tmp_path: Path) -> None:
    def run(by_manifest: bool) -> None:
        attach(engine := make_engine(2), **OPTIONS)

        def meet(write: Callable[..., Any], folder: Path, *arguments: Any) -> Any:
            state = write(folder, *arguments)
            until(lambda: (folder / "zerosync_rank_1.json").exists())
            if by_manifest:  # the other one is complete, but for this rank's
                shutil.copy(folder.parent / "other" / "zerosync_rank_1.json", folder)
            else:  # it has just begun
                shutil.rmtree(folder)
                folder.mkdir()
            return state

        engine.save_checkpoint(tmp_path, tag="other")
        background.background().wait()
        with writing(meet, ranks=(0,)):
            engine.save_checkpoint(tmp_path, tag="one")
            text = error_of(engine.destroy)
        assert "another run writes to the same directory" in text or "files of two saves" in text
        assert not (tmp_path / "one").exists()

    for by_manifest in (False, True):
        run_ranks(run, by_manifest)


def test_a_rank_whose_disk_hangs_is_named(tmp_path: Path) -> None:
    hangs = threading.Event()

    def run() -> None:
        attach(engine := make_engine(2), **OPTIONS)
        with writing(lambda *_: hangs.wait(30), ranks=(1,)):
            background.background()._patience = 0.5
            engine.save_checkpoint(tmp_path, tag="one")
            train(engine, range(1))
            if rank() == 1:
                until(lambda: not (tmp_path / ".one.writing").exists())
                hangs.set()
            assert "rank 1: nothing was written for 0 s" in error_of(engine.destroy)

    run_ranks(run)


def test_what_the_program_does_before_the_end_of_a_save(tmp_path: Path) -> None:
    """It changes what the module has beside tensors, and its directory, and ends its process group."""

    def slowly(write: Callable[..., Any], *arguments: Any) -> Any:
        until(lambda: not torch.distributed.is_initialized())
        time.sleep(0.3)
        return write(*arguments)

    def run() -> None:
        engine, noted = make_engine(3), {"steps": [1]}
        engine.module.register_state_dict_post_hook(lambda _, state, prefix, __: state.update({"noted": noted}))
        attach(engine, **OPTIONS)
        os.chdir(tmp_path)
        with writing(slowly):
            engine.save_checkpoint("run", tag="one")
            noted["steps"].append(2)
            os.chdir("/")
            torch.distributed.destroy_process_group()
            engine.zerosync.wait_for_save()

    run_ranks(run)
    assert (tmp_path / "run" / "latest").read_text() == "one"
    assert readers.DCPReader(tmp_path / "run" / "one").object(("model", "noted")) == {"steps": [1]}


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "flipped": (lambda tag: _flip(tag / "__1_0.distcp"), "rank 1: __1_0.distcp has another checksum than when it was"),
    "torn": (lambda tag: os.truncate(tag / "__1_0.distcp", 100), "__1_0.distcp has 100 bytes and had"),
    "gone": (lambda tag: (tag / "__1_0.distcp").unlink(), "__1_0.distcp cannot be read"),
    "flipped metadata": (lambda tag: _flip(tag / ".metadata"), ".metadata has another checksum than when it was saved"),
    "of another save": (
        lambda tag: [shutil.copy(path, tag) for path in (tag.parent / "one").glob("*_1*")],
        "the ranks differ: rank 0: tag 'of another save' of step 2",
    ),
}


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


@pytest.mark.extended
def test_damaged_files_are_loaded_by_none(tmp_path: Path) -> None:
    def run() -> float:
        attach(engine := make_engine(3), checkpoint_format="distributed")
        train(engine, range(1))
        engine.save_checkpoint(tmp_path, tag="one")
        train(engine, range(1, 2))
        engine.save_checkpoint(tmp_path, tag="two")
        if rank() == 0:
            for name, (damage, _) in DAMAGES.items():
                shutil.copytree(tmp_path / "two", tmp_path / name)
                damage(tmp_path / name)
        torch.distributed.barrier()
        for name, (_, says) in DAMAGES.items():
            text = error_of(engine.load_checkpoint, tmp_path, tag=name)
            assert says in text and "Nothing was loaded: every rank has what it had." in text, text
            assert "The newest checkpoint there that is whole: tag=" in text
        train(engine, range(2, 3))
        return distance(full_parameters(engine.module), oracle(3, 1))

    assert run_ranks(run) == [0.0] * 2


def test_what_cannot_be_read_is_said_to_be_half_loaded(tmp_path: Path) -> None:
    """By a run that does not verify checksums before; on all ranks."""

    def run() -> float:
        options = {"checkpoint_format": "distributed", "checkpoint_checksums": False}
        attach(engine := make_engine(2), **options)
        train(engine, range(1))
        engine.save_checkpoint(tmp_path, tag="one")
        with pytest.MonkeyPatch.context() as patch:
            if rank() == 1:
                patch.setattr(readers.DCPReader, "read", full)
            text = error_of(engine.load_checkpoint, tmp_path)
        assert "rank 1: OSError" in text and "the counters may be replaced and others not" in text
        engine.load_checkpoint(tmp_path)
        train(engine, range(1, 2))
        return distance(full_parameters(engine.module), oracle(2, 1))

    assert run_ranks(run) == [0.0] * 2


@pytest.mark.parametrize("ends", ["well", "badly"])
def test_the_end_of_a_program_waits(ends: str, tmp_path: Path) -> None:
    def slowly(write: Callable[..., Any], *arguments: Any) -> Any:
        time.sleep(0.5)
        if ends == "badly":
            full()
        return write(*arguments)

    def run() -> None:
        with writing(slowly), ending():
            engine = make_engine(2)
            attach(engine, **OPTIONS)
            engine.save_checkpoint(tmp_path, tag="one")

    (outcome,) = run_ranks(run, world_size=1, expect="any")
    assert outcome.error is None, str(outcome)
    assert (tmp_path / "latest").exists() == (tmp_path / "one" / ".metadata").exists() == (ends == "well")
    failed = f"CheckpointError: Cannot write the checkpoint in {tmp_path}" in outcome.output
    assert failed == (ends == "badly"), str(outcome)
