"""Whoever writes the shards of ZeRO-3, the next gather of them waits for it (S1)."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import safe_get_full_fp32_param, safe_set_full_fp32_param, safe_set_local_fp32_param

from tests.harness.copying import adamw
from tests.harness.engines import make_engine, rank
from tests.harness.racecheck import Stream, simulate
from tests.harness.ranks import run_ranks
from zerosync_strategy import attach


def network() -> torch.nn.Module:
    """No row is aligned, so gathers receive in memory of their own, and wait for nothing else of the caller's."""
    torch.manual_seed(5)
    return torch.nn.Sequential(torch.nn.Linear(9, 33), torch.nn.Tanh(), torch.nn.Linear(33, 9))


def in_full(engine: Any) -> None:
    for param in engine.module.parameters():
        safe_set_full_fp32_param(param, safe_get_full_fp32_param(param) * 0.5)


def local(engine: Any) -> None:
    for param in engine.module.parameters():
        safe_set_local_fp32_param(param, engine.optimizer.get_local_fp32_param(param) * 0.5)


def by_context(engine: Any) -> None:
    params = list(engine.module.parameters())
    with deepspeed.zero.GatheredParameters(params, modifier_rank=0), torch.no_grad():
        for param in params if rank() == 0 else ():
            param.mul_(0.5)


def in_place(engine: Any) -> None:
    for param in engine.module.parameters():
        param.data.mul_(0.5)


def by_state_dict(engine: Any) -> None:
    engine.module.load_state_dict({name: value * 0.5 for name, value in network().state_dict().items()})


def in_full_parameters(engine: Any) -> None:
    with engine._zerosync.full_parameters():
        in_place(engine)


def by_checkpoint(engine: Any) -> None:
    engine.load_checkpoint(os.environ["CHECKPOINT"], "first")


def past_all(engine: Any) -> None:
    """As a program that knows where DeepSpeed keeps the shards, before the first backward of a window."""
    if engine._zerosync.window.backwards == 0:
        for param in engine.module.parameters():
            param.ds_tensor.data.mul_(0.5)


def before_a_read(engine: Any) -> None:
    """The write is the step's, or at first whoever's was before attach(), and no forward is in between."""
    for param in engine.module.parameters():
        param.norm()


def past_all_behind_a_read(engine: Any) -> None:
    before_a_read(engine)
    past_all(engine)


def read_on_another_stream(engine: Any) -> None:
    """That has waited for nothing: what the package writes, its reads wait for."""
    accelerator = get_accelerator()
    elsewhere, caller = Stream(name="elsewhere"), accelerator.current_stream()
    with accelerator.stream(elsewhere):
        before_a_read(engine)
        dict(engine._zerosync.full_weights())
    caller.wait_stream(elsewhere)


WRITES: dict[str, Callable[[Any], None]] = {
    each.__name__: each
    for each in (
        in_full,
        local,
        by_context,
        in_place,
        by_state_dict,
        in_full_parameters,
        by_checkpoint,
        past_all,
        before_a_read,
        past_all_behind_a_read,
        read_on_another_stream,
    )
}


def findings(write: Callable[[Any], None], noted: bool) -> list[str]:
    """Of steps of two micro-batches, and a write on their stream, or on another, before each.

    Args:
        noted: it is read at once, for all know of it.
    """
    dtype = torch.bfloat16 if noted else torch.float32
    with simulate() as simulation:
        net, mine = network(), Stream(name="mine")
        zero = {"overlap_comm": True, "stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0}
        engine = make_engine(net, adamw(net), 3, zero, bf16={"enabled": noted})
        for param in net.parameters():
            param.ds_tensor.data.mul_(0.5)  # as where a checkpoint was loaded before
        engine._zerosync = attach(engine)
        if write is by_checkpoint:
            engine.save_checkpoint(os.environ["CHECKPOINT"], "first")
        caller = get_accelerator().current_stream()
        for step in range(6):
            stream = (caller, mine)[step % 2]
            for _ in range(2):
                stream.wait_stream(caller)
                with get_accelerator().stream(stream), torch.no_grad():
                    write(engine)
                    if noted:  # at once: a forward's host waits for what was done before it
                        before_a_read(engine)
                caller.wait_stream(stream)
                engine.backward(engine(torch.randn(4, 9, dtype=dtype)).float().square().mean())
            engine.step()
        return list(map(str, simulation.findings))


@pytest.mark.extended(
    but=(
        "in_full",
        "past_all_behind_a_read",
        "read_on_another_stream",
    )
)
@pytest.mark.parametrize("name", WRITES)
def test_gathers_wait_for_whatever_writes_shards(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHECKPOINT", str(tmp_path))
    assert run_ranks(lambda: findings(WRITES[name], noted="past_all" not in name)) == [[], []]
