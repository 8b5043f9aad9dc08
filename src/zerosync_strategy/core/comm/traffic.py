"""Counts what the collectives of this process send. All of them go through DeepSpeed's communication backend."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from zerosync_strategy.core.comm.collectives import is_native
from zerosync_strategy.core.comm.nodes import Topology
from zerosync_strategy.core.engine import patches
from zerosync_strategy.core.engine.interpose import interpose, restore
from zerosync_strategy.core.engine.zero import comm_backend, use_current_names

OTHERS = "engines without ZeroSync"
"""The section of what their forwards gather."""


@dataclass(frozen=True)
class Traffic:
    """Collectives of one kind: the calls, the bytes that one rank sends for them, and those of them to other nodes.

    Bytes are those of a bandwidth-optimal algorithm for the group's size, as a mean over the ranks; for ``isend`` and
    ``reduce``, those of this rank. gloo has no reduce-scatter and sends an all-reduce instead, which is what is
    counted.
    """

    calls: int = 0
    bytes: int = 0
    between: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.calls + other.calls, self.bytes + other.bytes, self.between + other.between)


_NONE = Traffic()
_Call = tuple[str, int, Any, int | None, bool]
"""Its kind, the bytes that this rank sends, its process group, its only destination, and whether bytes are distinct."""


class _Kind(NamedTuple):
    """How to read a call of one kind: the argument whose bytes count, and the part of them that is sent."""

    payload: str
    position: int
    group_position: int
    passes: int = 1  # (W-1)/W of the payload each
    passes_on_gloo: int = 1
    to_one_rank: bool = False  # the whole payload is sent, for any W
    to_root: bool = False  # by every rank but the root, which sends nothing
    distinct: bool = False  # each rank receives different data


_KINDS = {
    "all_reduce": _Kind("tensor", 0, 2, passes=2, passes_on_gloo=2),
    "all_reduce_coalesced": _Kind("tensors", 0, 2, passes=2, passes_on_gloo=2),
    "inference_all_reduce": _Kind("tensor", 0, 2, passes=2, passes_on_gloo=2),
    "all_gather": _Kind("tensor_list", 0, 2),
    "all_gather_into_tensor": _Kind("output_tensor", 0, 2),
    "all_gather_coalesced": _Kind("output_tensors", 0, 2),
    "reduce_scatter": _Kind("input_list", 1, 3, passes_on_gloo=2),
    "reduce_scatter_tensor": _Kind("input_tensor", 1, 3, passes_on_gloo=2),
    "reduce": _Kind("tensor", 0, 3, to_root=True),
    "broadcast": _Kind("tensor", 0, 2),
    "all_to_all_single": _Kind("input", 1, 4, distinct=True),
    "all_to_all": _Kind("input_tensor_list", 1, 2, distinct=True),
    "isend": _Kind("tensor", 0, 2, to_one_rank=True),
}


class CollectiveCounter:
    """Counts every collective that DeepSpeed issues in this process, by kind, between ``start`` and ``stop``.

    Several counters may run at once. Usable as a context manager. Without ``topology``, all ranks are on one node.
    """

    def __init__(self, topology: Topology | None = None) -> None:
        self._topology = topology
        self.calls: dict[
            _Call, int
        ] = {}  # how many there were of each; what they sent is computed when it is asked for
        self._backend: Any = None  # the one that it counts

    def start(self) -> CollectiveCounter:
        """Begin to count. DeepSpeed's process group must exist.

        Raises:
            ContractError: DeepSpeed has no communication backend.
        """
        backend = self._backend = comm_backend()
        if not isinstance(backend, _CountingBackend):
            backend._zerosync_counters = []
            backend._zerosync_restore_names = use_current_names(backend)
            interpose(backend, _CountingBackend)
        backend._zerosync_counters.append(self)
        return self

    def stop(self) -> None:
        """Stop counting; the last counter to stop leaves DeepSpeed's backend as it was."""
        backend = self._backend
        if not isinstance(backend, _CountingBackend) or self not in backend._zerosync_counters:
            return
        backend._zerosync_counters.remove(self)
        if not backend._zerosync_counters:
            restore(backend, _CountingBackend)
            backend._zerosync_restore_names()
            del backend._zerosync_counters, backend._zerosync_restore_names

    def take(self) -> Mapping[str, Traffic]:
        """Return what was counted since the last call, by kind."""
        traffic, self.calls = self.traffic, {}
        return traffic

    @property
    def traffic(self) -> dict[str, Traffic]:
        """What was counted since the last :meth:`take`, by kind."""
        traffic: dict[str, Traffic] = {}
        for (kind, nbytes, group, to, distinct), count in self.calls.items():
            between = 0 if self._topology is None else self._topology.between(nbytes, group, to, distinct)
            traffic[kind] = traffic.get(kind, _NONE) + Traffic(count, count * nbytes, count * between)
        return traffic

    def __enter__(self) -> CollectiveCounter:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def add_gather(self, nbytes: int, process_group: Any) -> None:
        """Count an all-gather for which this rank sends ``nbytes``, and that DeepSpeed does not call."""
        call = "all_gather_into_tensor", nbytes, process_group, None, False
        self.calls[call] = self.calls[call] + 1 if call in self.calls else 1

    def _add(self, kind: str, nbytes: int, process_group: Any, to: int | None, distinct: bool = False) -> None:
        call = kind, nbytes, process_group, to, distinct
        self.calls[call] = self.calls.get(call, 0) + 1


