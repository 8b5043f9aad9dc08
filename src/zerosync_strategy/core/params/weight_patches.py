"""Patches: how weights have changed since a receiver got them, bit for bit, for whoever feeds an inference engine.

In 16 bits a step of fine-tuning changes few weights, most of them by one unit in the last place (arXiv 2602.03839).
A patch has the places of these and their new values, as engines take them, and packs them into bytes: the distance
from one place to the next, and the difference of the bits, in the code of ``comm/differences.py``.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from zerosync_strategy.core.comm.differences import BITS, Plan, choose_plan, count, decode, digest, encode, is_codable

_MAGIC = b"ZSP1"
_FULL, _SPARSE, _DENSE = range(3)  # what is packed: all values, places and differences, or all differences
_DTYPES = (
    torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2,
)  # fmt: skip
_STRIDE = 2**15  # places of which every multiple is in a patch, changed or not, so that distances fit in 16 bits
_CENTRE = 128  # a distance less this: those up to 255 have a code of 8 bits
_HEADER = struct.Struct("<4sHBBBqqQ")
_LEVEL = struct.Struct("<BI")


class WeightSnapshot:
    """What a receiver has been given, for :meth:`ZeroSync.full_weights`: a copy of each weight, in host memory.

    Made empty, it asks for all weights; each patch that is taken updates it.
    """

    def __init__(self) -> None:
        self._weights: dict[str, torch.Tensor] = {}

    @property
    def nbytes(self) -> int:
        """Of the copies."""
        return sum(tensor.nbytes for tensor in self._weights.values())

    def patches(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[WeightPatch]:
        """Yield how ``weights`` differ from this, and become them."""
        for name, tensor in weights:
            patch = WeightPatch._between(name, self._weights.get(name), tensor)
            if patch is not None:
                self._weights[name] = tensor.to("cpu", copy=True)
                yield patch


@dataclass(frozen=True)
class WeightPatch:
    """How one weight has changed.

    Attributes:
        name: of the weight.
        shape, dtype: of the whole tensor.
        base: the digest of what it was; ``None``: :attr:`values` are all of it, and it may have been anything.
        result: the digest of what it is now.
        indices: of the changed elements, ascending, in the tensor as a flat one; int64. ``None`` without :attr:`base`.
        values: their new values; of a patch that was unpacked, ``None`` but without :attr:`base`.
        differences: of their bits, modulo 2**16.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    base: int | None
    result: int
    indices: torch.Tensor | None
    values: torch.Tensor | None
    differences: torch.Tensor | None = None

    @classmethod
    def _between(cls, name: str, old: torch.Tensor | None, new: torch.Tensor) -> WeightPatch | None:
        """Return the patch from ``old`` to ``new``; ``None``: they have the same bits."""
        flat, shape, result = new.detach().reshape(-1), tuple(new.shape), _digest(new)
        if old is not None and (old.dtype is not new.dtype or old.shape != new.shape):
            old = None
        base = None if old is None else _digest(old)
        if old is None or not is_codable(new):
            return None if base == result else cls(name, shape, new.dtype, None, result, None, flat)
        before = old.reshape(-1).to(flat.device).view(torch.int16)
        differences = flat.view(torch.int16) - before
        indices = differences.nonzero().view(-1)
        if not len(indices):
            return None
        return cls(name, shape, new.dtype, base, result, indices, flat[indices], differences[indices])

    @torch.no_grad()
    def apply(self, tensor: torch.Tensor) -> None:
        """Give ``tensor``, contiguous and on any device, the new values in place.

        Raises:
            ValueError: it has another shape or dtype, or was another one than that from which the patch was made; it is
                as it was then. Or the patch is damaged, and it has wrong values.
        """
        if tuple(tensor.shape) != self.shape or tensor.dtype is not self.dtype:
            raise ValueError(
                f"The patch of {self.name!r} is for {self.dtype} of shape {self.shape}, found {tensor.dtype} of shape"
                f" {tuple(tensor.shape)}. Apply it to the weight of this name."
            )
        flat = tensor.view(-1)
        if self.base is None:
            assert self.values is not None
            flat.copy_(self.values)
        elif _digest(tensor) != self.base:
            raise ValueError(
                f"The patch of {self.name!r} was made from other values than the tensor has: a patch was left out or"
                " applied twice, or the weight was changed. Ask for all weights, with a new WeightSnapshot."
            )
        else:
            assert self.indices is not None and self.differences is not None
            bits, indices = flat.view(torch.int16), self.indices.to(flat.device)
            bits[indices] += self.differences.to(flat.device)
        if _digest(tensor) != self.result:
            raise ValueError(
                f"The patch of {self.name!r} is damaged: the tensor has not become what was sent. Ask for all weights,"
                " with a new WeightSnapshot."
            )

    # ---- bytes -----------------------------------------------------------------------------------------------------

    def to_bytes(self) -> bytes:
        """Return the patch in as few bytes as it takes, without :attr:`values` but for a patch without a base."""
        name = self.name.encode()
        if self.base is None:
            assert self.values is not None
            kind, body = _FULL, _bytes_of(self.values)
        else:
            assert self.indices is not None and self.differences is not None
            kind, body = min(
                ((_SPARSE, self._pack_places()), (_DENSE, self._pack_all())), key=lambda packed: len(packed[1])
            )
        sizes = struct.pack(f"<{len(self.shape)}Q", *self.shape)
        told = (
            _MAGIC,
            len(name),
            len(self.shape),
            _DTYPES.index(self.dtype),
            kind,
            self.base or 0,
            self.result,
            len(body),
        )
        return _HEADER.pack(*told) + name + sizes + body

    def _pack_places(self) -> bytes:
        assert self.indices is not None and self.differences is not None
        indices, differences = self.indices.cpu(), self.differences.cpu()
        fixed = torch.arange(0, math.prod(self.shape), _STRIDE)
        fixed = fixed[~torch.isin(fixed, indices)]
        places, order = torch.cat([indices, fixed]).sort()
        changed = torch.cat([differences, differences.new_zeros(len(fixed))])[order]
        distances = places.diff(prepend=places.new_tensor([-1])) - _CENTRE
        return _coded(distances.to(torch.int16)) + _coded(changed)

    def _pack_all(self) -> bytes:
        assert self.indices is not None and self.differences is not None
        changed = torch.zeros(math.prod(self.shape), dtype=torch.int16)
        changed[self.indices.cpu()] = self.differences.cpu()
        return _coded(changed)

    @classmethod
    def from_bytes(cls, data: bytes) -> WeightPatch:
        """Return the patch that :meth:`to_bytes` has packed, on the host.

        Raises:
            ValueError: ``data`` is no whole patch.
        """
        try:
            magic, of_name, dims, dtype, kind, base, result, nbytes = _HEADER.unpack_from(data)
            at = _HEADER.size
            name = data[at : at + of_name].decode()
            shape = struct.unpack_from(f"<{dims}Q", data, at + of_name)
            body = memoryview(data)[at + of_name + 8 * dims :]
            if magic != _MAGIC or len(body) != nbytes or not (dtype < len(_DTYPES) and kind <= _DENSE):
                raise ValueError("another length or kind")
            if kind == _FULL:
                values = torch.frombuffer(bytearray(body), dtype=_DTYPES[dtype])
                return cls(name, shape, _DTYPES[dtype], None, result, None, values)
            if kind == _DENSE:
                everything, _ = _decoded(body)
                indices = everything.nonzero().view(-1)
                differences = everything[indices]
            else:
                distances, used = _decoded(body)
                differences, _ = _decoded(body[used:])
                indices = (distances.long() + _CENTRE).cumsum(0) - 1
                indices, differences = indices[differences != 0], differences[differences != 0]
            if len(indices) and not 0 <= int(indices[0]) <= int(indices[-1]) < math.prod(shape):
                raise ValueError("places outside")
        except (struct.error, ValueError, IndexError, RuntimeError) as error:
            raise ValueError(
                f"WeightPatch.from_bytes() got {len(data)} bytes that are no whole patch: {error}. Send them again."
            ) from error
        return cls(name, shape, _DTYPES[dtype], base, result, indices, None, differences)


