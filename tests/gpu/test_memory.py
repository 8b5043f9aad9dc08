"""What memory and host waits cost on a GPU, by torch's own counts. Run with ZEROSYNC_TEST_CUDA=1."""

import os
from typing import Any

import deepspeed
import pytest
import torch
from torch import nn

from tests.gpu.device import waits
from tests.harness.engines import make_engine
from tests.harness.oracle import Oracle, distance, full_parameters
from tests.harness.ranks import run_ranks
from zerosync_strategy import attach
from zerosync_strategy.core.attached.budgets import DeviceGauge
from zerosync_strategy.core.comm.streams import Streams
from zerosync_strategy.core.optimizer.edits import PIECE_NUMEL, MasterWeights
from zerosync_strategy.core.params.copies import pinned_blocks

pytestmark = pytest.mark.gpu
WIDTH, LAYERS, STEPS = 256, 4, 5
OFFLOAD = {"offload_optimizer": {"device": "cpu", "pin_memory": True}}
OFFLOAD_ALL = {**OFFLOAD, "offload_param": {"device": "cpu", "pin_memory": True}}


def start(backend: str = "nccl") -> int:
    torch.cuda.set_device(int(os.environ["RANK"]))
    deepspeed.init_distributed(backend)
    return int(os.environ["RANK"])


def on_every_gpu(job: Any, *args: Any) -> list[Any]:
    return run_ranks(job, *args, world_size=torch.cuda.device_count(), timeout=280.0)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))).cuda()


def test_the_gauge_counts_what_the_allocator_cannot_give_back() -> None:
    def job() -> None:
        torch.cuda.set_device(0)
        gauge, mebi = DeviceGauge(torch.device("cuda", 0)), 2**20
        before = gauge.used()
        whole = torch.empty(64 * mebi, dtype=torch.uint8, device="cuda")
        assert gauge.used() - before >= 64 * mebi
        del whole
        assert gauge.used() - before < 2 * mebi  # a free segment serves the next request
        parts = [torch.empty(mebi // 2, dtype=torch.uint8, device="cuda") for _ in range(16)]  # in segments of 2 MiB
        del parts[1::2]
        assert gauge.used() - before >= 8 * mebi - mebi // 2  # their free halves cannot be given back
        assert gauge.used() <= torch.cuda.memory_reserved() <= gauge.limit()
        assert gauge.used() <= gauge.peak() <= torch.cuda.max_memory_reserved()

    run_ranks(job, world_size=1)


def test_buffers_of_deepspeeds_reductions_go_back_to_the_device() -> None:
    def job() -> int:
        start()
        net = network()
        engine = make_engine(net, torch.optim.AdamW(net.parameters(), lr=0.01), 3, {"reduce_bucket_size": 2**28})
        attach(engine)
        return torch.cuda.memory_reserved()

    assert max(on_every_gpu(job)) < 2**28  # bytes


@pytest.mark.parametrize("mebibytes", [33, 86])
def test_pinned_blocks_are_what_torch_takes(mebibytes: int) -> None:
    def job() -> tuple[int, int]:
        torch.cuda.set_device(0)
        streams = Streams()
        before = torch.cuda.host_memory_stats()["allocated_bytes.current"]
        blocks = pinned_blocks(mebibytes * 2**20)
        kept = [streams.host_memory(block, torch.uint8) for block in blocks]
        taken = torch.cuda.host_memory_stats()["allocated_bytes.current"] - before
        assert all(block.is_pinned() for block in kept)
        return taken, sum(blocks)

    ((taken, expected),) = run_ranks(job, world_size=1)
    assert taken == expected <= mebibytes * 2**20 * 17 // 16


@pytest.mark.parametrize("host", [False, True], ids=["on the device", "offloaded"])
def test_adopting_edits_takes_memory_for_a_piece(host: bool) -> None:
    def job() -> int:
        torch.cuda.set_device(0)
        adopting = MasterWeights(Streams())
        shard = torch.randn(16 * PIECE_NUMEL, device="cuda").bfloat16()
        master = shard.float().cpu().pin_memory() if host else shard.float()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        for value in (3.0, 4.0):
            adopting.adopt([(shard, master)])
            adopting.stepped([(shard, master)])
            shard[12345] = value
        adopting.adopt([(shard, master)])
        peak = torch.cuda.max_memory_allocated() - before
        assert master[12345].item() == 4.0 and torch.equal(master.cuda().bfloat16(), shard)
        return peak

    (peak,) = run_ranks(job, world_size=1)
    assert peak <= 24 * PIECE_NUMEL  # bytes; with all at once, it would be 11 * 16 of them


@pytest.mark.parametrize(
    ("options", "zero"),
    [
        ({}, {}),
        ({"param_memory_budget": "all"}, {}),
        ({"param_memory_budget": {"device": 0, "host": "all"}}, {}),
        ({"coalesce": False}, OFFLOAD),
        ({"coalesce": False}, OFFLOAD_ALL),
    ],
    ids=["", "held", "host", "offloaded", "offloaded with parameters"],
)
def test_neither_forward_nor_backward_waits_for_the_device(options: dict[str, Any], zero: dict[str, Any]) -> None:
    """Of ours; torch warns of each wait and where it is. Parameters are those of plain torch."""

    def job() -> tuple[float, list[str]]:
        rank, world = start(), int(os.environ["WORLD_SIZE"])
        net, plain = network(), network()
        small = {"stage3_param_persistence_threshold": 0, "reduce_bucket_size": 2 * WIDTH * WIDTH, "overlap_comm": True}
        engine = make_engine(net, torch.optim.AdamW(net.parameters(), lr=0.01), 3, {**small, **zero})
        attach(engine, **options)
        oracle = Oracle(plain, torch.optim.AdamW(plain.parameters(), lr=0.01), world)
        ours: list[str] = []
        for k in range(2 * STEPS):
            x = [torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(9 * k + r)).cuda() for r in range(world)]
            torch.cuda.synchronize()
            with waits() as places:
                engine.backward(engine(x[rank]).square().mean())
            ours += [place for place in places if "zerosync_strategy" in place]
            oracle.backward(lambda r, x=x: plain(x[r]).square().mean())
            if k % 2:
                engine.step()
                oracle.step()
        return distance(full_parameters(net), full_parameters(plain)), ours

    for error, ours in on_every_gpu(job):
        assert error < 1e-4 and not ours, (error, ours)


def test_gloo_for_tensors_on_a_gpu_is_refused() -> None:
    def job() -> None:
        start("gloo")
        net = network()
        engine = make_engine(net, torch.optim.SGD(net.parameters(), lr=0.1), 2)
        with pytest.raises(ValueError, match="which gloo cannot send"):
            attach(engine)

    if torch.cuda.device_count() < 2:
        pytest.skip("one rank sends nothing")
    on_every_gpu(job)
