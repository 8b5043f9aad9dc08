"""Checkpoints: all ranks load one save whole, or none loads anything (K1, K2)."""

import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.utils import safe_get_full_fp32_param

from tests.harness import checkpoints
from tests.harness.checkpoints import die_in_file, die_instead, shard
from tests.harness.copying import loss_of, make_engine, oracle
from tests.harness.engines import rank
from tests.harness.oracle import distance, full_parameters
from tests.harness.ranks import run_ranks
from zerosync_strategy import CheckpointError, attach
from zerosync_strategy.core.checkpoints.manifests import Manifest

DAMAGES = {
    "flip_bit": r"rank 1: \S*optim_states.pt is damaged \(BadZipFile: Bad CRC-32",
    "zero_page": r"rank 1: \S*optim_states.pt is damaged \(BadZipFile: Bad CRC-32",
    "truncate": r"rank 1: \S*optim_states.pt has [\d,]+ bytes and had [\d,]+ when it was saved",
    "remove": r"rank 1: \S*optim_states.pt cannot be read \(FileNotFoundError",
    "swap": r"rank 0: \S*rank_0_\S* (is another file|has .* bytes).*; rank 1: \S*rank_1_\S* (is another file|has)",
    "stale": r"rank 1: \S*optim_states.pt is another file than was saved under this name",
    "two_saves": r"the ranks differ: rank 0: tag 'two_saves' of step 2 \(save \w+\); rank 1: tag '\w+' of step 1 \(",
}


def train(engine: Any, steps: range) -> None:
    for k in steps:
        engine.backward(loss_of(engine, k, rank()))
        engine.step()


def error_of(load: Any, *args: Any, **options: Any) -> str:
    with pytest.raises(CheckpointError) as error:
        load(*args, **options)
    return str(error.value)


def test_what_a_program_has_put_in_place_of_what_saves_stays(tmp_path: Path) -> None:
    def run() -> None:
        attach(engine := make_engine(2))
        writer, saved = engine.checkpoint_engine, []
        save = writer.save
        writer.save = own = lambda state, path: (saved.append(path), save(state, path))
        engine.save_checkpoint(tmp_path)
        assert saved and writer.save is own and "_copy_recovery_script" not in vars(engine)

    run_ranks(run)


@pytest.mark.extended(but=("1",))
@pytest.mark.parametrize("stage", [1, 3])
def test_a_damaged_shard_of_one_rank_is_loaded_by_none(stage: int, tmp_path: Path) -> None:
    """They go on with what they had, gradients included; and what has no ids loads, if it is not damaged."""

    def run() -> list[float]:
        attach(engine := make_engine(stage))
        train(engine, range(1))
        engine.save_checkpoint(tmp_path, tag="one")
        train(engine, range(1, 2))
        engine.save_checkpoint(tmp_path, tag="two")
        engine.backward(loss_of(engine, 2, rank()))
        if rank() == 0:
            for damage in DAMAGES:
                shutil.copytree(tmp_path / "two", tmp_path / damage)
                getattr(checkpoints, damage)(tmp_path / damage)
            for old in ("old", "old_flipped", "old_truncated"):
                shutil.copytree(tmp_path / "two", tmp_path / old)
                checkpoints.without_ids(tmp_path / old)
            checkpoints.flip_bit(tmp_path / "old_flipped")
            checkpoints.truncate(tmp_path / "old_truncated")
        torch.distributed.barrier()
        texts = {damage: error_of(engine.load_checkpoint, tmp_path, tag=damage) for damage in DAMAGES}
        for damage, pattern in DAMAGES.items():
            with pytest.raises(AssertionError, match=pattern):
                raise AssertionError(texts[damage])
            assert "Nothing was loaded: every rank has what it had." in texts[damage]
            assert "The newest checkpoint there that is whole: tag='two'" in texts[damage]
        for old in ("old_flipped", "old_truncated"):
            assert "rank 1: " in (text := error_of(engine.load_checkpoint, tmp_path, tag=old))
            assert "optim_states.pt is damaged (BadZipFile" in text
        assert engine.global_steps == 2
        engine.step()
        kept = distance(full_parameters(engine.module), oracle(3, 1))

        loaded = []
        for tag in ("two", "old"):
            engine.load_checkpoint(tmp_path, tag=tag)
            train(engine, range(2, 3))
            loaded.append(distance(full_parameters(engine.module), oracle(3, 1)))
        return [kept, *loaded]

    assert run_ranks(run) == [[0.0] * 3] * 2


# Each rank by its own end: in a file, between two, or before its manifest is complete.
INTERRUPTIONS = {
    "in a file": [die_in_file("optim_states"), die_in_file("optim_states")],
    "after rank 0": [die_instead(Manifest, "write", 2), die_instead(Manifest, "write", 1)],
    "before rank 0": [die_in_file("states"), die_instead(Manifest, "write", 1)],
}


