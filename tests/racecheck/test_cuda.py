"""CUDA's follower without CUDA: it is told what PyTorch's hooks would tell it, and sees operators as it would there."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.cuda import _gpu_trace as trace
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from tests.harness.racecheck import Finding, Kind, recorder
from tests.harness.racecheck.cuda import Follower
from tests.harness.ranks import run_ranks

pytestmark = pytest.mark.off_device("it has the one checker of the process")

DEFAULT, SIDE, NCCL = 0, 0x10, 0x20  # cudaStream_t
REGISTRIES = [value for name, value in vars(trace).items() if name.endswith("Callbacks")]


class Device(Follower):
    """A GPU of which only the order exists: CPU tensors are its memory, but for those of ``host``."""

    def __init__(self) -> None:
        super().__init__()
        self.stream, self.host = DEFAULT, set[int]()

    @property
    def current_timeline(self) -> Any:
        return self.timeline(self.stream)

    def is_host_memory(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self.host


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch._C, "_activate_gpu_trace", lambda: None)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
    before = [list(registry.callback_list) for registry in REGISTRIES]
    device = Device()
    device.start()
    try:
        yield device
    finally:
        device.stop()
    assert [registry.callback_list for registry in REGISTRIES] == before
    assert not _get_current_dispatch_mode_stack()


def wait(stream: int, other: int, event: int = 1) -> None:
    """`torch.cuda.Stream.wait_stream`, as PyTorch's hooks tell it."""
    trace.EventCreationCallbacks.fire_callbacks(event)
    trace.EventRecordCallbacks.fire_callbacks(event, other)
    trace.EventWaitCallbacks.fire_callbacks(event, stream)
    trace.EventDeletionCallbacks.fire_callbacks(event)


def kinds(device: Device) -> list[Kind]:
    return [finding.kind for finding in device.findings]


@pytest.mark.parametrize("how", ["event", "event of the host", "stream", "device", "old event", ""])
def test_two_streams(device: Device, how: str) -> None:
    buffer = torch.zeros(4)
    trace.EventRecordCallbacks.fire_callbacks(7, SIDE)
    wait(SIDE, DEFAULT)
    device.stream = SIDE
    buffer.add_(1)
    if how != "old event":
        trace.EventRecordCallbacks.fire_callbacks(7, SIDE)
    device.stream = DEFAULT
    if how in ("event", "old event"):
        trace.EventWaitCallbacks.fire_callbacks(7, DEFAULT)
    elif how == "event of the host":
        trace.EventSynchronizationCallbacks.fire_callbacks(7)
    elif how == "stream":
        trace.StreamSynchronizationCallbacks.fire_callbacks(SIDE)
    elif how == "device":
        trace.DeviceSynchronizationCallbacks.fire_callbacks()
    buffer.mul_(2)
    assert kinds(device) == ([Kind.RACE] if how in ("old event", "") else [])
    for finding in device.findings:
        assert "add_ on stream 0x10 at test_cuda.py" in str(finding) and "mul_ on default stream" in str(finding)


@pytest.mark.parametrize("recorded", [True, False])
def test_freed_memory(device: Device, recorded: bool) -> None:
    buffer = torch.zeros(4)
    wait(SIDE, DEFAULT)
    device.stream = SIDE
    total = buffer.sum()
    if recorded:
        buffer.record_stream(SimpleNamespace(cuda_stream=SIDE))
    device.stream = DEFAULT
    del buffer
    torch.ones(4)
    del total
    assert kinds(device) == ([] if recorded else [Kind.REUSE])


@pytest.mark.parametrize("blocking", [True, False])
def test_copies_to_the_host(device: Device, blocking: bool) -> None:
    pinned, value = torch.zeros(4), torch.ones(4)
    trace.DeviceSynchronizationCallbacks.fire_callbacks()
    device.host.add(pinned.untyped_storage()._cdata)
    pinned.copy_(value, non_blocking=not blocking)
    if blocking:
        trace.StreamSynchronizationCallbacks.fire_callbacks(DEFAULT)  # in mid-operator, as PyTorch does it
    pinned.add_(1)  # on the host
    assert kinds(device) == ([] if blocking else [Kind.RACE])


@pytest.mark.parametrize("by_engine", [True, False])
def test_the_engine_keeps_gradients_for_the_streams_of_their_nodes(device: Device, by_engine: bool) -> None:
    """It records them where no operator shows it; what a hook reads on a stream of its own, it does not."""

    class Node(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient * 2

    class Switch(torch.autograd.Function):
        """After its backward, the engine goes on to a node whose forward ran on the other stream."""

        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 1

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            made = gradient * 1
            wait(SIDE, DEFAULT)
            device.stream = SIDE if by_engine else DEFAULT
            return made

    def reads(grads: Any) -> None:
        device.stream = SIDE
        grads[0].mul(1)
        device.stream = SIDE if by_engine else DEFAULT

    weight = torch.ones(4, requires_grad=True)
    node = Node.apply(weight)
    loss = Switch.apply(node)
    node.grad_fn.register_prehook(reads)
    loss.backward(torch.ones(4))
    device.stream = DEFAULT
    torch.ones(4)  # may be given the memory of a gradient that the side stream reads
    assert kinds(device) == ([] if by_engine else [Kind.REUSE])


def test_a_kernel_of_a_thread_of_autograd_is_named_by_its_node(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    loss = torch.ones(4, requires_grad=True).exp().sum()
    monkeypatch.setattr(recorder, "_is_layer", lambda path: True)  # leaves out all frames, as in a thread of the engine
    loss.backward()
    assert ("mul", "the backward of ExpBackward0") in {(op.name, op.site) for op, _ in device.operations}


class Nccl(TorchDispatchMode):
    """Does with events what a process group of NCCL does, at the call of a collective."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            wait(NCCL, DEFAULT, event=2)
        out = func(*args, **(kwargs or {}))
        if func.namespace == "c10d":
            trace.EventRecordCallbacks.fire_callbacks(3, NCCL)
        return out


@pytest.mark.parametrize("waits", [True, False])
def test_collectives(device: Device, waits: bool) -> None:
    device.stop()

    def job() -> list[Finding]:
        dist.init_process_group("gloo")
        device.start()
        nccl = Nccl()
        recorder.put_below(nccl)
        buffer = torch.ones(4)
        work = dist.all_reduce(buffer, async_op=True)
        work.wait()
        if waits:
            trace.EventWaitCallbacks.fire_callbacks(3, DEFAULT)
        buffer.add_(1)
        recorder.take_out(nccl)
        device.stop()
        return [(finding.kind, str(finding)) for finding in device.findings]

    (found,) = run_ranks(job, world_size=1)
    assert [kind for kind, _ in found] == ([] if waits else [Kind.RACE])
    assert all("allreduce_ on stream 0x20 at test_cuda.py" in text for _, text in found), found