class EngineCounter(CollectiveCounter):
    """Counts what one engine sends, of several in this process.

    A call counts for the engine whose :meth:`attribute` is called first after it.

    Attributes:
        section: what the traffic from now on is for; ``None``: for the step.
    """

    def __init__(self, topology: Topology | None = None) -> None:
        super().__init__(topology)
        self._attributed: dict[_Call, int] = {}
        self._apart: dict[str, int] = {}
        self.section: str | None = None

    def start(self) -> EngineCounter:
        super().start()
        patches.replace(patches.BUILD, _build)
        patches.replace(patches.FORWARD, _of_others)
        patches.replace(patches.FETCH, _of_others)
        _reset_unattributed()  # set-up counts for no engine
        return self

    @property
    def is_alone(self) -> bool:
        """Whether this is the only counter, so that it need not attribute."""
        return self._backend is None or not self._backend._zerosync_counters[1:]

    def attribute(self) -> None:
        """Count for this engine what the process has sent since an engine last called this."""
        if not self.calls:
            return
        if self.section is None:
            for call, count in self.calls.items():
                self._attributed[call] = self._attributed.get(call, 0) + count
        else:
            sent = sum(count * nbytes for (_, nbytes, *_), count in self.calls.items())
            self._apart[self.section] = self._apart.get(self.section, 0) + sent
        _reset_unattributed()

    def enter(self, section: str | None) -> None:
        """Count what is sent from now on for ``section``."""
        if section != self.section:
            self.attribute()
            self.section = section

    @contextmanager
    def apart(self, section: str) -> Iterator[None]:
        """Around what is not part of a step: its traffic counts for the outermost ``section``."""
        before = self.section
        self.enter(before or section)
        try:
            yield
        finally:
            self.enter(before)

    def take(self) -> Mapping[str, Traffic]:
        self.attribute()
        self.calls, self._attributed = self._attributed, {}
        return super().take()

    def take_apart(self) -> Mapping[str, int]:
        """Return the bytes that were sent since the last call, but not for a step, by section."""
        apart, self._apart = self._apart, {}
        return apart


def _reset_unattributed() -> None:
    for counter in _engine_counters():
        counter.calls = {}


def _engine_counters() -> list[EngineCounter]:
    counters = getattr(comm_backend(), "_zerosync_counters", ())
    return [counter for counter in counters if isinstance(counter, EngineCounter)]


def _build(stock: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(stock)
    def build(engine: Any, *args: Any, **kwargs: Any) -> None:
        before = {counter: dict(counter.calls) for counter in _engine_counters()}
        try:
            stock(engine, *args, **kwargs)
        finally:
            for counter, calls in before.items():
                counter.calls = calls

    return build


def _of_others(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a method so that traffic of engines that are not attached, such as a reference model's, is for no step."""

    @functools.wraps(stock)
    def method(owner: Any, *args: Any, **kwargs: Any) -> Any:
        if "_zerosync_attached" in vars(owner):
            return stock(owner, *args, **kwargs)
        with ExitStack() as stack:
            for counter in _engine_counters():
                stack.enter_context(counter.apart(OTHERS))
            return stock(owner, *args, **kwargs)

    return method


class _CountingBackend:
    """Mixed into DeepSpeed's communication backend while a counter runs."""

    _zerosync_counters: list[CollectiveCounter]
    _zerosync_restore_names: Callable[[], None]

    def _zerosync_count_sent(self, tensor: torch.Tensor, to: int, process_group: Any) -> None:
        """Count a message that another thread will send."""
        for counter in self._zerosync_counters:
            counter._add("isend", tensor.nbytes, process_group, to)


def _counted(name: str, kind: _Kind) -> Callable[..., Any]:
    def argument(args: tuple[Any, ...], kwargs: dict[str, Any], argument_name: str, position: int) -> Any:
        return args[position] if position < len(args) else kwargs.get(argument_name)

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        group = argument(args, kwargs, "group", kind.group_position)
        size = dist.get_world_size(group)
        if size < 0:  # this rank is not in the group, and sends nothing
            return getattr(super(_CountingBackend, self), name)(*args, **kwargs)
        payload = argument(args, kwargs, kind.payload, kind.position)
        tensors: Sequence[torch.Tensor] = [payload] if isinstance(payload, torch.Tensor) else payload
        native = is_native(group, tensors[0].device) if tensors else True
        sent = (kind.passes if native else kind.passes_on_gloo) * sum(tensor.nbytes for tensor in tensors)
        if kind.to_root:
            sent *= argument(args, kwargs, "dst", 1) != dist.get_rank()
        elif not kind.to_one_rank:
            sent = sent * (size - 1) // size
        to = argument(args, kwargs, "dst", 1) if kind.to_one_rank else None
        for counter in self._zerosync_counters:
            counter._add(name, sent, group, to, kind.distinct)
        return getattr(super(_CountingBackend, self), name)(*args, **kwargs)

    return method


for _name, _kind in _KINDS.items():
    setattr(_CountingBackend, _name, _counted(_name, _kind))
