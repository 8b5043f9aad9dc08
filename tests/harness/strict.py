"""A communicator with NCCL's rules, for ranks on the CPU or on one GPU: what gloo forgives is an error here.

It takes the calls of torch.distributed before a backend sees them, and carries the data itself:

- Calls over a process group match by their order alone. Where two ranks' calls in one place differ in kind, dtype,
  size, root or operation, each rank raises, and names both calls and their lines. A tag is an error: NCCL ignores it.
- A call returns at once and does nothing: its outputs hold NaN (or the largest integer) until somebody has waited for
  its work, and its inputs must not have changed by then.
- Point to point calls match by their order between the two ranks.
- Calls of an open group (``_start_coalescing``) are launched where it ends, and have one work, of the group: who waits
  for another, or puts two process groups into one, gets an error.
- Torch's flight recorder has the calls as it has NCCL's, complete where all ranks have come to them. Of a group, all
  entries have one number, and the last one alone, which is the group's, is ever complete.
- The calls of a rank over all its groups are in an order. If the orders of all ranks together have a circle, a run with
  blocking communicators may stop in it: the end of :func:`strict` raises, and names the calls.

What a rank sends is a file in a directory that all ranks share, so that no rank waits for another but in ``wait()``.
"""

from __future__ import annotations

import itertools
import os
import pickle
import sys
import tempfile
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PythonCallbackWork, Work

from tests.harness.modes import EagerMode
from tests.harness.racecheck import Simulation, recorder

TIMEOUT = 100.0  # seconds that a wait takes before it says who is missing
_POLL = 0.0005
_NOT_OURS = (
    "/torch/",
    "/deepspeed/comm/",
    "/deepspeed/utils/",
    "contextlib.py",
    "/racecheck/",
    "/harness/strict.py",
    "/harness/simulated.py",
)


class StrictError(RuntimeError):
    """Calls that NCCL would not match, or would match wrongly."""


@dataclass
class _Call:
    """One call of one rank.

    Attributes:
        key: its place: that of the matching calls of other ranks.
        ranks: of the process group, by their global numbers.
        kind: what all ranks must agree on, as words.
        splits: for an all-to-all, the elements that this rank sends to each and receives from each.
        site: where it was called.
        inputs, outputs: its tensors.
        sent: the values of the inputs at the call.
        finish: computes from what every rank has sent, by rank, what the outputs become.
    """

    key: str
    ranks: list[int]
    kind: str
    site: str
    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor]
    finish: Callable[[list[list[torch.Tensor]]], list[torch.Tensor]]
    splits: tuple[list[int], list[int]] | None = None
    sent: list[torch.Tensor] = field(default_factory=list)
    done: bool = False
    grouped: bool = False
    group: str = ""

    def __str__(self) -> str:
        return f"{self.kind} at {self.site}"


