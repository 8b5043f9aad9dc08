"""What is said and counted of gathers of ZeRO-3 parameters, and the bytes that are unsharded (E1)."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch

from zerosync_strategy.core.comm.traffic import EngineCounter
from zerosync_strategy.core.engine.interpose import replaced
from zerosync_strategy.core.engine.parameter import Record
from zerosync_strategy.core.failures.doing import Doing


class UnshardedBytes:
    """Counts bytes of unsharded parameters, and of values for readers until nothing refers to them; the most at once.

    ``watch`` is called before bytes are added.
    """

    def __init__(self) -> None:
        self.watch: Callable[[], None] | None = None
        self._now = self.peak = 0
        self._freed: deque[int] = deque()  # by whichever thread drops a tensor last; a thread of gloo may be late

    @property
    def now(self) -> int:
        """Bytes that are unsharded, or on their way, now."""
        while self._freed:
            self._now -= self._freed.popleft()
        return self._now

    def add(self, nbytes: int) -> None:
        """Count bytes that are being gathered; fewer than none: that are resharded."""
        if self.watch is not None and nbytes > 0:
            self.watch()
        self._now = self.now + nbytes
        self.peak = max(self.peak, self._now)

    def free_with(self, tensor: torch.Tensor, nbytes: int) -> None:
        """Count ``nbytes`` of those added before until the memory of ``tensor`` is free."""
        weakref.finalize(tensor.untyped_storage(), self._freed.append, nbytes)

    def reset_peak(self) -> None:
        self.peak = self.now


def arrived(records: Iterable[Record]) -> None:
    """Wait for those of ``records`` that are on their way."""
    for record in records:
        if record.gather is not None and not record.gather.is_done:
            record.gather.wait()


class GatherActivity(NamedTuple):
    """What a rank does that gathers parameters with these ids. Keeps no engine: it is remembered for a while."""

    names: Mapping[int, str]
    ids: tuple[int, ...]
    ranks: str
    reader: str = ""

    @property
    def doing(self) -> Doing:
        return Doing.GATHER

    @property
    def module(self) -> str:
        """The module that has the first parameter."""
        return self.names.get(self.ids[0], "").rpartition(".")[0]

    def __str__(self) -> str:
        reader = f" for {self.reader}" if self.reader else ""
        return f"the gather of {listed(self.names, self.ids)} over the ranks {self.ranks}{reader}"


def listed(names: Mapping[int, str], ids: Sequence[int]) -> str:
    """Return the names of the parameters with these ``ids``, the first three at most."""
    more = f" and {len(ids) - 3} more" if len(ids) > 3 else ""
    return ", ".join(name_of(names, param_id) for param_id in ids[:3]) + more


def name_of(names: Mapping[int, str], param_id: int) -> str:
    """Return the name of a parameter, for errors."""
    return repr(names.get(param_id, f"parameter {param_id}"))


NO_GRADIENTS = "forwards without gradients"
"""The section of what modules gather where there is no backward to come, as to evaluate."""
CONTEXTS = "GatheredParameters"
"""The section of what a program gathers itself, as to generate."""


class GatherCount:
    """Counts, in the records of parameters, how often modules and readers have them gathered for steps.

    ``counters`` are of the engines that gather here: of a module, or of parts of one.
    """

    def __init__(self) -> None:
        self.counters: list[EngineCounter] = []
        self._is_for_step = True
        self._in_context = False

    def add(self, params: Iterable[Any]) -> None:
        """``params`` are gathered for modules, or for readers whom no hook serves."""
        if self._is_for_step:
            for param in params:
                param._zerosync_record.gathers += 1

    def issued(self) -> None:
        """A gather was sent by the engine of this module; where it has several, their gradients tell by which."""
        if len(self.counters) == 1 and not self.counters[0].is_alone:
            self.counters[0].attribute()

    @contextmanager
    def without_gradients(self) -> Iterator[None]:
        """Around a forward without gradients: what modules gather in it is not for a step."""
        with replaced(self, "_is_for_step", False), self.apart(NO_GRADIENTS):
            yield

    def in_context(self) -> AbstractContextManager[None]:
        """Around the beginning of a ``GatheredParameters`` context, which may find what it gathers held."""
        return replaced(self, "_in_context", True)

    def of_context(self) -> AbstractContextManager[None]:
        """Around what is gathered for no module, and for no step where a context begins."""
        return self.apart(CONTEXTS) if self._in_context else nullcontext()

    @contextmanager
    def apart(self, section: str) -> Iterator[None]:
        """Around what is sent for ``section``, and not for a step."""
        with ExitStack() as stack:
            for counter in self.counters:
                stack.enter_context(counter.apart(section))
            yield