@pytest.mark.extended(but=("3",))
@pytest.mark.parametrize("stage", [2, 3])
def test_an_interrupted_save_over_an_existing_tag_is_refused(stage: int, tmp_path: Path) -> None:
    def save(interruption: str) -> None:
        attach(engine := make_engine(stage))
        train(engine, range(1))
        engine.save_checkpoint(tmp_path / interruption, tag="whole")
        engine.save_checkpoint(tmp_path / interruption, tag="last")
        train(engine, range(1, 2))
        INTERRUPTIONS[interruption][rank()]()
        engine.save_checkpoint(tmp_path / interruption, tag="last")

    def load() -> float:
        attach(engine := make_engine(stage))
        for interruption in INTERRUPTIONS:
            text = error_of(engine.load_checkpoint, tmp_path / interruption)
            assert "the save was interrupted: zerosync_rank_" in text and "of step 2 is not complete" in text, text
            assert "The newest checkpoint there that is whole: tag='whole'" in text
            engine.load_checkpoint(tmp_path / interruption, tag="whole")
        train(engine, range(1, 2))
        return distance(full_parameters(engine.module), oracle(2, 1))

    for interruption in INTERRUPTIONS if stage == 2 else ["before rank 0"]:
        run_ranks(save, interruption, expect="any")
    if stage == 3:
        for interruption in INTERRUPTIONS:
            if not (tmp_path / interruption).exists():
                shutil.copytree(tmp_path / "before rank 0", tmp_path / interruption)
    assert run_ranks(load) == [0.0] * 2


def test_a_rank_that_cannot_write_is_an_error_of_all(tmp_path: Path) -> None:
    """The file ``latest`` names what it has named, and what was to be written is refused."""

    def run() -> float:
        attach(engine := make_engine(2))
        train(engine, range(1))
        engine.save_checkpoint(tmp_path, tag="first")
        train(engine, range(1, 2))
        with pytest.MonkeyPatch.context() as patch:

            def fail(*args: Any, **options: Any) -> None:
                raise OSError(28, "No space left on device")

            if rank() == 1:
                patch.setattr(torch, "save", fail)
            text = error_of(engine.save_checkpoint, tmp_path, tag="second")
        assert "rank 1: OSError: [Errno 28] No space left on device. Is the disk full?" in text
        assert (tmp_path / "latest").read_text() == "first"
        assert "the save was interrupted" in error_of(engine.load_checkpoint, tmp_path, tag="second")
        engine.save_checkpoint(tmp_path, tag="second")
        train(engine, range(2, 3))
        engine.load_checkpoint(tmp_path)
        train(engine, range(2, 3))
        return distance(full_parameters(engine.module), oracle(3, 1))

    assert run_ranks(run) == [0.0] * 2


def test_what_deepspeed_cannot_load_is_an_error_of_all(tmp_path: Path) -> None:
    """It has changed something by then, and the error says so."""

    def run() -> float:
        attach(engine := make_engine(2))
        train(engine, range(1))
        engine.save_checkpoint(tmp_path)
        with pytest.MonkeyPatch.context() as patch:

            def fail(*args: Any, **options: Any) -> None:
                raise KeyError("param_groups")

            if rank() == 1:
                patch.setattr(engine.optimizer, "load_state_dict", fail, raising=False)
            text = error_of(engine.load_checkpoint, tmp_path)
        assert "rank 1: KeyError: 'param_groups'. Was it written with another model" in text
        assert "parts of the module, the optimizer and the counters may be replaced" in text
        engine.load_checkpoint(tmp_path)
        train(engine, range(1, 2))
        return distance(full_parameters(engine.module), oracle(2, 1))

    assert run_ranks(run) == [0.0] * 2


@pytest.mark.extended(but=("2",))
@pytest.mark.parametrize("stage", [2, 3])
def test_the_module_alone(stage: int, tmp_path: Path) -> None:
    """Its weights are those that were saved; moments and counters stay, and training goes on from there."""

    def run() -> float:
        attach(engine := make_engine(stage))
        train(engine, range(2))
        engine.save_checkpoint(tmp_path)
        saved = full_parameters(engine.module)
        train(engine, range(2, 3))
        steps = engine.global_steps
        path, _ = engine.load_checkpoint(tmp_path, load_module_only=True)
        assert path and engine.global_steps == steps and distance(full_parameters(engine.module), saved) == 0.0
        for name, param in engine.module.named_parameters():
            assert distance({name: safe_get_full_fp32_param(param)}, {name: saved[name]}) == 0.0
        train(engine, range(3, 4))
        return float(distance(full_parameters(engine.module), saved) > 0.0)

    assert run_ranks(run) == [1.0] * 2


