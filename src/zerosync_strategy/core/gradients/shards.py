"""How one ZeRO optimizer shards gradients: its layouts, their buckets, the memory of this rank's shards, their norm."""

# ruff: noqa: B027  (a stage may have nothing to do)

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from zerosync_strategy.core.comm.collectives import all_reduce
from zerosync_strategy.core.comm.journal import SentCounter, phase
from zerosync_strategy.core.comm.nodes import MessageSizes, Sent, Topology
from zerosync_strategy.core.comm.streams import HostCopy, Streams
from zerosync_strategy.core.engine import zero, zero3
from zerosync_strategy.core.engine.types import DeepSpeedEngine
from zerosync_strategy.core.gradients.buckets import GradientBucket, LocalGradients, cut_into_buckets
from zerosync_strategy.core.gradients.layout import ShardLayout, ShardSlice
from zerosync_strategy.core.options import ZeroSyncConfig


class GradientShards(ABC):
    """This rank's gradient shards, in the form of its ZeRO stage: averages over the ranks.

    Args:
        counter: of what the engine sends.
        whole: the optimizer needs whole parameters: a rank's shards hold the parameters that the rank owns.

    Attributes:
        group: the data-parallel ranks.
        dtype: of the reduction.
        local: the unreduced gradients.
        on_device: ``False``: in host memory, because the optimizer is offloaded.
        over_groups: some parameters are sharded over a part of the ranks; the same on every rank.
        buckets_of: by layout, its buckets in the order of the layout.
    """

    on_device = True
    over_groups = False

    def __init__(
        self, engine: DeepSpeedEngine, config: ZeroSyncConfig, topology: Topology, counter: SentCounter, whole: bool
    ) -> None:  # fmt: skip
        self.optimizer, self.topology, self.counter, self.whole = engine.optimizer, topology, counter, whole
        self.group = zero.data_parallel_group(self.optimizer)
        self.dtype = zero.reduction_dtype(engine)
        self.streams = Streams()
        self.buckets_of: dict[ShardLayout, list[GradientBucket]] = {}
        self.layouts = self._read_layouts()
        self.params = [param for layout in self.layouts for param in layout.params]
        self.local = LocalGradients(self.optimizer, self.streams)

    @abstractmethod
    def _read_layouts(self) -> Sequence[Any]:
        """Return the layouts."""

    def most_bytes(self, config: ZeroSyncConfig, sizes: MessageSizes) -> int:
        """Return the largest bucket in bytes that other messages allow."""
        return sizes.nbytes

    def make_buckets(self, config: ZeroSyncConfig, limit: int, common: dict[str, Any]) -> list[GradientBucket]:
        """Return buckets of ``limit`` bytes, made with ``common`` arguments, in roughly the order of a backward."""
        buckets: list[GradientBucket] = []
        layout: Any
        for layout, params_of in cut_into_buckets(self.layouts, self.local, limit):
            self.buckets_of[layout] = of_layout = list[GradientBucket]()
            for params, placement in zip(params_of, layout.divide(params_of), strict=True):
                below = of_layout[-1] if of_layout else None
                nbytes = sum(map(zero3.full_numel, params)) * layout.dtype.itemsize
                floor = self.topology.sent(nbytes, layout.process_group)
                of_layout.append(GradientBucket(layout, params, placement, floor, below=below, **common))
            buckets += of_layout[::-1]
        return buckets

    @abstractmethod
    def allocate(self) -> None:
        """Allocate the shards, uninitialised."""

    @abstractmethod
    def parts(self, layout: Any, offset: int, numel: int) -> list[torch.Tensor]:
        """Return ``numel`` elements of a shard from ``offset`` on, in order, in as few flat tensors as possible."""

    def of_params(self) -> Iterator[tuple[nn.Parameter, ShardSlice, torch.Tensor]]:
        """Yield each parameter of which this rank's shards have elements, which these are, and their memory."""
        for layout in self.layouts:
            for param in layout.params:
                for own in layout.shard_slices(param):
                    for part in self.parts(layout, own.offset, own.stop - own.start):  # one, or none of no elements
                        yield param, own, part

    @abstractmethod
    def hand_over(self) -> None:
        """Put the shards where DeepSpeed's step reads them. Sends nothing."""

    @property
    @abstractmethod
    def computes_norm(self) -> bool:
        """Whether the step computes the norm by one sum over the data-parallel ranks, which may carry numbers."""

    def sum_over_ranks(self, numbers: torch.Tensor) -> None:
        """Sum ``numbers`` over the data-parallel ranks, in place. Collective."""
        all_reduce(numbers, self.group, self.counter)

    @abstractmethod
    def norm(self, said: torch.Tensor) -> torch.Tensor:
        """Return the L2 norm of all ranks' shards, times the loss scale, and the sums of ``said`` over the ranks.

        All in fp64; infinity if the norm is not finite. ``said`` has no elements unless :attr:`computes_norm`.
        Collective.
        """

    @abstractmethod
    def discard(self) -> None:
        """Remove the shards of this window from DeepSpeed's optimizer."""

    def stepped(self) -> None:
        """Clean up after the step has used the shards."""

    @abstractmethod
    def parameters_floor(self) -> dict[nn.Parameter, Sent]:
        """Return, by parameter, the minimum that one rank sends to all-gather it once."""


class Norm:
    """The L2 norm of what is in ``shards``, times the loss scale; infinity if it is not finite.

    The same on every rank, and computed once per window. On a device with streams, the host waits for it once, and its
    readers do not wait (DeepSpeed reads it up to three times a step). At most ``numbers`` go with it.
    """

    def __init__(self, shards: GradientShards, numbers: int) -> None:
        self._shards, self._streams = shards, shards.streams
        self._value: torch.Tensor | None = None  # once it is known to the host
        self._heard: list[float] = []
        self._is_begun = False
        self._found: torch.Tensor | None = None  # what was begun, unless its copy to the host was begun, too
        self._copy = HostCopy(self._streams, 1 + numbers, torch.float64)
        self._said: dict[tuple[float, ...], torch.Tensor] = {}  # on the device; most windows say the same again

    def begin(self, numbers: tuple[float, ...] = ()) -> None:
        """Begin to add up the squares of the shards over the ranks, and ``numbers`` with them. Collective."""
        with phase("norm"):
            said = self._said.get(numbers)
            if said is None:
                self._said.clear()
                device = self._shards.params[0].device if self._shards.params else None
                said = self._said[numbers] = torch.tensor(numbers, dtype=torch.float64, device=device)
            found = self._shards.norm(said)
            self._is_begun, self._found = True, found
            if self._streams.concurrent and not self._streams.is_on_host(found):
                self._copy.begin(found)
                self._found = None

    def _end(self) -> None:
        if not self._is_begun:
            return
        with phase("norm"):
            found = self._copy.arrived() if self._found is None else self._found
            self._value, self._heard = found[0].float(), found[1:].tolist()
        self._is_begun, self._found = False, None

    def heard(self) -> list[float]:
        """Return the sums of the numbers that :meth:`begin` was given last."""
        self._end()
        return self._heard

    def value(self) -> torch.Tensor:
        """Return the norm, a scalar in fp32. Collective, unless it has begun."""
        if self._value is None and not self._is_begun:
            self.begin()
        self._end()
        assert self._value is not None
        return self._value

    def changed(self) -> None:
        """Forget the norm, because shards change."""
        self._value, self._is_begun = None, False
