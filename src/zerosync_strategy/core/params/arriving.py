"""Parameters of stages 1 and 2 that are on their way from other ranks while the program goes on (U5).

With ``overlap_gather``, a step begins the gathers of what it has updated and returns. Until it is there, a parameter
has another class: every use that needs values waits, on the stream of the use, for the stripes that the parameter lies
in. It gets its own class back when the host sees that they are there. So each layer of the next forward waits for its
own parameters alone, and so does whatever else reads one: ``state_dict()``, an evaluation, a moving average. Not seen
is what holds a parameter's memory without the parameter: its ``.data``, taken before the step, and extensions in C++.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Protocol

import torch

from zerosync_strategy.core.comm.collectives import InFlight
from zerosync_strategy.core.comm.streams import Streams
from zerosync_strategy.core.failures.doing import Doing
from zerosync_strategy.core.params.tensor_functions import OF_ANY_VALUES


class Elements(Protocol):
    """Elements of a flat buffer."""

    first: int
    last: int


_awaited: dict[int, ArrivingParameters] = {}  # by id of a parameter that is on its way


class ArrivingParameters:
    """The gathers in flight of one engine; ``activity`` is a context around what may communicate (W4)."""

    def __init__(self, streams: Streams, activity: Callable[[str], AbstractContextManager[None]]) -> None:
        self._streams = streams
        self._activity = activity
        self._gathers: list[InFlight] = []
        self._of: dict[int, tuple[Any, list[InFlight]]] = {}  # by id of a parameter: itself, and what it waits for

    @functools.cached_property
    def _stream(self) -> Any:
        (stream,) = self._streams.make_gather_streams(1, True) or [None]
        return stream

    def launched(self, offsets: dict[Any, int], gathers: Iterable[tuple[Elements, InFlight]]) -> None:
        """Note down ``gathers`` of a flat buffer, ascending, in which parameters are at ``offsets``, ascending."""
        stripes = list(gathers)
        for _, gather in stripes:
            gather.wait_on(self._streams, self._stream)
            self._gathers.append(gather)
        index = 0
        for param, begin in offsets.items():
            while stripes[index][0].last <= begin:
                index += 1
            within = itertools.takewhile(lambda of: of[0].first < begin + param.numel(), stripes[index:])  # noqa: B023
            self._of[id(param)] = param, [gather for _, gather in within]

    def begin(self) -> None:
        """The step is over: who reads a parameter from here on waits for it."""
        for key, (param, _) in self._of.items():
            _awaited[key] = self
            self._give_class_on_the_way(param)

    @property
    def is_waiting(self) -> bool:
        """Whether some parameter may not be there on some stream."""
        return bool(self._of)

    @contextmanager
    def there(self, param: Any) -> Iterator[None]:
        """While active, one parameter has its own class, and its values on the current stream."""
        gathers = self._wait(param)
        if all(gather.is_complete for gather in gathers):
            yield
            return
        self._of[id(param)], _awaited[id(param)] = (param, gathers), self
        try:
            yield
        finally:
            if id(param) in self._of:
                self._give_class_on_the_way(param)

    def _give_class_on_the_way(self, param: Any) -> None:
        cls: Any = type(param)
        if not issubclass(cls, _OnTheWay):
            param.__class__ = _class_on_the_way(cls)

    def _wait(self, param: Any) -> list[InFlight]:
        param, gathers = self._of.pop(id(param))
        if _awaited.pop(id(param), None) is not None and isinstance(param, _OnTheWay):
            param.__class__ = type(param).__mro__[2]
        with self._activity(Doing.UPDATES):
            for gather in gathers:
                gather.wait()
        return gathers

    def wait_for_all(self) -> None:
        """Wait for all parameters: DeepSpeed is about to read or write them."""
        for param, _ in list(self._of.values()):
            self._wait(param)
        for gather in self._gathers:  # of padding alone
            gather.wait()
        self._gathers.clear()


class _OnTheWay:
    """What a parameter's class has first while the parameter is on its way."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in OF_ANY_VALUES:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        with _there(_on_the_way_in([args, kwargs])):
            return func(*args, **kwargs)

    # Both look at the class before they read.

    def __deepcopy__(self, memo: Any) -> Any:
        with _there([self]):
            return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        with _there([self]):
            return self.__reduce_ex__(protocol)


@contextmanager
def _there(params: Iterable[Any]) -> Iterator[None]:
    with ExitStack() as stack:
        for param in params:
            if isinstance(param, _OnTheWay) and (engine := _awaited.get(id(param))) is not None:
                stack.enter_context(engine.there(param))
        yield


@functools.cache
def _class_on_the_way(cls: Any) -> type:
    return type(cls.__name__, (_OnTheWay, cls), {"__module__": cls.__module__})


def _on_the_way_in(value: Any) -> Iterator[Any]:
    # Not torch's pytree: a subclass of list that it does not know would be a leaf.
    if isinstance(value, _OnTheWay):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from _on_the_way_in(each)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _on_the_way_in(each)