def test_the_file_latest(tmp_path: Path) -> None:
    def run() -> None:
        attach(engine := make_engine(3))
        before = full_parameters(engine.module)
        for tag in ("one", "two"):
            engine.save_checkpoint(tmp_path, tag=tag)
            train(engine, range(1))
        for content, says in {
            b"\xff\xfe": r"the file '\S*/latest' cannot be read \(UnicodeDecodeError",
            b" \n": r"the file '\S*/latest', which names the tag to load, is empty",
            b"three": r"no tag 'three', which the file '\S*/latest' names. Give a tag= that it has \('one', 'two'\)",
        }.items():
            torch.distributed.barrier()
            if rank() == 0:
                (tmp_path / "latest").write_bytes(content)
            torch.distributed.barrier()
            with pytest.raises(CheckpointError, match=says):
                engine.load_checkpoint(tmp_path)
        torch.distributed.barrier()
        (tmp_path / "latest").write_text("two")
        torch.distributed.barrier()
        # DeepSpeed would load the weights of another tag than it was told.
        train(engine, range(1))
        engine.load_checkpoint(tmp_path, tag="one", load_optimizer_states=False)
        assert distance(full_parameters(engine.module), before) == 0.0
        attach(engine := make_engine(3, {"zero_hpz_partition_size": 2}))
        with pytest.raises(CheckpointError, match=r"which is 'two' and not 'one'. Name 'one' in it, or load the opt"):
            engine.load_checkpoint(tmp_path, tag="one", load_optimizer_states=False)
        engine.load_checkpoint(tmp_path, tag="two", load_optimizer_states=False)

    run_ranks(run)


def test_a_disk_for_each_rank(tmp_path: Path) -> None:
    """Each sees its own files alone, as on nodes that share no file system; DeepSpeed leaves `latest` on the first."""

    def run() -> float:
        attach(engine := make_engine(3))
        own = tmp_path / f"disk{rank()}"
        train(engine, range(1))
        engine.save_checkpoint(own, tag="last")
        shutil.copytree(own, earlier := tmp_path / f"earlier{rank()}")
        train(engine, range(1, 2))
        engine.save_checkpoint(own, tag="last")
        assert not (tmp_path / "disk0" / "last" / "zerosync_rank_1.json").exists()
        text = error_of(engine.load_checkpoint, own)
        assert "rank 0: tag 'last' of step 2" in text and "rank 1: no file 'latest', no manifest" in text
        text = error_of(engine.load_checkpoint, earlier if rank() else own, tag="last")
        assert "the ranks differ: rank 0: tag 'last' of step 2" in text and "rank 1: tag 'last' of step 1" in text
        engine.load_checkpoint(own, tag="last")
        train(engine, range(2, 3))
        return distance(full_parameters(engine.module), oracle(3, 1))

    assert run_ranks(run) == [0.0] * 2


def test_without_checksums(tmp_path: Path) -> None:
    """What can be told without reading the files is told."""

    def run() -> None:
        attach(engine := make_engine(1), checkpoint_checksums=False)
        for tag in ("one", "two", "flipped", "mixed"):
            train(engine, range(1))
            engine.save_checkpoint(tmp_path, tag=tag)
        if rank() == 0:
            checkpoints.flip_bit(tmp_path / "flipped")
            shutil.copy(shard(tmp_path / "one", 1), shard(tmp_path / "mixed", 1))
        torch.distributed.barrier()
        engine.load_checkpoint(tmp_path, tag="flipped")
        assert "is another file than was saved" in error_of(engine.load_checkpoint, tmp_path, tag="mixed")

    run_ranks(run)


def test_files_that_are_written_by_others_belong_to_no_save(tmp_path: Path) -> None:
    """As by the engines that write in the background: a manifest of before would say that they are damaged."""

    def run() -> float:
        attach(engine := make_engine(2))
        train(engine, range(1))
        engine.save_checkpoint(tmp_path, tag="last")

        class Background(type(engine.checkpoint_engine)):  # type: ignore[misc]
            pass

        engine.checkpoint_engine = Background()
        engine.checkpoint_engine.zipfile_serialization = False  # nor has it checksums
        train(engine, range(1, 2))
        engine.save_checkpoint(tmp_path, tag="last")
        assert not list((tmp_path / "last").glob("*.json")) and (tmp_path / "latest").read_text() == "last"
        engine.load_checkpoint(tmp_path)
        train(engine, range(2, 3))
        return distance(full_parameters(engine.module), oracle(3, 1))

    assert run_ranks(run) == [0.0] * 2


def test_files_without_checksums_of_their_own(tmp_path: Path) -> None:
    def run() -> None:
        attach(engine := make_engine(2))
        engine.checkpoint_engine.zipfile_serialization = False
        train(engine, range(1))
        engine.save_checkpoint(tmp_path)
        engine.load_checkpoint(tmp_path)
        torch.distributed.barrier()
        if rank() == 0:
            (path,) = tmp_path.glob("*/*rank_1_mp_rank_00_optim_states.pt")
            content = bytearray(path.read_bytes())
            content[-9] ^= 4
            path.write_bytes(content)
        torch.distributed.barrier()
        text = error_of(engine.load_checkpoint, tmp_path)
        assert "rank 1: zero_pp_rank_1_mp_rank_00_optim_states.pt has another checksum than when it was saved" in text

    with warnings.catch_warnings():
        run_ranks(run)
