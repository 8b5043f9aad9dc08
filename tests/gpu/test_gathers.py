"""Gathers over two groups on one GPU, each delayed as by a slow link: the same losses as stock, and how long they take.

The process group is torch's fake one, of four ranks that send nothing. A gather fills its target on a stream of its
group's own: first with NaN, then, after a while, with copies of this rank's shard. Who does not wait computes NaN.
"""

import math
import os
import statistics
from collections.abc import Callable
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.harness.engines import make_engine
from tests.harness.ranks import run_ranks
from zerosync_strategy import attach, shard_over
from zerosync_strategy.core.comm.streams import Streams
from zerosync_strategy.core.engine import zero

WORLD, WIDTH, LAYERS, ROUNDS = 4, 1024, 8, 8
DELAY = {4: 4_000_000, 2: 3_200_000}  # cycles, by the size of the group


class _Work:
    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self._event)


def delayed() -> Callable[..., _Work]:
    links: dict[int, torch.cuda.Stream] = {}

    def gather_all(group: Any, outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> _Work:
        size = dist.get_world_size(group)
        link = links.setdefault(size, torch.cuda.Stream())
        link.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(link):
            shards = [each.clone() for each in inputs]  # a part of the output, often
            for output in outputs:
                output.fill_(math.nan)
            torch.cuda._sleep(DELAY[size])
            for output, shard in zip(outputs, shards, strict=True):
                output.view(-1).copy_(shard.view(-1).repeat(size))
            done = torch.cuda.Event()
            done.record()
        for tensor in (*inputs, *outputs):
            tensor.record_stream(link)
        return _Work(done)

    def gather(
        output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any = None, async_op: bool = True
    ) -> _Work:
        return gather_all(group, [output_tensor], [input_tensor])

    for name in ("all_gather_single_coalesced", "allgather_into_tensor_coalesced"):
        if hasattr(dist.ProcessGroup, name):  # ours
            setattr(dist.ProcessGroup, name, gather_all)
    return gather


class ReadsAhead(nn.Module):
    """Reads the weight of its layer, prefetched and still on its way, before the layer's own hook waits for it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(torch.tanh(x @ self.layer.weight))


def train(system: str, reads: bool = False, backend: str = "") -> tuple[list[float], float]:
    """Losses, and the median of the milliseconds that a forward and backward take. The optimizer never steps."""
    os.environ |= {"WORLD_SIZE": str(WORLD), "LOCAL_SIZE": "1"}
    torch.cuda.set_device(0)
    dist.init_process_group("fake", rank=0, world_size=WORLD, store=FakeStore())
    dist.get_backend = lambda group=None: dist.Backend("nccl")
    deepspeed.init_distributed(dist_init_required=False, verbose=False)
    half = dist.new_group([0, 1])
    torch.manual_seed(0)
    layers = (ReadsAhead() if reads else nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))
    model = nn.Sequential(*layers).cuda()
    shard_over(half, *model[::2])
    config = {
        "overlap_comm": True, "stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0,
        "stage3_prefetch_bucket_size": WIDTH * WIDTH,
    }  # fmt: skip
    engine = make_engine(model, torch.optim.SGD(model.parameters(), lr=0.0), zero=config)
    if system != "stock":
        attach(engine, unshard_streams=system)
    if backend:
        engine.compile(backend=backend)
    zero.comm_backend().all_gather_function = delayed()  # DeepSpeed's gathers; it replaces ours, too
    losses, times = [], []
    for k in range(ROUNDS):
        x = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(k)).cuda()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        loss = engine(x).square().mean()
        engine.backward(loss)
        end.record()
        torch.cuda.synchronize()
        losses.append(loss.item())
        for param in model.parameters():
            param.ds_tensor.mul_(0.9)  # so that what an earlier round has left in memory is wrong
        times.append(begin.elapsed_time(end))
    return losses, statistics.median(times[3:])


@pytest.mark.gpu
def test_delayed_gathers_are_waited_for(record_property: Callable[[str, object], None]) -> None:
    found = {system: run_ranks(train, system, world_size=1)[0] for system in ("stock", "per_group")}
    for system, (losses, time) in found.items():
        assert losses == found["stock"][0] and all(map(math.isfinite, losses)), system
        record_property(f"{system}, ms", time)
        print(f"{system}: {time:.2f} ms")


@pytest.mark.gpu
def test_without_the_wait_for_a_gather_it_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    expected, _ = run_ranks(train, "stock", world_size=1)[0]
    monkeypatch.setattr(Streams, "wait_for_unshard", lambda self, event: None)
    losses, _ = run_ranks(train, "per_group", world_size=1)[0]
    assert losses != expected


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["", "aot_eager", "inductor"])
def test_reads_of_what_is_prefetched_wait_for_it(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, _ = run_ranks(train, "per_group", reads=True, world_size=1)[0]
    losses, _ = run_ranks(train, "per_group", reads=True, backend=backend, world_size=1, timeout=280)[0]
    assert all(map(math.isfinite, losses)) and losses == pytest.approx(expected, rel=1e-3 if backend else 0)
    monkeypatch.setattr(Streams, "wait_for_unshard", lambda self, event: None)
    losses, _ = run_ranks(train, "per_group", reads=True, backend=backend, world_size=1, timeout=280)[0]
    assert losses != pytest.approx(expected, rel=1e-3)
