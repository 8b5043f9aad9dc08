"""What one GPU cannot have: NCCL between ranks. Training is plain torch's, whatever is set and happens before it."""

import gc
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.gpu.device import DEVICE, needs, run
from tests.gpu.test_exact import BACKWARDS, STEPS, errors, loss_of, network, sgd
from tests.harness.engines import make_engine, rank
from tests.harness.oracle import Oracle, distance, full_parameters
from tests.harness.ranks import DIED
from zerosync_strategy import attach

OWN = {"unshard_streams": "own_communicator"}
NODE = {"device": 0, "node": "all"}
# By name: the stages, the options, and how many GPUs they need.
CASES: dict[str, tuple[tuple[int, ...], dict[str, Any], int]] = {
    "own_communicator": ((3,), OWN, 2),
    "ordered": ((2, 3), {"reduction": "ordered"}, 2),
    "node_size=2": ((2,), {"node_size": 2, "grad_memory_budget": NODE}, 4),
    "node_size=2 with parameters": ((3,), {"node_size": 2, "grad_memory_budget": NODE, "param_memory_budget": NODE}, 4),
    "ordered, node_size=2": ((2, 3), {"node_size": 2, "reduction": "ordered"}, 4),
}


def right(found: list[tuple[float, float]]) -> None:
    assert all(error <= bound for error, bound in found), found


@pytest.mark.parametrize(
    ("stage", "case"),
    [
        pytest.param(stage, case, marks=needs(gpus), id=f"{stage}-{case}")
        for case, (stages, _, gpus) in CASES.items()
        for stage in stages
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_options(stage: int, case: str, dtype: torch.dtype) -> None:
    _, ours, ranks = CASES[case]
    right(run(errors, stage, dtype, ours, {}, simulated=ranks))


@needs(2)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_attach_detach_attach(stage: int) -> None:
    """Process groups of its own are made, destroyed, and made again."""
    right(run(errors, stage, torch.float32, OWN if stage == 3 else {}, {}, sgd, 3))


@needs(2)
@pytest.mark.parametrize("first", [True, False])
def test_a_program_has_made_groups_of_some_ranks(first: bool) -> None:
    """And of a rank, so that ranks have made different numbers of groups."""

    def job() -> tuple[float, float]:
        alone = [dist.new_group([0]), *([] if first else [dist.new_group(list(range(dist.get_world_size())))])]
        found = errors(3, torch.float32, OWN, {})
        assert alone
        return found

    right(run(job))


@needs(2)
@pytest.mark.gpu  # gloo binds no device
def test_a_bound_device() -> None:
    right(run(errors, 3, torch.float32, OWN, {}, bound=True))


@needs(2)
@pytest.mark.parametrize("stage", [2, 3])
def test_save_kill_and_resume(stage: int, tmp_path: Path) -> None:
    """All ranks are killed in the window after a save; new ones go on from it as plain torch that nothing disturbed."""

    def job(dies: bool) -> float:
        net, plain = network().to(DEVICE), network().to(DEVICE)
        engine = make_engine(net, sgd(net.parameters()), stage, {"stage3_param_persistence_threshold": 0})
        attach(engine)
        if not dies:
            engine.load_checkpoint(str(tmp_path))
        for step in range(engine.global_steps, STEPS):
            for k in range(BACKWARDS * step, BACKWARDS * (step + 1)):
                engine.backward(loss_of(engine, k, rank(), torch.float32))
                if dies and step == STEPS // 2:
                    os.kill(os.getpid(), signal.SIGKILL)
            engine.step()
            if dies and step == STEPS // 2 - 1:
                engine.save_checkpoint(str(tmp_path))
        oracle = Oracle(plain, sgd(plain.parameters()), dist.get_world_size())
        for step in range(STEPS):
            for k in range(BACKWARDS * step, BACKWARDS * (step + 1)):
                oracle.backward(lambda of_rank, k=k: loss_of(plain, k, of_rank, torch.float32))
            oracle.step()
        return distance(full_parameters(net), full_parameters(plain))

    killed = run(job, True, expect="any")
    assert {each.error for each in killed} == {DIED} and {each.signal for each in killed} == {signal.SIGKILL}
    assert max(run(job, False)) < 1e-5


@needs(2)
@pytest.mark.gpu  # CUDA's allocator
def test_retries_of_the_allocator() -> None:
    """Memory is so short that cached blocks, too large for what is asked, are freed first, and the host waits."""

    def job() -> tuple[tuple[float, float], int]:
        errors(3, torch.float32, {}, {"stage3_param_persistence_threshold": 0})
        gc.collect()
        torch.cuda.empty_cache()
        cached = torch.empty(64 * 2**20, dtype=torch.uint8, device=DEVICE)
        del cached  # of the pool of large blocks, and all that follows are small
        torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved() / torch.cuda.mem_get_info()[1])
        before = torch.cuda.memory_stats()["num_alloc_retries"]
        found = errors(3, torch.float32, {}, {"stage3_param_persistence_threshold": 0})
        return found, torch.cuda.memory_stats()["num_alloc_retries"] - before

    found = run(job)
    right([each for each, _ in found])
    assert all(retries for _, retries in found), found