class StrictCommunicator(EagerMode):
    """The communicator of one rank. See the top of this file.

    Args:
        directory: that all ranks share.
    """

    supports_higher_order_operators = True

    sees_zerosync = True

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self._directory = directory
        self._rank = dist.get_rank()
        self._calls: dict[str, int] = defaultdict(int)  # by place in which calls match, how many there were
        self._launches: dict[str, int] = defaultdict(int)  # likewise; a group is one
        self._log: list[tuple[str, str]] = []  # of the calls in order: their keys, and what they are
        # Of the last calls: torch's entry, the key, if it may be complete, and the ranks. Not the call: it has tensors.
        self._recorded: deque[tuple[dict[str, Any], str, list[int]]] = deque(maxlen=1000)
        self._group: list[_Call] | None = None  # the calls of an open group
        self.count: dict[str, int] = defaultdict(int)  # calls by kind of collective, and launches

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "namespace", "") != "c10d":
            return func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("c10d::")
        given = dict(zip([argument.name for argument in func._schema.arguments], args, strict=False)) | (kwargs or {})
        handler = _HANDLERS.get(name.strip("_"))
        if handler is None:
            raise StrictError(f"{name} at {_site()}: the strict communicator does not know this call.")
        group = dist.ProcessGroup.unbox(given.pop("process_group"))
        if given.get("tag"):
            raise StrictError(
                f"{name} at {_site()} has the tag {given['tag']}; NCCL matches calls by their order alone."
            )
        ranks = dist.get_process_group_ranks(group)
        self.count[name.strip("_")] += 1
        call = handler(_Given(name.strip("_"), given, ranks, ranks.index(self._rank)))
        # With the ranks: groups without a rank in common may have one name.
        place = f"{group.group_name} of {'-'.join(map(str, call.ranks))}"
        call.key = f"{place}/{self._calls[place]}".replace("/", "_").replace(" ", "-")
        self._calls[place] += 1
        if not self._group:
            self._launches[place] += 1
        self._record(name, group, self._launches[place], call, "" if self._group is not None else call.key)
        if self._group is None:
            self._launch([call])
        else:
            call.group, call.sent = group.group_name, [tensor.detach().clone() for tensor in call.inputs]
            self._group.append(call)
        boxed = Work.boxed(PythonCallbackWork(lambda timeout: self._complete(call)))
        if name == "monitored_barrier_":
            return self._complete(call) and None
        returns = len(func._schema.returns)
        return boxed if returns == 1 else (given[func._schema.arguments[0].name], boxed)

    def _record(self, name: str, group: Any, number: int, call: _Call, key: str) -> None:
        frames, frame = [], sys._getframe(2)
        while frame is not None:
            frames.append({"filename": frame.f_code.co_filename, "line": frame.f_lineno, "name": frame.f_code.co_name})
            frame = frame.f_back  # type: ignore[assignment]
        entry = {
            "process_group": (group.group_name, ""), "collective_seq_id": number, "profiling_name": f"nccl:{name}",
            "input_sizes": [list(tensor.shape) for tensor in call.inputs], "frames": frames, "retired": False,
            "is_p2p": name.strip("_") in ("send", "recv"), "time_created_ns": time.time_ns(),
        }  # fmt: skip
        self._recorded.append((entry, key, call.ranks))

    def trace(self) -> bytes:
        """Return the last calls as torch's flight recorder has those of NCCL: complete where all ranks have come."""

        def state_of(key: str, ranks: list[int]) -> str:
            came = key and all((self._directory / f"{key}.{rank}").exists() for rank in ranks)
            return "completed" if came else "scheduled"

        states = [(entry, state_of(key, ranks)) for entry, key, ranks in list(self._recorded)]
        return pickle.dumps({"entries": [entry | {"state": state} for entry, state in states]})

    def last_number(self, backend: object = None) -> int:
        """Return the number of the last call in its group."""
        return self._recorded[-1][0]["collective_seq_id"] if self._recorded else 0

    def begin_group(self) -> None:
        """Calls are those of one group until :meth:`end_group`."""
        if self._group is not None:
            raise StrictError(f"A group of calls begins inside of another, at {_site()}.")
        self._group = []
        if (simulation := _simulation()) is not None:
            simulation.begin_group()

    def end_group(self, group: Any) -> Any:
        """Launch the calls of the group, and return their work."""
        calls, self._group = self._group, None
        assert calls is not None
        for place, call in enumerate(calls, start=1):
            call.kind += f", {place} of {len(calls)} in a group"
        if calls:
            self._record("coalesced", group, self.last_number(), calls[-1], calls[-1].key)
        simulation = _simulation()
        with nullcontext() if simulation is None else simulation.silent():
            for call in calls:
                if not all(map(_same, call.inputs, call.sent)):
                    raise StrictError(f"{call}: its input was changed before the group was launched.")
            self._launch(calls)
        for call in calls:
            call.grouped = True
        work = PythonCallbackWork(lambda timeout: all([self._complete(call, True) for call in calls]))
        work = work if simulation is None else simulation.end_group(group, work)
        if strangers := [call for call in calls if call.group != group.group_name]:
            raise StrictError(f"{strangers[0]} is in a group of calls over another process group.")
        return work

    def _launch(self, calls: list[_Call]) -> None:
        self.count["launches"] += 1
        for call in calls:
            self._send(call)

    def _send(self, call: _Call) -> None:
        self._log.append((call.key, str(call)))
        call.sent = [tensor.detach().clone() for tensor in call.inputs]
        values = [(tensor.dtype, tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy()) for tensor in call.sent]
        path = self._directory / f"{call.key}.{self._rank}"
        with open(f"{path}.part", "wb") as file:
            pickle.dump((call.kind, call.site, call.splits, values), file)
        os.replace(f"{path}.part", path)
        for output in call.outputs:
            _poison(output)
        if call.inputs is not call.outputs:  # what is gathered in place may still be read
            for tensor, values in zip(call.inputs, call.sent, strict=True):
                tensor.data.copy_(values)

    def _complete(self, call: _Call, as_group: bool = False) -> bool:
        if (call.grouped or self._group is not None) and not as_group:
            raise StrictError(f"{call} is one of a group, which has a work of its own: wait for that.")
        if call.done:
            return True
        call.done = True
        received = [self._receive(call, rank) for rank in call.ranks]
        written = {tensor.untyped_storage()._cdata for tensor in call.outputs}
        for tensor, before in zip(call.inputs, call.sent, strict=True):
            if tensor.untyped_storage()._cdata not in written and not _same(tensor, before):
                raise StrictError(f"{call}: its input was changed before anybody had waited for it.")
        for output, value in zip(call.outputs, call.finish(received), strict=True):
            if output.shape != value.shape:
                value = value.reshape(output.shape)
            with torch.no_grad():
                output.data.copy_(value)
        return True

    def _receive(self, call: _Call, rank: int) -> list[torch.Tensor]:
        path = self._directory / f"{call.key}.{rank}"
        deadline = time.monotonic() + TIMEOUT
        while not path.exists():
            if time.monotonic() > deadline:
                raise StrictError(f"{call}: rank {rank} has not come to this call in {TIMEOUT:g} s.")
            time.sleep(_POLL)
        kind, site, splits, values = pickle.loads(path.read_bytes())
        if kind != call.kind:
            raise StrictError(
                f"Rank {self._rank} calls {call}, and rank {rank} in the same place {kind} at {site}. Over one process"
                " group all ranks call the same, in the same order."
            )
        if call.splits is not None and splits is not None:
            own, other = call.ranks.index(self._rank), call.ranks.index(rank)
            if call.splits[1][other] != splits[0][own]:
                raise StrictError(
                    f"{call}: rank {rank} sends {splits[0][own]} elements, and rank {self._rank} expects"
                    f" {call.splits[1][other]}."
                )
        return [torch.from_numpy(raw).view(dtype) for dtype, raw in values]

    def check_order(self) -> None:
        """Compare the order of the calls over all groups between all ranks, each of which calls this at its end."""
        path = self._directory / f"log.{self._rank}"
        Path(f"{path}.part").write_bytes(pickle.dumps(self._log))
        os.replace(f"{path}.part", path)
        logs, deadline = [], time.monotonic() + TIMEOUT
        for rank in range(dist.get_world_size()):
            other = self._directory / f"log.{rank}"
            while not other.exists():
                if time.monotonic() > deadline:
                    raise StrictError(f"Rank {rank} has not come to the end of its program in {TIMEOUT:g} s.")
                time.sleep(_POLL)
            logs.append(pickle.loads(other.read_bytes()))
        if circle := _circle(logs):
            calls = {key: words for log in logs for key, words in log}
            raise StrictError(
                "Ranks call collectives of several process groups in different orders, and may wait for one another"
                " in a circle: " + ", then ".join(f"{calls[key]} ({key})" for key in circle)
            )


