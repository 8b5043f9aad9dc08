"""The norm of the gradients of one window, with numbers that ranks add up beside it."""

from __future__ import annotations

import torch

from zerosync_strategy.core.comm.collectives import phase
from zerosync_strategy.core.comm.streams import HostCopy
from zerosync_strategy.core.gradients.shards import GradientShards


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
