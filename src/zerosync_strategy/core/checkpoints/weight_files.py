"""Full weights in safetensors files, as transformers names and loads them.

A file has a header with the offset of each tensor, then the bytes. Shapes and dtypes are known before the first
gather, so the header is written first, and each tensor as soon as it is gathered.
"""

from __future__ import annotations

import copy
import importlib
import json
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, BinaryIO, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from zerosync_strategy.core.comm.collectives import gather_objects
from zerosync_strategy.core.engine.zero import in_chunks
from zerosync_strategy.core.failures.errors import UNWRITABLE, CheckpointError

INDEX = "model.safetensors.index.json"
_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
_PART = ".part"  # suffix of a file until all files are complete


class WeightSpec(NamedTuple):
    """One entry of a module's ``state_dict()``, with the shape and dtype of the tensor that is yielded.

    ``tied_to``: the name under which the same tensor was yielded before; empty if it was not.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    tied_to: str


def export(
    weights: Iterable[tuple[str, torch.Tensor]], specs: Sequence[WeightSpec], directory: Path, max_shard_bytes: int,
    process_group: ProcessGroup, module: torch.nn.Module, dtype: torch.dtype | None,
) -> None:  # fmt: skip
    """Write ``weights``, of ``module``, on the first rank of ``process_group``. Collective over all its ranks.

    ``ValueError``: a file cannot hold a tensor of this dtype. ``CheckpointError``, on every rank: the first could not
    write.

    Args:
        weights: names and tensors, as ``specs`` describes them; every rank takes them all.
        max_shard_bytes: most bytes of tensors in one file.
        module: may be a model of transformers, whose configuration is written with ``dtype``; ``None``: its own.
    """
    for spec in specs:
        if spec.dtype not in _DTYPES:
            raise ValueError(
                f"export() found that {spec.name!r} is of {spec.dtype}, for which safetensors has no name. Give a"
                " module= without it, or save what full_weights() yields in another way."
            )
    files = WeightFiles(directory, specs, max_shard_bytes)
    failed: Exception | None = None

    @contextmanager
    def writing() -> Iterator[None]:
        nonlocal failed
        try:
            yield
        except Exception as error:
            failed = error

    def agree() -> None:
        for problem in filter(None, gather_objects(failed and f"{type(failed).__name__}: {failed}", process_group)):
            raise CheckpointError(
                f"Cannot export the weights to {directory}: {problem.rstrip('.')}. {UNWRITABLE}"
            ) from failed

    if dist.get_rank(process_group) != 0:
        agree()
        for _ in weights:
            pass
        agree()
        return
    with files, progress_bar(files.nbytes) as bar:
        with writing():
            files.open()
        agree()
        for name, tensor in weights:  # even after a failure: the other ranks gather all
            with writing():
                if failed is None:
                    bar.update(files.write(name, tensor))
        with writing():
            if failed is None:
                save_transformers_config(module, dtype, directory)
                files.complete()
    agree()


class WeightFiles:
    """The files of one export, as transformers names and loads them.

    Files get their final names when all are complete. Just before, the files of an earlier export are removed, the
    index first, because they could be loaded with or instead of the new ones. So what an interrupted export leaves is
    either complete or refused by loaders.

    Args:
        specs: the tensors that will be written, in this order. A tied tensor is written once.
        max_shard_bytes: most bytes of tensors in one file. A larger tensor has a file of its own.
    """

    def __init__(self, directory: Path, specs: Sequence[WeightSpec], max_shard_bytes: int) -> None:
        self._directory = directory
        self._tied = {spec.name: spec.tied_to for spec in specs if spec.tied_to}
        self._shards = in_chunks((spec for spec in specs if not spec.tied_to), max_shard_bytes, _nbytes) or [[]]
        count = len(self._shards)
        self.names = [
            "model.safetensors" if count == 1 else f"model-{number:05}-of-{count:05}.safetensors"
            for number in range(1, count + 1)
        ]
        self.nbytes = sum(map(_nbytes, (spec for shard in self._shards for spec in shard)))
        self._places = iter([(number, spec) for number, shard in enumerate(self._shards) for spec in shard])
        self._file: BinaryIO | None = None
        self._number = 0

    def __enter__(self) -> WeightFiles:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):  # a failed write is reported already
            self._close()
        for name in self.names:
            with suppress(OSError):
                (self._directory / f"{name}{_PART}").unlink(missing_ok=True)

    def open(self) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        self._open(0)

    def write(self, name: str, tensor: torch.Tensor) -> int:
        """Write the next tensor, and return its bytes."""
        if name in self._tied:
            return 0
        number, spec = next(self._places)
        assert (spec.name, spec.shape, spec.dtype) == (name, tuple(tensor.shape), tensor.dtype)
        if number != self._number:
            self._open(number)
        assert self._file is not None
        self._file.write(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        return _nbytes(spec)

    def _open(self, number: int) -> None:
        self._close()
        self._number = number
        self._file = (self._directory / f"{self.names[number]}{_PART}").open("wb")
        self._file.write(_header(self._shards[number], self._tied))

    def _close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with file:
                file.flush()
                os.fsync(file.fileno())

    def complete(self) -> None:
        """Give the files their final names, after all tensors are written."""
        self._close()
        found = [self._directory / INDEX, self._directory / "model.safetensors"]
        for path in [*found, *self._directory.glob("model-*-of-*.safetensors")]:
            path.unlink(missing_ok=True)
        for name in self.names:
            os.replace(self._directory / f"{name}{_PART}", self._directory / name)
        if len(self.names) > 1:
            weight_map = {
                spec.name: name for name, shard in zip(self.names, self._shards, strict=True) for spec in shard
            }
            index = {"metadata": {"total_size": self.nbytes}, "weight_map": weight_map}
            part = self._directory / f"{INDEX}{_PART}"
            part.write_text(json.dumps(index, indent=2) + "\n")
            os.replace(part, self._directory / INDEX)


def save_transformers_config(module: Any, dtype: torch.dtype | None, directory: Path) -> None:
    """Write the other files that ``from_pretrained`` needs, if ``module`` is a model of transformers."""
    config: Any = getattr(module, "config", None)
    if not hasattr(config, "save_pretrained"):
        return
    config = copy.deepcopy(config)
    config.architectures = [type(module).__name__]
    config.dtype = str(dtype or module.dtype).removeprefix("torch.")
    with TemporaryDirectory(dir=directory, suffix=_PART) as complete:
        config.save_pretrained(complete)
        if module.can_generate() and module.generation_config is not None:
            module.generation_config.save_pretrained(complete)
        for path in Path(complete).iterdir():
            os.replace(path, directory / path.name)


@contextmanager
def progress_bar(nbytes: int) -> Iterator[Any]:
    """Show the progress of an export that takes longer than two seconds, on a terminal."""
    tqdm = importlib.import_module("tqdm").tqdm  # DeepSpeed needs it
    with tqdm(total=nbytes, desc="export", unit="B", unit_scale=True, delay=2.0, disable=None) as bar:
        yield bar


def _nbytes(spec: WeightSpec) -> int:
    return math.prod(spec.shape) * spec.dtype.itemsize


def _header(specs: Sequence[WeightSpec], tied: dict[str, str]) -> bytes:
    names = {spec.name for spec in specs}
    metadata = {"format": "pt"} | {name: first for name, first in tied.items() if first in names}
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for spec in specs:
        begin, end = end, end + _nbytes(spec)
        header[spec.name] = {
            "dtype": _DTYPES[spec.dtype], "shape": list(spec.shape), "data_offsets": [begin, end],
        }  # fmt: skip
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the bytes of the tensors are aligned
    return len(text).to_bytes(8, "little") + text
