"""What a program edits by itself between two steps: parameters are adopted, states of shards are guarded (N1).

ZeRO steps the *master weights* of this rank's shard and then overwrites the parameters with them. So before each step,
a rank compares its shard of the parameters with the values that the last step wrote, and copies the elements that
differ into the master weights: the next step starts from the edited values. The comparison goes piece by piece, so its
memory does not grow with the shard. With an offloaded optimizer, the shard is on the device and the master weights are
on the host. Then a rank first compares a digest of the shard with the digest after the last step, for which the host
waits once per step, and compares the values only if the digests differ.

The torch optimizer steps flat shards, whose states it keeps. In plain torch the keys of ``optimizer.state`` are the
parameters of the module; here they would be unknown, and an edit of their states would be lost. It is an error with a
remedy.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

import torch
from torch import nn

from zerosync_strategy.core.comm.streams import HostCopy, Streams
from zerosync_strategy.core.engine import zero3, zero12
from zerosync_strategy.core.engine.types import Zero12Optimizer
from zerosync_strategy.core.failures.errors import HANDLE

PIECE_NUMEL = 2**22
"""Elements of a shard that are compared at once. They take at most 16 bytes each of temporary memory."""
WeightPair = tuple[torch.Tensor, torch.Tensor]
"""A flat part of this rank's shard of the parameters, and the master weights of that part."""


@torch.no_grad()
def restore_flat_parameters(
    optimizer: Zero12Optimizer, groups: Iterable[zero12.FlatGroup], names: Mapping[nn.Parameter, str]
) -> None:
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
def write_gathered_to_shards(params: Iterable[nn.Parameter], names: Mapping[nn.Parameter, str]) -> None:
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
    if pairs := zero3.shard_pairs(gathered):
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
        changed = self._changed([shard for shard, _ in elsewhere]) if elsewhere else []
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
        return [found != 0 for found in answer.arrived().tolist()]

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


def _check_shape(param: nn.Parameter, shape: tuple[int, ...], names: Mapping[nn.Parameter, str]) -> None:
    if tuple(param.shape) != shape:
        raise ValueError(
            f"Parameter {names.get(param, 'of the optimizer')!r} has the shape {tuple(param.shape)}, where the engine"
            f" was built with {shape}: its data was replaced. ZeRO cannot change shapes. Build the optimizer and the"
            " engine anew."
        )


class GuardedStates(defaultdict[Any, Any]):
    """The states of a torch optimizer, with ``names`` of the module's parameters, which are no keys of it."""

    def __init__(self, states: Mapping[Any, Any], names: Mapping[nn.Parameter, str]) -> None:
        super().__init__(dict, states)
        self._names = names

    def __missing__(self, key: object) -> Any:
        self._check(key)
        return super().__missing__(key)

    def __contains__(self, key: object) -> bool:
        return super().__contains__(key) or self._check(key)

    def get(self, key: object, default: object = None) -> Any:
        return super().get(key, default) if key in self else default

    def pop(self, key: object, *default: Any) -> Any:
        self._check(key)
        return super().pop(key, *default)

    def __reduce__(self) -> tuple[object, ...]:
        return defaultdict, (dict, dict(self))

    def _check(self, key: Any) -> bool:
        if key in self._names:
            _refuse(self._names[key])
        return False

    def check(self) -> None:
        """Raise ``RuntimeError`` if the program has set states of a parameter."""
        for key in self.keys() & self._names.keys():
            _refuse(self._names[key])


def guard_states(optimizer: torch.optim.Optimizer, names: Mapping[nn.Parameter, str]) -> None:
    """Make a use of ``optimizer.state`` by parameter a ``RuntimeError``, also of what was set so far."""
    if not isinstance(optimizer.state, GuardedStates):  # a load has replaced it
        optimizer.state = GuardedStates(optimizer.state, names)
    optimizer.state.check()


def unguard_states(optimizer: torch.optim.Optimizer) -> None:
    """Undo :func:`guard_states`."""
    if isinstance(optimizer.state, GuardedStates):
        optimizer.state = defaultdict(dict, optimizer.state)


def _refuse(name: str) -> NoReturn:
    raise RuntimeError(
        f"optimizer.state was asked for parameter {name!r}. Under ZeRO the optimizer has the states of shards, by flat"
        " tensors of its own. Read and change those of a parameter with safe_get_full_optimizer_state(param, key) and"
        " safe_set_full_optimizer_state(param, value, key) of deepspeed.utils, on all ranks; change those of all in"
        " place: for state in optimizer.state.values()."
    )