def _digest(tensor: torch.Tensor) -> int:
    flat = tensor.detach().reshape(1, -1)
    return int(digest(flat.view(torch.int16 if is_codable(flat) else torch.uint8)))


def _bytes_of(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().data)


def _coded(numbers: torch.Tensor) -> bytes:
    zeros = torch.zeros_like(numbers)
    plan = choose_plan(len(numbers), count(numbers, zeros).tolist(), per_escape=0)
    out = torch.zeros(plan.nbytes, dtype=torch.uint8)
    encode(numbers, zeros, plan, out)
    levels = b"".join(_LEVEL.pack(bits, room) for bits, room in plan.levels)
    return struct.pack("<QB", plan.numel, len(plan.levels)) + levels + _bytes_of(out)


def _decoded(data: memoryview) -> tuple[torch.Tensor, int]:
    """Return the numbers at the beginning of ``data``, and how many bytes they take."""
    numel, count_ = struct.unpack_from("<QB", data)
    at = struct.calcsize("<QB")
    levels = tuple(_LEVEL.unpack_from(data, at + level * _LEVEL.size) for level in range(count_))
    at += count_ * _LEVEL.size
    plan = Plan(numel, levels)
    end = at + plan.nbytes
    bits, rooms = zip(*levels, strict=True)
    if end > len(data) or numel > rooms[0] or not set(bits[:-1]) <= set(BITS) or list(bits) != sorted({*bits, 16}):
        raise ValueError("another length or code")
    rows = torch.zeros(1, numel, dtype=torch.int16)
    decode(torch.frombuffer(bytearray(data[at:end]), dtype=torch.uint8).view(1, -1), rows, plan)
    return rows[0], end
