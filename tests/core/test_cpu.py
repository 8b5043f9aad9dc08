"""On CPU nothing is compiled at run time, and collectives are counted as what gloo sends."""

import os

import deepspeed
import pytest
import torch
import torch.distributed as dist

from tests.harness.ranks import run_ranks
from zerosync_strategy import prepare_cpu
from zerosync_strategy.core.comm.journal import Traffic
from zerosync_strategy.core.engine import zero
from zerosync_strategy.tools.plan.measures import ProcessCounter

pytestmark = pytest.mark.off_device("about gloo, and the CPU")


def test_nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> None:
        import torch.utils.cpp_extension as extension

        monkeypatch.setattr(extension, "load", None)  # what every DeepSpeed builder ends in
        prepare_cpu()
        deepspeed.init_distributed("gloo")
        assert zero.comm_backend().shm_comm_op is None
        x = torch.ones(2)
        deepspeed.comm.inference_all_reduce(x)
        assert x.tolist() == [2.0, 2.0]

    run_ranks(run)


def test_counting_every_kind_of_collective() -> None:
    def run() -> None:
        prepare_cpu()
        deepspeed.init_distributed("gloo")
        comm, rank = deepspeed.comm, int(os.environ["RANK"])
        pair = comm.new_group([0, 1])
        calls = {
            "all_reduce": (lambda: comm.all_reduce(torch.ones(6), group=None), 2 * 24 * 2 // 3),
            "all_gather_into_tensor": (lambda: comm.allgather_fn(torch.empty(6), torch.ones(2)), 24 * 2 // 3),
            "all_gather": (lambda: comm.all_gather([torch.empty(2) for _ in range(3)], torch.ones(2)), 24 * 2 // 3),
            # gloo has no reduce-scatter: an all-reduce is what goes over the wire.
            "reduce_scatter_tensor": (lambda: comm.reduce_scatter_fn(torch.empty(2), torch.ones(6)), 2 * 24 * 2 // 3),
            "broadcast": (lambda: comm.broadcast(torch.ones(6), src=1), 24 * 2 // 3),
            "reduce": (lambda: comm.reduce(torch.ones(6), dst=1), 0 if rank == 1 else 24),
            "all_to_all_single": (lambda: comm.all_to_all_single(torch.empty(6), torch.ones(6)), 24 * 2 // 3),
        }
        with ProcessCounter() as counter:
            for kind, (call, sent) in calls.items():
                call()
                assert counter.take() == {kind: Traffic(1, sent)}, kind
            if rank < 2:
                comm.all_reduce(torch.ones(6, dtype=torch.bfloat16), group=pair)
                assert counter.take() == {"all_reduce": Traffic(1, 2 * 12 // 2)}
            with ProcessCounter() as other:
                comm.all_reduce(torch.ones(1))
                assert other.take() == counter.take() != {}
            comm.all_reduce(torch.ones(1))
            assert other.take() == {}
        dist.barrier()

    run_ranks(run, world_size=3)
