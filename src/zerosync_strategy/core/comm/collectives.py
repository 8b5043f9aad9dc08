"""Asynchronous reduce-scatter and all-gather that send each byte once, on any backend.

NCCL has both. gloo's reduce-scatter is an all-reduce, which sends twice the bytes, and its all-gather and all-to-all
copy what they send. So off NCCL, ranks send each other their shards point to point, without copies.
"""

from __future__ import annotations

import functools
import hashlib
import secrets
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import _get_default_timeout

from zerosync_strategy.core.comm.journal import Exchange, Message, SentCounter, Waiting, issue, launched
from zerosync_strategy.core.engine import zero
from zerosync_strategy.core.engine.patches import replaced
from zerosync_strategy.core.engine.types import Work

_Value = TypeVar("_Value")
Allocate = Callable[[int, torch.dtype, torch.device], Tensor]
"""Returns a flat tensor of so many elements, with any values."""


class InFlight:
    """A collective in flight. Its works are waited for once.

    Args:
        finish: called once, on the stream that has waited for the works; returns the result.
        alive: kept alive until then.
        timeout: of each work. NCCL gets none: its watchdog has one, and with a timeout the host would wait instead of a
            stream. gloo's default is that of its group.
        label: its name in errors. ``exchange``: of messages, for which the host waits.

    Attributes:
        is_done: the wait has succeeded.
    """

    def __init__(
        self, works: Sequence[Work], finish: Callable[[], object], alive: object = None,
        timeout: timedelta | None = None, label: str = "", exchange: Exchange | None = None,
    ) -> None:  # fmt: skip
        self._works, self._finish, self._alive = works, finish, alive
        self._timeout, self._label, self._exchange = timeout, label, exchange
        self._result: Any = None
        self._error: Exception | None = None
        self.is_done = False

    def then(self, use: Callable[[Any], object]) -> None:
        """Apply ``use`` to the result when it is waited for; :meth:`wait` returns what that returns."""
        finish = self._finish
        self._finish = lambda: use(finish())

    def wait(self, *_: object, **__: object) -> Any:
        """Make the current stream, or without streams the host, wait for the collective; return its result.

        The options that DeepSpeed passes to works are ignored. A failed wait raises its error in each later call, so
        that a clean-up cannot hide it.
        """
        if self._error is not None:
            raise self._error
        if not self.is_done:
            try:
                with Waiting(self._label, self._exchange):
                    for work in self._works:
                        work.wait() if self._timeout is None else work.wait(self._timeout)
                self._result = self._finish()
            except Exception as error:
                self._error = error
                raise
            self.is_done = True
            self._works, self._finish, self._alive, self._exchange = (), lambda: None, None, None
        return self._result

    @property
    def is_over(self) -> bool:
        """Whether all works are complete. For gloo, that is not known of a send or receive that nobody waits for."""
        return all(work.is_completed() for work in self._works)


def is_native(process_group: ProcessGroup | None, device: torch.device) -> bool:
    """Return whether the backend of ``process_group`` for tensors on ``device`` has a reduce-scatter of its own."""
    return backend_for(process_group, device.type) not in ("gloo", None)


def backend_for(process_group: ProcessGroup | None, device_type: str) -> str | None:
    """Return the backend of ``process_group`` for tensors on devices of a type, if it has one."""
    return _backends(dist.get_backend_config(process_group)).get(device_type)


@functools.cache
def _backends(config: str) -> dict[str, str]:
    return dict(pair.split(":") for pair in config.split(","))


class Summing(NamedTuple):
    """How a reduction sums over ranks.

    Attributes:
        counter: of the engine that sends.
        ordered: sum in fp32 and in a fixed order on NCCL, too.
        tag: off NCCL, messages match only those with the same tag.
        empty: allocates the memory to receive into, off NCCL.
        label: of the reduction, for errors.
    """

    counter: SentCounter
    ordered: bool = False
    tag: int = 0
    empty: Allocate = lambda numel, dtype, device: torch.empty(numel, dtype=dtype, device=device)
    label: str = ""


