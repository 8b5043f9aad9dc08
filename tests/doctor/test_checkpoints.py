"""`zerosync doctor --checkpoint`: which checkpoints of a directory are whole."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from tests.harness import checkpoints
from tests.harness.command import command
from tests.harness.copying import make_engine
from tests.harness.ranks import run_ranks
from zerosync_strategy import attach
from zerosync_strategy.core.checkpoints import manifests
from zerosync_strategy.tools.doctor import checkpoints as doctor
from zerosync_strategy.tools.doctor.findings import Severity


def test_checkpoints_on_the_disk(tmp_path: Path) -> None:
    def save() -> None:
        attach(engine := make_engine(3))
        for tag in ("one", "two"):
            engine.backward(engine(torch.ones(4, 8)).sum())
            engine.step()
            engine.save_checkpoint(tmp_path / "run", tag=tag)

    run_ranks(save)
    run = tmp_path / "run"
    assert [each.level for each in doctor.check(run)] == [Severity.OK, Severity.OK]
    for damage in ("flip_bit", "stale", "swap", "without_ids"):
        shutil.copytree(run / "two", run / damage)
        getattr(checkpoints, damage)(run / damage)
    shutil.copytree(run / "two", run / "without_ids_flipped")
    checkpoints.without_ids(run / "without_ids_flipped")
    checkpoints.flip_bit(run / "without_ids_flipped")
    shutil.copytree(run / "two", run / "zz_interrupted")
    manifest = manifests.read_any(run / "zz_interrupted", 1)
    manifests.Manifest(manifest.save, 1, 2, 2, 0.0).write(run / "zz_interrupted")
    (run / "latest").write_text("three")
    found = {str(each.found).split(":")[0].rpartition("/")[2]: each for each in doctor.check(tmp_path)}
    levels = {name: each.level.value for name, each in found.items()}
    assert levels == {
        "flip_bit": "error", "one": "ok", "stale": "error", "swap": "error", "two": "ok", "without_ids": "note",
        "without_ids_flipped": "error", "zz_interrupted": "error",
        "latest' names the tag 'three', which is not there": "error",
    }  # fmt: skip
    assert "the save was interrupted: zerosync_rank_1.json of step 2" in found["zz_interrupted"].found
    assert f"The newest that is whole is {run / 'two'}: load it." in found["stale"].remedy
    with pytest.raises(ValueError, match="has no checkpoint"):
        doctor.check(run / "two" / "nothing")

    done = command("doctor", "--json", "--checkpoint", str(run / "zz_interrupted"))
    assert done.status == json.loads(done.stdout)["exit_status"] == 1
    assert command("doctor", "--checkpoint", str(tmp_path / "nothing")).status == 2


def test_a_save_that_was_killed_between_its_renames(tmp_path: Path) -> None:
    """What had the tag is there for the next load, so that nothing is an error."""

    def save() -> None:
        attach(engine := make_engine(2), checkpoint_format="distributed")
        engine.save_checkpoint(tmp_path, tag="one")

    run_ranks(save)
    shutil.copytree(tmp_path / "one", tmp_path / ".one.writing")
    (tmp_path / "one").rename(tmp_path / ".one.replaced")
    found = doctor.check(tmp_path)
    assert [each.level for each in found] == [Severity.NOTE, Severity.NOTE]
    assert "gives it its name back" in found[0].remedy
    assert manifests.is_distributed(tmp_path / "one") and not (tmp_path / ".one.replaced").exists()
    (tmp_path / "one").rename(tmp_path / "gone")
    assert not manifests.is_distributed(tmp_path / "one")
