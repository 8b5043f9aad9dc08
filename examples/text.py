"""Real text that every Python has: the source code of its own standard library, as bytes."""

import sysconfig
from pathlib import Path

import torch
from torch.utils.data import Dataset

PACKAGES = ("asyncio", "collections", "concurrent", "email", "http", "importlib", "json", "logging", "urllib", "xml")
HELD_OUT = 10  # one file of this many is for validation


def read_standard_library() -> tuple[torch.Tensor, torch.Tensor]:
    """The text to train on and the text to validate on. Whole files are held out, so that no line is near its copy."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(root.glob("*.py"))
    for package in PACKAGES:
        files += sorted(path for path in (root / package).rglob("*.py") if not {"test", "tests"} & set(path.parts))
    if len(files) < HELD_OUT:
        raise SystemExit(f"This Python has no source files of its standard library in {root}.")
    train = [path for index, path in enumerate(files) if index % HELD_OUT]
    return _read(train), _read(files[::HELD_OUT])


def _read(files: list[Path]) -> torch.Tensor:
    return torch.frombuffer(bytearray(b"\n".join(path.read_bytes() for path in files)), dtype=torch.uint8)


class Windows(Dataset[torch.Tensor]):
    """``count`` pieces of ``length`` bytes, drawn from the text with a fixed seed: the same on every rank."""

    def __init__(self, text: torch.Tensor, count: int, length: int, seed: int = 0) -> None:
        self.text, self.length = text, length
        self.starts = torch.randint(len(text) - length, (count,), generator=torch.Generator().manual_seed(seed))

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> torch.Tensor:
        start = int(self.starts[index])
        return self.text[start : start + self.length].long()