def reduce_scatter(rows: Tensor, process_group: ProcessGroup, how: Summing, out: Tensor | None = None) -> InFlight:
    """Sum over the ranks of ``process_group``; rank r receives the sum of row r.

    In a fixed order, and off NCCL, each rank receives its row from every rank and adds them up.

    Args:
        rows: one row per rank, each contiguous. They must not change until the wait, which may write to them.
        out: memory for the result, used if it fits.

    Returns:
        The sum of a row, in ``out`` if its size, dtype and device fit: on NCCL in the dtype of ``rows``, else in fp32,
        added in the order of the ranks.
    """
    from deepspeed import comm

    world_size, width = rows.shape
    if out is not None and (out.device != rows.device or out.dtype != rows.dtype or len(out) != width):
        out = None
    if not is_native(process_group, rows.device):
        parts, own = dict(enumerate(rows)), rows[dist.get_rank(process_group)]
        return sum_messages(parts, own, range(world_size), process_group, how, out)
    packed = rows.contiguous()
    if how.ordered:
        received_all = torch.empty_like(packed)
        how.counter.add("all_to_all_single", packed.nbytes, process_group)
        work = comm.all_to_all_single(received_all.view(-1), packed.view(-1), group=process_group, async_op=True)
        note_launch(process_group, rows.device, how.label)
        return InFlight([work], lambda: tree_sum(received_all), alive=packed)
    result = packed.new_empty(width) if out is None else out
    how.counter.add("reduce_scatter_tensor", packed.nbytes, process_group)
    work = comm.reduce_scatter_tensor(result, packed.view(-1), group=process_group, async_op=True)
    note_launch(process_group, rows.device, how.label)
    return InFlight([work], lambda: result, alive=packed)


def all_reduce(
    tensor: Tensor, group: ProcessGroup, counter: SentCounter, op: Any = dist.ReduceOp.SUM, async_op: bool = False
) -> Any:  # fmt: skip
    """Reduce ``tensor`` over the ranks of ``group``, in place; return the work, if asynchronous."""
    from deepspeed import comm

    counter.add("all_reduce", tensor.nbytes, group)
    return comm.all_reduce(tensor, op, group, async_op)


def all_gather(
    rows: Tensor, process_group: ProcessGroup, counter: SentCounter, tag: int = 0, label: object = ""
) -> InFlight:  # fmt: skip
    """Gather ``rows``, of which rank r has the r-th, on every rank of ``process_group``; the result is the own row.

    Off NCCL, calls match only those with the same tag; others wait in vain. gloo's own all-gather would end a process
    whose call matched one of another size.
    """
    from deepspeed import comm

    rank = dist.get_rank(process_group)
    own = rows[rank]
    if not is_native(process_group, rows.device):
        messages = [(peer, (own,), (row,)) for peer, row in enumerate(rows) if peer != rank]
        return exchange(messages, process_group, counter, tag, str(label), lambda: own)
    counter.add("all_gather_into_tensor", rows.nbytes, process_group)
    work = comm.all_gather_into_tensor(rows.view(-1), own, group=process_group, async_op=True)
    note_launch(process_group, rows.device, label)
    return InFlight([work], lambda: own)


def note_launch(process_group: ProcessGroup | None, device: torch.device, label: object) -> None:
    """Record ``label`` for errors about the collective launched last, by its number in NCCL's flight recorder."""
    if backend_for(process_group, device.type) == "nccl":
        group: Any = dist.group.WORLD if process_group is None else process_group
        backend = group._get_backend(device)
        if backend.name() != "fake":  # torch's, in the place of another
            launched(group.group_name, backend._get_sequence_number_for_group(), label)


@contextmanager
def grouped(process_group: ProcessGroup, device: torch.device, label: object) -> Iterator[list[Work]]:
    """Launch the collectives that are issued inside as one group on NCCL, which may run them concurrently.

    Yields a list to which the caller appends their works. At the end it has what to wait for: on NCCL the one work of
    the group instead, if anything was launched.
    """
    works: list[Work] = []
    if backend_for(process_group, device.type) != "nccl":
        yield works
        return
    group: Any = dist.group.WORLD if process_group is None else process_group
    group._start_coalescing(device)
    try:
        yield works
    except BaseException:
        with suppress(Exception):  # an open group would hold back all later collectives of this thread
            group._end_coalescing(device)
        raise
    if (work := group._end_coalescing(device)) is not None:
        works[:] = [work]
        note_launch(process_group, device, label)


