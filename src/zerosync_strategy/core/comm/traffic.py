"""Counts what one attached engine sends, where its collectives are issued."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from zerosync_strategy.core.engine.interpose import replaced


@dataclass(frozen=True)
class Traffic:
    """Collectives of one kind: the calls, the bytes that one rank sends for them, and those of them to other nodes.

    Bytes are those of a bandwidth-optimal algorithm for the group's size, as a mean over the ranks; for ``isend`` and
    ``reduce``, those of this rank.
    """

    calls: int = 0
    bytes: int = 0
    between: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.calls + other.calls, self.bytes + other.bytes, self.between + other.between)


_Call = tuple[str, int, Any, int | None]
"""Its kind, the bytes of its payload, its process group, and its only destination, a rank of that."""
_Calls = dict[_Call, int]
_WHOLE = ("isend", "reduce")  # their payload is sent as it is: of other kinds, each of W ranks sends (W-1)/W of it


class SentCounter:
    """Counts what one engine sends, by kind, with DeepSpeed's names of the collectives.

    The payload of a kind is the larger of what a rank gives and receives. What ranks say to each other in words and
    objects is not counted.

    Args:
        between: of a topology (:meth:`~nodes.Topology.between`); ``None``: all ranks are on one node.
    """

    def __init__(self, between: Callable[[int, Any, int | None, bool], int] | None = None) -> None:
        self.between = between
        # How many there were of each; what they sent is computed when it is asked for.
        self._of_step: _Calls = {}
        self._apart: dict[str, _Calls] = {}  # by section
        self._calls = self._of_step  # where calls count now

    def add(self, kind: str, nbytes: int, process_group: Any) -> None:
        """Count a collective with a payload of ``nbytes``."""
        call = kind, nbytes, process_group, None
        self._calls[call] = self._calls[call] + 1 if call in self._calls else 1

    def add_messages(
        self, messages: Iterable[tuple[int, Iterable[torch.Tensor], object]], process_group: Any
    ) -> None:  # fmt: skip
        """Count the tensors that are sent to each rank of ``process_group``; those of no elements are not sent."""
        for peer, sent, _ in messages:
            for tensor in sent:
                if nbytes := tensor.nbytes:
                    call = "isend", nbytes, process_group, peer
                    self._calls[call] = self._calls[call] + 1 if call in self._calls else 1

    def apart(self, section: str) -> AbstractContextManager[None]:
        """Around what is not part of a step: its traffic counts for the outermost ``section``."""
        is_outermost = self._calls is self._of_step
        return replaced(self, "_calls", self._apart.setdefault(section, {}) if is_outermost else self._calls)

    @property
    def traffic(self) -> dict[str, Traffic]:
        """What was sent for a step since the last :meth:`take`, by kind."""
        return self._traffic(self._of_step)

    def take(self) -> Mapping[str, Traffic]:
        """Return :attr:`traffic`, and begin anew."""
        traffic = self.traffic
        self._of_step.clear()
        return traffic

    def take_apart(self) -> Mapping[str, int]:
        """Return the bytes that were sent since the last call, but not for a step, by section."""
        sections = {section: calls for section, calls in self._apart.items() if calls}
        nbytes = {name: sum(each.bytes for each in self._traffic(calls).values()) for name, calls in sections.items()}
        for calls in sections.values():
            calls.clear()
        return nbytes

    def _traffic(self, calls: _Calls) -> dict[str, Traffic]:
        traffic: dict[str, Traffic] = {}
        for (kind, nbytes, group, peer), count in calls.items():
            sent, to = nbytes, None if peer is None else dist.get_global_rank(group, peer)
            if kind not in _WHOLE:
                ranks = dist.get_world_size(group)
                sent = (2 if kind == "all_reduce" else 1) * nbytes * (ranks - 1) // ranks
            between = 0
            if self.between is not None:
                between = self.between(sent, group, to, kind.startswith("all_to_all"))
            traffic[kind] = traffic.get(kind, Traffic()) + Traffic(count, count * sent, count * between)
        return traffic
