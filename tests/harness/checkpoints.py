"""Checkpoints that something has happened to: damage to the files of one rank, and saves that are interrupted."""

import os
import shutil
import signal
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

SHARD = "*rank_{}_mp_rank_00_optim_states.pt"


def shard(tag: Path, rank: int) -> Path:
    """The optimizer's of ``rank``."""
    (path,) = tag.glob(SHARD.format(rank))
    return path


def flip_bit(tag: Path) -> None:
    """In the values that rank 1 has saved."""
    _change(shard(tag, 1), lambda values: bytes([values[0] ^ 4]) + values[1:])


def zero_page(tag: Path) -> None:
    _change(shard(tag, 1), lambda values: bytes(len(values[:4096])) + values[4096:])


def truncate(tag: Path) -> None:
    os.truncate(shard(tag, 1), shard(tag, 1).stat().st_size // 2)


def remove(tag: Path) -> None:
    shard(tag, 1).unlink()


def swap(tag: Path) -> None:
    first, second = shard(tag, 0), shard(tag, 1)
    first.rename(tag / "first")
    second.rename(first)
    (tag / "first").rename(second)


def stale(tag: Path) -> None:
    """Rank 1's shard is that of another step."""
    shutil.copy(shard(tag.parent / "one", 1), shard(tag, 1))


def two_saves(tag: Path) -> None:
    """All that rank 1 has written is of another step."""
    for path in tag.glob("*rank_1*"):
        shutil.copy(tag.parent / "one" / path.name, path)


def without_ids(tag: Path) -> None:
    """As stock DeepSpeed and earlier releases save."""
    for path in tag.glob("zerosync_rank_*.json"):
        path.unlink()


def _change(path: Path, change: Callable[[bytes], bytes]) -> None:
    with zipfile.ZipFile(path) as archive:
        tensors = [info for info in archive.infolist() if "/data/" in info.filename]
        largest = max(tensors, key=lambda info: info.file_size)
        values = archive.read(largest)
    content = path.read_bytes()
    at = content.index(values)
    path.write_bytes(content[:at] + change(values) + content[at + len(values) :])


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_in_file(name: str) -> Callable[[], None]:
    """Let ``torch.save`` of a file, in whose name is ``name``, write half of it and kill this process."""

    def arm() -> None:
        save = torch.save

        def save_half(value: Any, path: Any, **options: Any) -> None:
            save(value, path, **options)
            if name in str(path):
                os.truncate(path, os.stat(path).st_size // 2)
                die()

        torch.save = save_half

    return arm


def die_instead(owner: Any, method: str, calls_before: int) -> Callable[[], None]:
    """Let this process be killed where ``owner.method`` would be called, after ``calls_before`` calls."""

    def arm() -> None:
        stock, calls = getattr(owner, method), [0]

        def counted(*args: Any, **kwargs: Any) -> Any:
            calls[0] += 1
            if calls[0] > calls_before:
                die()
            return stock(*args, **kwargs)

        setattr(owner, method, counted)

    return arm