def _simulation() -> Simulation | None:
    simulation = recorder.running()
    return simulation if isinstance(simulation, Simulation) else None


def _circle(logs: list[list[tuple[str, str]]]) -> list[str]:
    """Return calls that come one after the other on some rank, the first after the last too; empty: there are none."""
    after: dict[str, set[str]] = defaultdict(set)
    before: dict[str, int] = defaultdict(int)
    for log in logs:
        for (first, _), (second, _) in itertools.pairwise(log):
            if second not in after[first]:
                after[first].add(second)
                before[second] += 1
    ready = [key for key in list(after) if not before[key]]
    while ready:
        for key in after.pop(ready.pop(), ()):
            before[key] -= 1
            if not before[key]:
                ready.append(key)
    left = {key for key in after if before[key]}
    if not left:
        return []
    path = [min(left)]
    while len(path) == len(set(path)):
        path.append(min(key for key in after[path[-1]] if key in left and _leads_back(key, left, after)))
    return path[path.index(path[-1]) : -1]


def _leads_back(key: str, left: set[str], after: dict[str, set[str]]) -> bool:
    seen: set[str] = set()
    pending = [key]
    while pending:
        for following in after[pending.pop()] & left - seen:
            if following == key:
                return True
            seen.add(following)
            pending.append(following)
    return False


