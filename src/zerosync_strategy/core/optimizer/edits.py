"""Parameters that a program edits outside of the optimizer: the next step starts from the edited values (N1).

ZeRO steps the *master weights* of this rank's shard and then overwrites the parameters with them. So before each step,
a rank compares its shard of the parameters with the values that the last step wrote, and copies the elements that
differ into the master weights. The comparison goes piece by piece, so its memory does not grow with the shard. With an
offloaded optimizer, the shard is on the device and the master weights are on the host. Then a rank first compares a
digest of the shard with the digest after the last step, for which the host waits once per step, and compares the values
only if the digests differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from zerosync_strategy.core.comm.streams import HostCopy, Streams
from zerosync_strategy.core.engine import zero3, zero12
from zerosync_strategy.core.failures.errors import HANDLE

PIECE_NUMEL = 2**22
"""Elements of a shard that are compared at once. They take at most 16 bytes each of temporary memory."""
WeightPair = tuple[torch.Tensor, torch.Tensor]
"""A flat part of this rank's shard of the parameters, and the master weights of that part."""


@torch.no_grad()
def restore_flat_parameters(optimizer: Any, groups: Iterable[zero12.FlatGroup], names: Mapping[Any, str]) -> None:
    """Copy parameters of ZeRO-1 or ZeRO-2 that ``param.data = ...`` has replaced back into the flat buffers.

    Raise ``ValueError`` if a parameter was given data of another shape.
    """
    for group in groups:
        flat = zero12.flat_parameters(optimizer, group.index)
        begin, itemsize = flat.data_ptr(), flat.element_size()
        for param, offset, shape in zip(group.params, group.offsets, group.shapes, strict=True):
            if param.data_ptr() != begin + offset * itemsize or param.shape != shape:
                _check_shape(param, shape, names)
                place = flat.narrow(0, offset, param.numel()).view(shape)
                param.data = place.copy_(param.data)


@torch.no_grad()
def write_gathered_to_shards(params: Iterable[Any], names: Mapping[Any, str]) -> None:
    """Copy the values of the gathered parameters among ``params``, which may have been edited, to their ZeRO-3 shards.

    The other parameters may have been edited in their shards. Raise ``ValueError`` if a parameter was given data of
    another shape, or was given data while it was not gathered.
    """
    gathered, reshaped, others = zero3.by_values(params)
    for param in reshaped:
        _check_shape(param, zero3.full_shape(param), names)
    for param in others:
        if param.numel() > 0 and zero3.is_released(param):  # a parameter in flight has memory already
            raise ValueError(
                f"Parameter {names.get(param, 'of the optimizer')!r} was given new data while ZeRO-3 had it sharded,"
                f" where it would be lost. Change it inside 'with zerosync.full_parameters():'. ({HANDLE}.)"
            )
    if pairs := zero3.own_parts(gathered):
        torch._foreach_copy_([shard for shard, _ in pairs], [part for _, part in pairs], non_blocking=True)


class MasterWeights:
    """Copies what a program has edited into the master weights of one engine."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._factors: torch.Tensor | None = None
        self._answer: tuple[int, HostCopy] | None = None  # the number of its elements, and the copy
        self._digests: list[torch.Tensor] = []  # after the last step, of device shards with master weights on the host

    @torch.no_grad()
    def adopt(self, weights: Iterable[WeightPair]) -> None:
        weights = list(weights)
        elsewhere, concurrent = self._elsewhere(weights), self._streams.concurrent
        if any(self._streams.is_on_host(shard) for shard, _ in weights):
            self._streams.host_waits_for_caller()
        changed = self._changed([shard for shard, _ in elsewhere])
        edited = {id(master) for (_, master), is_changed in zip(elsewhere, changed, strict=True) if is_changed}
        kept = {id(master) for _, master in elsewhere} - edited
        for shard, master in weights:
            if id(master) not in kept:
                _adopt(shard, master, concurrent and not self._streams.is_on_host(master))

    @torch.no_grad()
    def stepped(self, weights: Iterable[WeightPair]) -> None:
        """Record digests of device shards, to which a step has just written master weights from the host."""
        if self._streams.concurrent:
            self._digests = [self.digest(shard) for shard, _ in self._elsewhere(weights)]

    def _elsewhere(self, weights: Iterable[WeightPair]) -> list[WeightPair]:
        on_host = self._streams.is_on_host
        return [(shard, master) for shard, master in weights if on_host(master) and not on_host(shard)]

    def _changed(self, shards: list[torch.Tensor]) -> list[bool]:
        """Return for each of ``shards`` whether it has changed since the last step; true if that is unknown."""
        before, self._digests = self._digests, []
        now = [self.digest(shard) for shard in shards]
        if not now or [digest.shape for digest in now] != [digest.shape for digest in before]:
            return [True] * len(now)
        if self._answer is None or self._answer[0] != len(now):
            self._answer = len(now), HostCopy(self._streams, len(now))
        self._digests, answer = before, self._answer[1]
        answer.begin(torch.stack([old.ne(new).any() for old, new in zip(before, now, strict=True)]).long())
        return [found != 0 for found in answer.read()]

    def digest(self, shard: torch.Tensor) -> torch.Tensor:
        """Return one number for each piece of ``shard``.

        It is the sum of the bits of all elements, each times a random number of 64 bits, modulo 2**64. Two different
        shards have the same digest with a probability of at most 2**-32.
        """
        bits = shard.view(_INTEGERS[shard.element_size()])
        numel = min(bits.numel(), PIECE_NUMEL)
        if self._factors is None or self._factors.numel() < numel:
            self._factors = torch.empty(numel, dtype=torch.int64, device=shard.device)
            self._factors.random_(-(2**63), None, generator=torch.Generator(shard.device).manual_seed(0))
        return torch.stack([(piece * self._factors[: piece.numel()]).sum() for piece in bits.split(PIECE_NUMEL)])


_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int32}  # of fewer bits than a factor


def _adopt(shard: torch.Tensor, master: torch.Tensor, concurrent: bool) -> None:
    """Copy ``shard`` to ``master`` where it differs from ``master`` converted to the dtype of the shard.

    On a device, for a shard in half precision, four kernels read and write 30 bytes of memory per element.
    """
    if shard.dtype == master.dtype:
        master.copy_(shard)
        return
    for piece, of_master in zip(shard.split(PIECE_NUMEL), master.split(PIECE_NUMEL), strict=True):
        piece = piece.to(of_master.device)
        written = of_master.to(piece.dtype)
        if concurrent or not torch.equal(piece, written):  # on the host, comparing is cheaper than copying
            torch.where(piece == written, of_master, piece.to(of_master.dtype), out=of_master)


def _check_shape(param: Any, shape: tuple[int, ...], names: Mapping[Any, str]) -> None:
    if tuple(param.shape) != shape:
        raise ValueError(
            f"Parameter {names.get(param, 'of the optimizer')!r} has the shape {tuple(param.shape)}, where the engine"
            f" was built with {shape}: its data was replaced. ZeRO cannot change shapes. Build the optimizer and the"
            " engine anew."
        )