def gather_objects(value: object, process_group: ProcessGroup | None) -> list[Any]:
    """Return the ``value`` of every rank of ``process_group``, by rank. Pickled: for small and rare messages."""
    values: list[Any] = [None] * dist.get_world_size(process_group)
    dist.all_gather_object(values, value, group=process_group)
    return values


def broadcast_object(value: _Value, rank: int, process_group: ProcessGroup | None) -> _Value:
    """Return the ``value`` of ``rank``, a rank of ``process_group``. Pickled: for small and rare messages."""
    values: list[Any] = [value if dist.get_rank(process_group) == rank else None]
    source = rank if process_group is None else dist.get_global_rank(process_group, rank)
    dist.broadcast_object_list(values, src=source, group=process_group)
    return values[0]


def digest(text: str) -> list[int]:
    """Return a digest of ``text``: four words of 64 bits."""
    return list(struct.unpack("<4q", hashlib.sha256(text.encode()).digest()))


def is_alike(words: Sequence[int], process_group: ProcessGroup | None) -> bool:
    """Return whether all ranks of ``process_group`` have the same ``words`` of 64 bits. Collective."""
    extremes = largest([*words, *(~word for word in words)], process_group)
    return all(most == ~of_complements for most, of_complements in zip(extremes, extremes[len(words) :], strict=False))


def largest(words: Sequence[int], process_group: ProcessGroup | None) -> list[int]:
    """Return the elementwise maximum of ``words`` of 64 bits over the ranks of ``process_group``. Collective."""
    found = torch.tensor(words, dtype=torch.int64, device=_device_of(process_group))
    dist.all_reduce(found, op=dist.ReduceOp.MAX, group=process_group)
    return found.tolist()


def new_name(process_group: ProcessGroup) -> str:
    """Return a random name, the same on all ranks of ``process_group``. Collective."""
    (number,) = largest([secrets.randbits(62)], process_group)
    return f"{number:x}"


def gather_words(words: Sequence[int], process_group: ProcessGroup | None) -> list[list[int]]:
    """Return the ``words`` of 64 bits of each rank of ``process_group``, as many on all. Collective."""
    own = torch.tensor(words, dtype=torch.int64, device=_device_of(process_group))
    received = [torch.empty_like(own) for _ in range(dist.get_world_size(process_group))]
    dist.all_gather(received, own, group=process_group)
    return torch.stack(received).tolist()


def _device_of(process_group: ProcessGroup | None) -> torch.device:
    """Return a device whose tensors ``process_group`` can send: the CPU if possible."""
    group: Any = process_group or dist.group.WORLD
    return torch.device("cpu") if torch.device("cpu") in group._device_types else group._device_types[0]


def timeout_of(process_group: ProcessGroup | None) -> timedelta:
    """Return the timeout of ``process_group``; torch's default if its backend has none."""
    group: Any = dist.group.WORLD if process_group is None else process_group
    options = group._get_backend(group._device_types[0]).options
    return _get_default_timeout(dist.Backend(dist.get_backend(process_group))) if options is None else options._timeout


def share_timeout(process_groups: Iterable[ProcessGroup]) -> None:
    """Set the timeout of the default group, which users choose, on groups that have torch's default timeout.

    DeepSpeed makes such groups. Torch's default is 30 minutes, or 10 on NCCL.
    """
    c10d = dist.distributed_c10d
    set_timeout = getattr(c10d, "set_timeout", None) or c10d._set_pg_timeout
    of_users = timeout_of(None)
    for process_group in process_groups:
        default = _get_default_timeout(dist.Backend(dist.get_backend(process_group)))
        if timeout_of(process_group) == default != of_users:
            set_timeout(of_users, process_group)