# ---- what each call does ---------------------------------------------------------------------------------------------


@dataclass
class _Given:
    """The arguments of a call: its name, arguments by name, the ranks of its group, and this rank's place there."""

    name: str
    arguments: dict[str, Any]
    ranks: list[int]
    rank: int

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def call(
        self, inputs: list[torch.Tensor], outputs: list[torch.Tensor], finish: Callable[..., Any], *facts: object,
        ranks: list[int] | None = None, sizes: list[torch.Tensor] | None = None, **more: Any,
    ) -> _Call:  # fmt: skip
        tensors = inputs if sizes is None else sizes
        what = [f"{tensor.dtype} x {tensor.numel()}".removeprefix("torch.") for tensor in tensors]
        kind = " ".join([self.name, *what, *map(str, facts)])
        return _Call("", ranks or self.ranks, kind, _site(), inputs, outputs, finish, **more)

    @property
    def op(self) -> str:
        return _OPERATIONS[int(self["reduce_op"].op())]


_OPERATIONS = {int(value): name for name, value in dist.ReduceOp.RedOpType.__members__.items()}


def _reduced(op: str, values: list[torch.Tensor]) -> torch.Tensor:
    """Reduce over the ranks: sums and means in fp32, in the order of the ranks."""
    stacked = torch.stack(values)
    if op in ("SUM", "AVG"):
        wide = stacked.float() if stacked.is_floating_point() and stacked.element_size() < 4 else stacked
        total = wide[0].clone()
        for row in wide[1:]:
            total += row
        return (total / len(values) if op == "AVG" else total).to(stacked.dtype)
    reduce = {"MAX": torch.amax, "MIN": torch.amin, "PRODUCT": torch.prod}.get(op)
    if reduce is None:
        raise StrictError(f"the strict communicator has no {op}")
    return reduce(stacked, 0)


def _allreduce(given: _Given) -> _Call:
    tensors, op = given["tensors"], given.op

    def finish(received: list[list[torch.Tensor]]) -> list[torch.Tensor]:
        return [_reduced(op, list(of_ranks)) for of_ranks in zip(*received, strict=True)]

    return given.call(tensors, tensors, finish, op)


def _reduce(given: _Given) -> _Call:
    tensors, op, root = given["tensors"], given.op, given["root_rank"]

    def finish(received: list[list[torch.Tensor]]) -> list[torch.Tensor]:
        return [_reduced(op, list(of_ranks)) for of_ranks in zip(*received, strict=True)]

    outputs = tensors if given.rank == root else []
    return given.call(tensors, outputs, lambda received: finish(received)[: len(outputs)], op, f"to {root}")


def _broadcast(given: _Given) -> _Call:
    tensors, root = given["tensors"], given["root_rank"]
    sends = given.rank == root
    return given.call(
        tensors if sends else [], [] if sends else tensors, lambda received: [] if sends else received[root],
        f"from {root}", sizes=tensors,
    )  # fmt: skip


def _allgather_base(given: _Given) -> _Call:
    source, target = given["input_tensor"], given["output_tensor"]
    return given.call([source], [target], lambda received: [torch.cat([values[0] for values in received])])


