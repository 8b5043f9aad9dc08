"""Tells the checker of operators, collectives and memory, for simulated streams and for CUDA's.

A subclass determines the stream of each operation, and the order between streams: :mod:`device` and :mod:`simulation`
simulate both, :mod:`cuda` follows the real ones.
"""

from __future__ import annotations

import re
import sys
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from types import FrameType
from typing import Any

import torch
from torch import overrides
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils import _python_dispatch
from typing_extensions import Self

from tests.harness.modes import EagerMode
from tests.harness.racecheck.allocator import Allocator
from tests.harness.racecheck.checker import Block, Checker, Clock, Finding, Operation, Timeline

# Operators by name, where the schema does not tell what they do: some only allocate, some copy a value to the host.
_ALLOCATES = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "lift_fresh"}
_READS_BACK = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "unique", "_unique2"}
_COPIES = {"copy_", "_to_copy", "_foreach_copy_"}
_TOUCHES_NOTHING = {"record_stream", "set_", "resize_", "is_same_size", "is_pinned", "sym_size", "sym_numel"}
# The paths of frames that a site leaves out: torch, and layers of communication and tracing.
_LAYERS = re.compile(r"/torch/|/deepspeed/comm/|/deepspeed/utils/nvtx|contextlib\.py|/harness/racecheck/")


_running: Recorder | None = None


def running() -> Recorder | None:
    """The recorder between its start and its stop, if there is one."""
    return _running


