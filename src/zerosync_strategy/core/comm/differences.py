"""A code for how 16-bit numbers have changed, that gives the same bits back: most changes take one or two bits.

The bits of a number are read as an integer, and a *difference* is new less old, modulo 2**16: for each old value a
bijection of all 65,536 bit patterns, so that zeros of both signs, infinities and every NaN come out as they went in.
Where the sign stays, it is the change in units of the last place, whatever the exponent.

Differences are coded in *levels*. A code of ``b`` bits has the differences from ``-(2**(b-1) - 1)`` to as much above
zero; its last value is an *escape* (of 1 bit: 0 for no change, 1 for an escape). What has escaped is coded at the next
level, in order, with more bits, and at the last one as it is. Each level has *room* for so many numbers, so that a row
has a size that is known before it is coded. What has no room is lost: whoever codes has counted before.

It takes few passes of vectorised operations, on any device. Where the host would have to wait for the device to learn
how many numbers have escaped, positions are prefix sums; on the host, indices are faster.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

BITS = (1, 2, 4, 8)
"""Of a code, smallest first. Above them numbers have 16 bits, as they are."""
_RAW = 16
_SIGN = 2**15
_UNIT = 64  # numbers of which a room has a multiple: so each level begins at a multiple of 8 bytes
_ALIGNMENT = 16  # bytes of which a row has a multiple
_HOST_PIECE = 2**18  # numbers that are coded at a time on the host: they stay in a processor's cache
_DEVICE_PIECE = 2**22
_ONES = 0x0101010101010101
_PACK_1, _UNPACK_1 = 0x0102040810204080, 0x8040201008040201 - 2**64
_PACK_2 = 1 << 24 | 1 << 18 | 1 << 12 | 1 << 6


class Plan(NamedTuple):
    """How a row of differences is coded.

    Attributes:
        numel: numbers in a row.
        levels: bits of a code and room, in numbers, of each level. The first has room for all, the last has 16 bits.
    """

    numel: int
    levels: tuple[tuple[int, int], ...]

    @property
    def nbytes(self) -> int:
        """Of a coded row."""
        nbytes = sum(bits * room // 8 for bits, room in self.levels)
        return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def choose_plan(numel: int, counts: Sequence[float], per_escape: int = 2) -> Plan:
    """Return the plan with the fewest bytes for rows of ``numel`` numbers.

    Args:
        per_escape: bits that an escape counts for beside those of its code: finding and moving it takes time. The
            default is about what a core of a CPU takes for it, on a link of 1 Gbit/s.
        counts: of each of :data:`BITS`, for how many numbers of a row there is to be room that do not fit in them.
    """
    room = {bits: _rounded(min(count, numel)) for bits, count in zip(BITS, counts, strict=True)}
    plans = []
    for chosen in itertools.chain.from_iterable(itertools.combinations(BITS, size) for size in range(1, 5)):
        rooms = [_rounded(numel), *(room[bits] for bits in chosen)]
        plans.append(Plan(numel, tuple(zip((*chosen, _RAW), rooms, strict=True))))
    return min(plans, key=lambda plan: 8 * plan.nbytes + per_escape * sum(room for _, room in plan.levels[1:]))


def _rounded(numel: float) -> int:
    return -(-int(numel) // _UNIT) * _UNIT


def is_codable(tensor: torch.Tensor) -> bool:
    """Return whether ``tensor`` has numbers of 16 bits."""
    return tensor.dtype in (torch.bfloat16, torch.float16)


# ---- encoding ------------------------------------------------------------------------------------------------------


def encode(new: torch.Tensor, old: torch.Tensor, plan: Plan, out: torch.Tensor) -> None:
    """Code how ``new`` differs from ``old``, both flat, of one 16-bit dtype and of the plan's size.

    Args:
        plan: with room for what :func:`count` has counted of them.
        out: bytes, of the plan's size, at an address that is a multiple of 8.
    """
    new, old = new.view(torch.int16), old.view(torch.int16)
    pieces = (_padded(new[begin:end] - old[begin:end]) for begin, end in _pieces(plan.numel, new.device, 1))
    _encode_level(pieces, plan, 0, out)


def _encode_level(pieces: Iterator[torch.Tensor], plan: Plan, level: int, out: torch.Tensor) -> None:
    bits, room = plan.levels[level]
    if bits == _RAW:
        coded = out[: 2 * room].view(torch.int16)
        begin = 0
        for piece in pieces:
            end = min(begin + len(piece), room)
            coded[begin:end].copy_(piece[: end - begin])
            begin = end
        return
    nbytes = bits * room // 8
    escaped = _Escaped(plan.levels[level + 1][1], out.device)
    begin = 0
    for piece in pieces:
        code = _code(piece, bits)
        size = bits * len(piece) // 8
        out[begin : begin + size].copy_(_pack(code, bits))
        begin += size
        escaped.add(piece, _escapes(code, bits))
    out[begin:nbytes].zero_()  # escapes to nowhere must not be there
    _encode_level(_split(escaped.numbers), plan, level + 1, out[nbytes:])


def count(new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """Return how many differences do not fit in each of :data:`BITS`, as int64."""
    new, old = new.view(torch.int16), old.view(torch.int16)
    counts = torch.zeros(len(BITS), dtype=torch.int64, device=new.device)
    for begin, end in _pieces(len(new), new.device, 1):
        size = (new[begin:end] - old[begin:end]).abs_().sub_(1)  # of -2**15, which has no positive, as of 2**15
        is_larger = torch.empty_like(size)  # not of bool: several times as fast on the host
        for index, bits in enumerate(BITS):
            counts[index] += torch.count_nonzero(torch.ge(size, _half(bits), out=is_larger))
    return counts


class _Compaction:
    """Moves what has escaped from its places to a row without gaps, or back."""

    @staticmethod
    def _is_on_host(device: torch.device) -> bool:
        return device.type == "cpu"


class _Escaped(_Compaction):
    """The differences of one row that have escaped from a level, in order.

    Attributes:
        numbers: as many as there is room for, and zeros in the place of those that did not come.
    """

    def __init__(self, room: int, device: Any) -> None:
        self._room = room
        # One at each end for what is not to be there.
        self._memory = torch.zeros(room + 2, dtype=torch.int16, device=device)
        self.numbers = self._memory[1 : room + 1]
        self._indexed = self._is_on_host(device)
        self._count: Any = 0 if self._indexed else torch.zeros((), dtype=torch.int64, device=device)

    def add(self, piece: torch.Tensor, escapes: torch.Tensor) -> None:
        if self._indexed:
            indices = _indices(escapes)
            fitting = max(0, min(len(indices), self._room - self._count))
            if fitting:
                begin = self._count
                torch.gather(piece, 0, indices[:fitting], out=self.numbers[begin : begin + fitting])
            self._count += len(indices)
            return
        escapes = escapes.long()
        slots = (escapes.cumsum(0) + self._count) * escapes
        self._memory.scatter_(0, slots.clamp_max_(self._room + 1), piece)
        self._count = self._count + escapes.sum()


# ---- decoding ------------------------------------------------------------------------------------------------------


def decode(coded: torch.Tensor, rows: torch.Tensor, plan: Plan, holds: torch.Tensor | None = None) -> None:
    """Let ``rows``, which have the old numbers, have the new ones.

    Args:
        coded: the coded rows, one per row; any bytes where it does not hold.
        rows: of the plan's size and a 16-bit dtype. Each is contiguous.
        holds: whether they are to have them, a single value on their device; by default, they are.
    """
    numbers = rows.view(torch.int16)
    factor = holds if holds is None else holds.to(torch.int16)
    for begin, end, differences in _decode_level(coded, plan, 0):
        end = min(end, plan.numel)
        if factor is None:
            numbers[:, begin:end] += differences[:, : end - begin]
        else:
            numbers[:, begin:end].addcmul_(differences[:, : end - begin], factor)


def _decode_level(coded: torch.Tensor, plan: Plan, level: int) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Yield the differences of one level from one number on up to another one, a row for each of ``coded``."""
    bits, room = plan.levels[level]
    nbytes = bits * room // 8
    if bits == _RAW:
        yield 0, room, coded[:, :nbytes].contiguous().view(torch.int16)
        return
    ranks = len(coded)
    above = torch.empty(ranks, plan.levels[level + 1][1], dtype=torch.int16, device=coded.device)
    for begin, end, differences in _decode_level(coded[:, nbytes:], plan, level + 1):
        above[:, begin:end].copy_(differences)
    returned = _Returned(above)
    half = _half(bits)
    for begin, end in _pieces(room, coded.device, ranks):
        code = _unpack(coded[:, bits * begin // 8 : bits * end // 8], bits)
        differences = code.to(torch.int16).sub_(half)
        returned.put(differences, _escapes(code, bits))
        yield begin, end, differences


class _Returned(_Compaction):
    """Puts what has escaped from a level back, row by row.

    Args:
        above: the differences, a row for each row of codes.
    """

    def __init__(self, above: torch.Tensor) -> None:
        self._above = above
        self._indexed = self._is_on_host(above.device)
        self._done: Any = [0] * len(above) if self._indexed else above.new_zeros(len(above), 1, dtype=torch.int64)

    def put(self, differences: torch.Tensor, escapes: torch.Tensor) -> None:
        room = self._above.shape[1]
        if self._indexed:
            for row, (into, of_row, above) in enumerate(zip(differences, escapes, self._above, strict=True)):
                begin = self._done[row]
                indices = _indices(of_row)[: max(0, room - begin)]
                into.scatter_(0, indices, above[begin : begin + len(indices)])
                self._done[row] = begin + len(indices)
            return
        if not room:
            return
        escapes = escapes.long()
        until = escapes.cumsum(1) + self._done
        found = self._above.gather(1, (until - 1).clamp_(0, room - 1))
        differences.copy_(torch.where(escapes.bool(), found, differences))
        self._done = until[:, -1:]


# ---- codes ---------------------------------------------------------------------------------------------------------


def _half(bits: int) -> int:
    return int(2 ** (bits - 1) - 1)


def _code(differences: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the codes of ``differences``, a byte each."""
    last = 2**bits - 1
    # Less 2**15, integers with a sign have the order of those without; the low byte is the same.
    return (differences + (_half(bits) - _SIGN)).clamp_max_(last - _SIGN).to(torch.uint8)


def _escapes(code: torch.Tensor, bits: int) -> torch.Tensor:
    """Return a byte of 1 for each of ``code`` that is an escape, and of 0 for others."""
    last = 2**bits - 1
    return code if bits == 1 else code.clamp_min(last - 1).sub_(last - 1)


def _pack(code: torch.Tensor, bits: int) -> torch.Tensor:
    """Return codes of so many bits, a multiple of 8 of them and a byte each, without the bits between them."""
    if bits == 8:
        return code
    if bits == 4:
        pairs = code.view(torch.int16)
        return (pairs | pairs >> 4).to(torch.uint8)
    if bits == 2:
        return (code.view(torch.int32) * _PACK_2 >> 24).to(torch.uint8)
    return (code.view(torch.int64) * _PACK_1 >> 56).to(torch.uint8)


def _unpack(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the codes in rows of ``packed``, a byte each."""
    if bits == 8:
        return packed.contiguous()
    if bits == 4:
        pairs = packed.to(torch.int16)
        return (pairs | pairs << 4).bitwise_and_(0x0F0F).view(torch.uint8)
    if bits == 2:
        fours = packed.to(torch.int32)
        fours |= fours << 6
        fours |= fours << 12
        return fours.bitwise_and_(0x03030303).view(torch.uint8)
    return (packed.to(torch.int64) * _ONES).bitwise_and_(_UNPACK_1).view(torch.uint8).clamp_max_(1)


def _pieces(numel: int, device: torch.device, rows: int) -> Iterator[tuple[int, int]]:
    """Yield from and up to which number of so many rows is worked on at a time."""
    piece = _HOST_PIECE if device.type == "cpu" else _DEVICE_PIECE
    size = max(_rounded(piece // rows), _UNIT)
    for begin in range(0, numel, size):
        yield begin, min(begin + size, numel)


def _split(numbers: torch.Tensor) -> Iterator[torch.Tensor]:
    for begin, end in _pieces(len(numbers), numbers.device, 1):
        yield numbers[begin:end]


def _padded(numbers: torch.Tensor) -> torch.Tensor:
    missing = -len(numbers) % 8
    return torch.cat([numbers, numbers.new_zeros(missing)]) if missing else numbers


def _indices(escapes: torch.Tensor) -> torch.Tensor:
    """Return where in the host's memory there is a 1; several times as fast as torch's own on one core."""
    import numpy

    return torch.from_numpy(numpy.flatnonzero(escapes.numpy().view(bool)))


# ---- digests -------------------------------------------------------------------------------------------------------


def digest(rows: torch.Tensor) -> torch.Tensor:
    """Return a number of 64 bits for each of ``rows``, of 16-bit numbers or of bytes.

    Each 8 bytes count times an odd number that stands for their place, modulo 2**64: a change within 8 of them always
    changes the digest, and any other one but for a chance of about 2**-64.
    """
    if not rows.shape[1]:
        return torch.zeros(len(rows), dtype=torch.int64, device=rows.device)
    words = _words(rows)
    while words.shape[1] > 1:
        size = _HOST_PIECE // 4 if words.device.type == "cpu" else _DEVICE_PIECE // 4
        factors = torch.arange(min(size, words.shape[1]), device=words.device).mul_(_MIXING).bitwise_or_(1)
        parts = words.split(size, dim=1)
        words = torch.stack([(part * factors[: part.shape[1]]).sum(1) for part in parts], dim=1)
    return words[:, 0]


_MIXING = 0x9E3779B97F4A7C15 - 2**64  # 2**64 over the golden ratio: the factors of near places have little in common


def _words(rows: torch.Tensor) -> torch.Tensor:
    nbytes = rows.shape[1] * rows.element_size()
    if nbytes % 8 == 0 and rows.is_contiguous():
        return rows.view(torch.int64)
    padded = torch.zeros(len(rows), -(-nbytes // 8) * 8, dtype=torch.uint8, device=rows.device)
    padded[:, :nbytes].copy_(rows.contiguous().view(torch.uint8))
    return padded.view(torch.int64)