def _allgather(given: _Given) -> _Call:
    (source,), (targets,) = given["input_tensors"], given["output_tensors"]
    return given.call([source], targets, lambda received: [values[0] for values in received])


def _allgather_into_tensor_coalesced(given: _Given) -> _Call:
    def finish(received: list[list[torch.Tensor]]) -> list[torch.Tensor]:
        return [torch.cat(of_ranks) for of_ranks in zip(*received, strict=True)]

    return given.call(given["inputs"], given["outputs"], finish)


def _reduce_scatter_base(given: _Given) -> _Call:
    source, target, op = given["input_tensor"], given["output_tensor"], given.op

    def finish(received: list[list[torch.Tensor]]) -> list[torch.Tensor]:
        return [_reduced(op, [values[0].chunk(len(received))[given.rank] for values in received])]

    return given.call([source], [target], finish, op)


def _reduce_scatter(given: _Given) -> _Call:
    (sources,), (target,), op = given["input_tensors"], given["output_tensors"], given.op
    return given.call(
        sources, [target], lambda received: [_reduced(op, [values[given.rank] for values in received])], op
    )


def _reduce_scatter_tensor_coalesced(given: _Given) -> _Call:
    op = given.op

    def finish(received: list[list[torch.Tensor]]) -> list[torch.Tensor]:
        chunks = (
            [values.chunk(len(received))[given.rank] for values in of_ranks] for of_ranks in zip(*received, strict=True)
        )
        return [_reduced(op, of_ranks) for of_ranks in chunks]

    return given.call(given["inputs"], given["outputs"], finish, op)