class Recorder(ABC):
    """Records the device operations of this thread, and of the backwards that it calls, for a checker.

    Attributes:
        checker: holds the findings.
        allocator: counts memory.
        operations: the operations in the order of their issue, each with its timeline's clock at that time.
        host_waits: where the host waited for the device, in order: for what, and the line.
    """

    def __init__(self) -> None:
        self.checker = Checker()
        self.allocator = Allocator(self.checker.host)
        self.operations: list[tuple[Operation, Clock]] = []
        self.host_waits: list[str] = []
        self._blocks: dict[int, tuple[Block, Any]] = {}  # by storage, with a weak reference to it
        self._silent = 0
        self._undo: list[Callable[[], Any]] = []
        self._lock = threading.RLock()  # on CUDA, the threads of a backward and callers of the allocator enter at once

    @property
    def findings(self) -> list[Finding]:
        """Each pair of accesses that nothing orders, once."""
        return list(self.checker.findings.values())

    def start(self) -> None:
        """Record from here on what this thread runs.

        Raises:
            RuntimeError: another recorder is running.
        """
        global _running
        if _running is not None:
            raise RuntimeError("The race checker runs already in this process; there can be one at a time.")
        _running = self
        try:
            self._begin()
            self._follow_resizing()
            for mode in (self._nodes(), Operators(self)):
                put_below(mode)
                self._undo.append(partial(take_out, mode))
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Undo :meth:`start`."""
        global _running
        while self._undo:
            self._undo.pop()()
        self._blocks.clear()
        _running = None

    @contextmanager
    def recording(self) -> Iterator[Self]:
        """Around what is to be recorded."""
        self.start()
        try:
            yield self
        finally:
            self.stop()

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """Replace an attribute until the stop."""
        stock = vars(owner).get(name)  # absent if it is inherited
        setattr(owner, name, value)
        self._undo.append(partial(delattr, owner, name) if stock is None else partial(setattr, owner, name, stock))

    @contextmanager
    def silent(self) -> Iterator[None]:
        """Ignore operators that run inside. Collectives are recorded all the same."""
        self._silent += 1
        try:
            yield
        finally:
            self._silent -= 1

    # ---- what differs between the devices ----------------------------------------------------------------------------

    @abstractmethod
    def _begin(self) -> None:
        """Start to follow streams and events, and append to ``_undo`` what stops it."""

    @abstractmethod
    def _nodes(self) -> TorchFunctionMode:
        """The mode that follows autograd on this device."""

    @property
    @abstractmethod
    def current_timeline(self) -> Timeline:
        """The current stream."""

    @property
    @abstractmethod
    def default_timeline(self) -> Timeline:
        """The default stream. Memory that was allocated before the start counts as allocated on it."""

    @abstractmethod
    def is_host_memory(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` lies in memory of the host."""

    @abstractmethod
    def runs_on_host(self, inputs: list[torch.Tensor], new: list[torch.Tensor]) -> bool:
        """Whether an operator with arguments ``inputs`` and newly allocated results ``new`` ran on the host."""

    @abstractmethod
    def launch(self, collective: Callable[[], Any], issue: Callable[..., None], tensors: list[torch.Tensor]) -> Any:
        """Run ``collective``, which uses ``tensors``, and return its result.

        At its start, call ``issue`` with its timeline and maybe a name.
        """

    # ---- memory ------------------------------------------------------------------------------------------------------

    def block(self, tensor: torch.Tensor, *, new: bool = False) -> Block:
        """The block of the tensor's storage, which lives until the storage is freed.

        Args:
            new: an operator has just allocated the storage.
        """
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._blocks:
            nbytes = storage.nbytes()
            if self.is_host_memory(tensor):
                block = Block(self.checker.host, nbytes)
            elif new:
                block = self._allocate(nbytes)
            else:
                block = Block(self.default_timeline, nbytes)
            self._blocks[key] = (block, weakref.ref(storage, partial(self._free, key)))
        return self._blocks[key][0]

    def _allocate(self, nbytes: int) -> Block:
        block = self.checker.allocate(self.current_timeline, nbytes)
        self.allocator.allocate(block)
        return block

    def _free(self, key: int, _: Any) -> None:
        with self._lock:
            block, _ = self._blocks.pop(key)
            if block.timeline is not self.checker.host:
                self.checker.free(block)
                self.allocator.free(block)

    def record(self, tensor: torch.Tensor, timeline: Timeline) -> None:
        """Record a use, as ``record_stream`` does: freed memory of ``tensor`` is reused only after the operations that
        ``timeline`` has at the time of the free.
        """
        with self._lock:
            self.block(tensor).recorded.append(timeline)

    def _follow_resizing(self) -> None:
        """Memory of a storage that loses all its bytes is freed, and what gets some again is allocated."""
        stock = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, nbytes: int) -> torch.UntypedStorage:
            with self._lock:
                if (had := storage.nbytes()) and not nbytes and storage._cdata in self._blocks:
                    self._free(storage._cdata, None)
                elif nbytes and not had:
                    block = self._allocate(nbytes)
                    self._blocks[storage._cdata] = block, weakref.ref(storage, partial(self._free, storage._cdata))
            return stock(storage, nbytes)

        self.replace(torch.UntypedStorage, "resize_", resize_)

    # ---- operations --------------------------------------------------------------------------------------------------

    def operator(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Issue an operator of torch that has run to the checker, with its accesses."""
        if self._silent or not hasattr(func, "_schema"):
            return  # higher-order operators have no schema
        schema = _schema(func)
        name, is_view = schema.name, schema.is_view
        if name in _TOUCHES_NOTHING or (is_view and name not in _ALLOCATES):
            return
        inputs = [(tensor, writes) for _, writes, value in schema.given(args, kwargs) for tensor in _tensors(value)]
        if any(isinstance(tensor, FakeTensor) for tensor in (*(tensor for tensor, _ in inputs), *_tensors(out))):
            return  # a compiler's fake tensors have no memory
        old = {tensor.untyped_storage()._cdata for tensor, _ in inputs}
        new = [tensor for tensor in _tensors(out) if is_view or tensor.untyped_storage()._cdata not in old]
        touched = inputs + [(tensor, True) for tensor in new]
        with self._lock:
            on_host = self.runs_on_host([tensor for tensor, _ in inputs], new)
            host_waits = name in _READS_BACK
            if not on_host and name in _COPIES:
                # A copy between host and device is synchronous by default.
                asynchronous = kwargs.get("non_blocking", len(args) > 2 and args[2])
                host_waits = not asynchronous and any(self.is_host_memory(tensor) for tensor, _ in touched)
            elif not on_host and (written := [tensor for tensor, writes in touched if writes]):
                on_host = all(map(self.is_host_memory, written))
                if on_host:  # it reads values of the device
                    self.host_waits_for(self.current_timeline.clock, name)
            for tensor in new:
                self.block(tensor, new=True)
            if name in _ALLOCATES:
                return
            timeline = self.checker.host if on_host else self.current_timeline
            self._issue(timeline, name, touched)
            if host_waits and not on_host:
                self.host_waits_for(timeline.clock, name)

    def read_back(self, tensor: torch.Tensor, name: str) -> None:
        """Issue a read of the host's, after the operations of the device that have written ``tensor``, if it is there.

        For what reads memory without an operator.
        """
        if self._silent:
            return
        with self._lock:
            if self.is_host_memory(tensor):
                self._issue(self.checker.host, name, [(tensor, False)])
            else:
                self._issue(self.current_timeline, name, [(tensor, False)])
                self.host_waits_for(self.current_timeline.clock, name)

    def host_waits_for(self, clock: Clock, what: str) -> None:
        """The host waits for the operations that ``clock`` counts, because of ``what``."""
        self.host_waits.append(f"{what} at {_site()}")
        self.checker.host.wait(clock)

    def collective(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run and issue one of torch.distributed's operators, inside :meth:`silent` too."""
        schema = _schema(func)
        name = schema.name
        # The schema does not mark written arguments. All but inputs are written.
        touched = [
            (tensor, name != "send" and not argument.startswith("input"))
            for argument, _, value in schema.given(args, kwargs)
            for tensor in _tensors(value)
        ]

        def issue(timeline: Timeline, name: str = name) -> None:
            with self._lock:
                self._issue(timeline, name, touched)

        if touched and all(self.is_host_memory(tensor) for tensor, _ in touched):
            issue(self.checker.host)
            return func(*args, **kwargs)
        return self.launch(lambda: func(*args, **kwargs), issue, [tensor for tensor, _ in touched])

    def _issue(self, timeline: Timeline, name: str, touched: Iterable[tuple[torch.Tensor, bool]]) -> Operation:
        operation = self.checker.issue(timeline, name, _site())
        self.operations.append((operation, Clock(timeline.clock)))
        for tensor, writes in touched:
            if tensor.numel() and not tensor.is_meta:
                size = tensor.element_size()
                start = tensor.storage_offset() * size
                span = 1 + sum((n - 1) * abs(step) for n, step in zip(tensor.shape, tensor.stride(), strict=True))
                self.checker.access(self.block(tensor), int(start), int(start + span * size), writes, operation)
        return operation


class Operators(EagerMode):
    """Passes every operator to a recorder. The threads of a backward inherit this mode."""

    supports_higher_order_operators = True
    sees_zerosync = True

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder = recorder

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # otherwise torch.compile falls back to eager execution under this mode

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():  # a device sees memory: what a subclass would do comes too late
            if getattr(func, "namespace", "") == "c10d":
                return self._recorder.collective(func, args, kwargs)
            out = func(*args, **kwargs)
            _count_foreach(func, args)
            self._recorder.operator(func, args, kwargs, out)
            return out


def _count_foreach(func: Any, args: tuple[Any, ...]) -> None:
    """Let tensors that an operator over lists has written have a new version.

    It leaves that to the operators that it consists of, and below a dispatch mode they do not count.
    """
    if "foreach" in func.__name__ and func._schema.is_mutable:
        for tensor in args[0]:
            if not tensor.is_inference():
                torch.autograd.graph.increment_version(tensor)


@dataclass(frozen=True)
class _Schema:
    """What an operator says of itself. `arguments`: name, and whether it is written to; in order."""

    name: str
    is_view: bool
    arguments: tuple[tuple[str, bool], ...]

    def given(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[str, bool, Any]]:
        """Name, whether it is written to, and value of each argument."""
        by_place = [(name, writes, value) for (name, writes), value in zip(self.arguments, args, strict=False)]
        return by_place + [(name, writes, kwargs[name]) for name, writes in self.arguments if name in kwargs]


@cache  # torch makes each part of a schema anew when it is asked for
def _schema(func: Any) -> _Schema:
    schema = func._schema
    aliases = [value.alias_info for value in schema.returns]
    return _Schema(
        schema.name.split("::")[1],
        any(alias is not None and not alias.is_write for alias in aliases),
        tuple((each.name, each.alias_info is not None and each.alias_info.is_write) for each in schema.arguments),
    )


def _tensors(value: Any) -> list[torch.Tensor]:
    """The strided tensors in an argument or a result. A sparse tensor has no storage of its own."""
    if isinstance(value, torch.Tensor):
        return [value] if value.layout is torch.strided else []
    return [tensor for item in value for tensor in _tensors(item)] if isinstance(value, (list, tuple)) else []


def _site() -> str:
    """The innermost two frames of this thread outside of ``_LAYERS``."""
    frame: FrameType | None = sys._getframe(1)
    places: list[str] = []
    while frame is not None and len(places) < 2:
        path = frame.f_code.co_filename
        if not _is_layer(path):
            places.append(f"{path.rsplit('/', 1)[-1]}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back
    node = None if places else torch._C._current_autograd_node()
    return " < ".join(places) if node is None else f"the backward of {node.name()}"  # in the engine's own thread


@cache
def _is_layer(path: str) -> bool:
    return _LAYERS.search(path) is not None


# ---- modes of torch that are entered and exited at any time, not as a ``with`` block ---------------------------------
#
# Torch keeps modes on a stack, and exiting a mode pops the top of it. A mode at the bottom of the stack is never on top
# when another one exits, so that any order of entries and exits is safe.


def put_below(mode: Any) -> None:
    """Enter ``mode`` at the bottom of this thread's stack, where it sees calls after all other modes."""
    others = _take_off(mode)
    for other in [mode, *others]:
        _stack_of(mode)._push_mode(other)


def take_out(mode: Any) -> None:
    """Exit ``mode``, wherever it is on the stack. Does nothing if it is not there."""
    for other in _take_off(mode):
        if other is not mode:
            _stack_of(mode)._push_mode(other)


def _stack_of(mode: Any) -> Any:
    return overrides if isinstance(mode, TorchFunctionMode) else _python_dispatch


def _take_off(mode: Any) -> list[Any]:
    """Pop all modes from the stack of ``mode``'s kind, and return them from the bottom to the top."""
    stack = _stack_of(mode)
    if stack is overrides:
        others = overrides._get_current_function_mode_stack()
    else:
        others = _python_dispatch._get_current_dispatch_mode_stack()
    for _ in others:
        stack._pop_mode()
    return others