def new_group(ranks: Sequence[int], like: ProcessGroup, device: torch.device, is_first: bool = False) -> ProcessGroup:
    """Make a process group of these global ranks for tensors on ``device``, with the timeout of the group ``like``.

    Collective among all ranks of ``like``; the groups of one call are disjoint. ``is_first``: NCCL runs its kernels
    before those of other groups.
    """
    share_timeout([like])
    backend = like._get_backend(device).name()  # alone: one for the CPU would connect all pairs of ranks
    options = None
    if is_first and backend == "nccl":
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options._timeout = timeout_of(like)
    # Torch's names are made of the number of groups that a rank knows: others may know more, and after groups were
    # destroyed a name comes again, under which the store has addresses of the old one.
    name = f"zerosync/{ranks[0]}/{new_name(like)}"
    # With a bound device, torch would split the default group's communicator, which needs a call on all its ranks.
    with (
        replaced(dist.group.WORLD, "bound_device_id", None),
        replaced(dist.distributed_c10d, "_process_group_name", lambda ranks, use_hashed_name: name),
    ):
        return dist.new_group(list(ranks), timeout_of(like), backend, options, use_local_synchronization=True)


def exchange(
    messages: Sequence[Message], process_group: ProcessGroup, counter: SentCounter, tag: int, label: str,
    finish: Callable[[], Tensor],
) -> InFlight:  # fmt: skip
    """Exchange messages with other ranks; ``finish`` returns the result."""
    counter.add_messages(messages, process_group)
    works = send_and_receive(messages, process_group, tag)
    return InFlight(works, finish, messages, timeout_of(process_group), label, issue(process_group, tag, messages))


def sum_messages(
    sent: Mapping[int, Tensor], own: Tensor, ranks: Sequence[int], process_group: ProcessGroup, how: Summing,
    out: Tensor | None,
) -> InFlight:  # fmt: skip
    """Send a row to each of ``ranks``; the result is the sum of the rows for this rank, in the order of ``ranks``.

    Args:
        sent: rows by the index of their rank in ``ranks``: flat, or tensors whose rows are contiguous.
        own: this rank's own addend, perhaps of a wider dtype; empty if it receives nothing.
        out: memory for the sum, used if it is in fp32.
    """
    number, dtype = ranks.index(dist.get_rank(process_group)), own.dtype
    if number in sent:
        dtype = sent[number].dtype
    givers = len(ranks) - 1 if own.numel() else 0
    received = list(how.empty(givers * own.numel(), dtype, own.device).view(givers, *own.shape)) if givers else []
    gathered = [*received[:number], own, *received[number:]]
    messages = [
        (rank, _flat(sent[peer]) if peer in sent else (), _flat(gathered[peer]) if givers else ())
        for peer, rank in enumerate(ranks)
        if peer != number
    ]
    return exchange(messages, process_group, how.counter, how.tag, how.label, lambda: sum_in_order(gathered, out))


def send_and_receive(
    messages: Iterable[Message], process_group: ProcessGroup, tag: int, messenger: Any = None
) -> list[Work]:
    """Issue sends and receives, except of empty tensors. DeepSpeed's messenger, the default, logs them."""
    works: list[Work] = []
    messenger = messenger or zero.messenger()
    for peer, sent, received in messages:
        rank = dist.get_global_rank(process_group, peer)
        works += [messenger.irecv(each, src=rank, group=process_group, tag=tag) for each in received if len(each)]
        works += [messenger.isend(each, dst=rank, group=process_group, tag=tag) for each in sent if len(each)]
    return works


def _flat(tensor: Tensor) -> Sequence[Tensor]:
    return (tensor,) if tensor.dim() == 1 else tensor.unbind(0)


def sum_in_order(rows: Sequence[Tensor], out: Tensor | None) -> Tensor:
    """Return the sum of ``rows`` in fp32, in their order, the same in every run; in ``out`` if that is fp32."""
    if len(rows) == 1:
        return rows[0].float()
    if out is not None and out.dtype is torch.float32:
        if torch.float32 in (rows[0].dtype, rows[1].dtype):
            total = torch.add(rows[0], rows[1], out=out)
        else:  # which would be rounded before it is written
            total = out.copy_(rows[0]).add_(rows[1])
    else:
        total = rows[0].float() + rows[1]
    for row in rows[2:]:
        total += row
    return total


def tree_sum(rows: Tensor) -> Tensor:
    """Return the sum of ``rows`` in fp32, in an order that their number alone decides, in log2(W) additions.

    ``rows`` are written to if they are in fp32, or else one copy of them is.
    """
    rows, left = rows.float(), len(rows)
    while left > 1:
        half = (left + 1) // 2
        rows[: left - half] += rows[half:left]
        left = half
    return rows[0].clone()  # which keeps no memory of the others