def _alltoall_base(given: _Given) -> _Call:
    source, target, count = given["input"], given["output"], len(given.ranks)

    def splits(of: torch.Tensor, sizes: list[int]) -> list[int]:
        row = of.numel() // len(of) if len(of) else 0
        return [size * row for size in sizes] if sizes else [of.numel() // count] * count

    sent, expected = splits(source, given["input_split_sizes"]), splits(target, given["output_split_sizes"])

    def finish(received: list[list[torch.Tensor]]) -> list[torch.Tensor]:
        return [torch.cat([parts[given.rank] for parts in received])]

    # One tensor for each rank, so that what a rank receives can be told from what it does not.
    rows = list(source.reshape(-1).split(sent))
    return given.call(rows, [target], finish, source.dtype, sizes=[], splits=(sent, expected))


def _alltoall(given: _Given) -> _Call:
    sources, targets = given["input_tensors"], given["output_tensors"]
    sizes = [source.numel() for source in sources], [target.numel() for target in targets]
    return given.call(
        sources, targets, lambda received: [values[given.rank] for values in received], sources[0].dtype, sizes=[],
        splits=sizes,
    )  # fmt: skip


def _gather(given: _Given) -> _Call:
    (source,), root = given["input_tensors"], given["root_rank"]
    targets = given["output_tensors"][0] if given.rank == root else []
    return given.call(
        [source], targets, lambda received: [values[0] for values in received][: len(targets)], f"to {root}"
    )


def _scatter(given: _Given) -> _Call:
    (target,), root = given["output_tensors"], given["root_rank"]
    sources = given["input_tensors"][0] if given.rank == root else []
    return given.call(sources, [target], lambda received: [received[root][given.rank]], f"from {root}", sizes=[target])


def _barrier(given: _Given) -> _Call:
    return given.call([], [], lambda received: [])


def _send(given: _Given) -> _Call:
    peer, own = given.ranks[given["dst"]], given.ranks[given.rank]
    given.name = "point to point"
    return given.call(given["tensors"], [], lambda received: [], f"from {own} to {peer}", ranks=sorted((own, peer)))


def _recv(given: _Given) -> _Call:
    peer, own = given.ranks[given["src"]], given.ranks[given.rank]
    given.name, pair = "point to point", sorted((own, peer))
    return given.call(
        [], given["tensors"], lambda received: received[pair.index(peer)], f"from {peer} to {own}",
        ranks=pair, sizes=given["tensors"],
    )  # fmt: skip


_HANDLERS: dict[str, Callable[[_Given], _Call]] = {
    "allreduce": _allreduce,
    "allreduce_coalesced": _allreduce,
    "reduce": _reduce,
    "broadcast": _broadcast,
    "allgather_base": _allgather_base,
    "allgather": _allgather,
    "allgather_into_tensor_coalesced": _allgather_into_tensor_coalesced,
    "reduce_scatter_base": _reduce_scatter_base,
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter_tensor_coalesced": _reduce_scatter_tensor_coalesced,
    "alltoall_base": _alltoall_base,
    "alltoall": _alltoall,
    "gather": _gather,
    "scatter": _scatter,
    "barrier": _barrier,
    "monitored_barrier": _barrier,
    "send": _send,
    "recv": _recv,
}


# ---- tensors ---------------------------------------------------------------------------------------------------------


def _poison(tensor: torch.Tensor) -> None:
    with torch.no_grad():
        if tensor.is_floating_point() or tensor.is_complex():
            tensor.data.fill_(torch.nan)
        elif tensor.dtype is not torch.bool:
            tensor.data.fill_(torch.iinfo(tensor.dtype).max)


def _same(tensor: torch.Tensor, before: torch.Tensor) -> bool:
    now, then = (each.detach().contiguous().view(-1).view(torch.uint8) for each in (tensor, before))
    return torch.equal(now, then)


def _site() -> str:
    """The innermost two frames outside of torch and of layers of communication."""
    frame, places = sys._getframe(1), []
    while frame is not None and len(places) < 2:
        path = frame.f_code.co_filename
        if not any(part in path for part in _NOT_OURS):
            places.append(f"{path.rsplit('/', 1)[-1]}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back
    return " < ".join(places)


_running: StrictCommunicator | None = None
_numbers = itertools.count()  # of the communicators of this rank, as of all others


@contextmanager
def strict() -> Iterator[StrictCommunicator]:
    """Let all process groups of this rank have NCCL's rules, and be called ``nccl``. All ranks enter and leave it.

    Inside of another, as on the simulated device, it is that one.

    Raises:
        StrictError: see the top of this file.
    """
    global _running
    if _running is not None:
        yield _running
        return
    store = dist.distributed_c10d._get_default_store()
    number = next(_numbers)
    if dist.get_rank() == 0:
        store.set(f"strict {number}", tempfile.mkdtemp(prefix="strict-"))
    communicator = StrictCommunicator(Path(store.get(f"strict {number}").decode()))
    named = {
        (dist, "get_backend"): lambda group=None: dist.Backend("nccl"),
        (dist, "get_backend_config"): lambda group=None: "cpu:nccl,cuda:nccl",
        (torch.cuda.nccl, "version"): lambda: (),  # which torch tells when a collective raises
        (torch._C._distributed_c10d, "_dump_nccl_trace"): communicator.trace,
        (torch._C._distributed_c10d, "_dump_fr_trace"): lambda: pickle.dumps({}),
        (torch._C._distributed_c10d.Backend, "_get_sequence_number_for_group"): communicator.last_number,
        (dist.ProcessGroup, "_start_coalescing"): lambda group, device: communicator.begin_group(),
        (dist.ProcessGroup, "_end_coalescing"): lambda group, device: communicator.end_group(group),
    }
    start = recorder.Recorder.start

    def start_above(checker: recorder.Recorder) -> None:
        start(checker)
        # It hands no call on: a checker that starts later sees collectives only above it.
        recorder.take_out(communicator)
        recorder.put_below(communicator)

    with ExitStack() as stack:
        for (module, name), function in named.items():
            stack.enter_context(mock.patch.object(module, name, function, create=True))
        stack.enter_context(mock.patch.object(recorder.Recorder, "start", start_above))
        recorder.put_below(communicator)
        stack.callback(recorder.take_out, communicator)
        _running = communicator
        try:
            yield communicator
        finally:
            _running = None
        communicator.check_order()
