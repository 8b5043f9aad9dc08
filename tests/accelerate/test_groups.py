"""Parameters over groups of ranks under Accelerate: said before ``prepare``, trained exactly."""

import os
from typing import Any

import deepspeed
import pytest
import torch
from accelerate import Accelerator

from tests.harness.groups import LAYOUTS, WORLD, Model, Reference, data, process_groups, sgd, skips, values
from tests.harness.oracle import NORM, distance, full_parameters, value_of
from tests.harness.ranks import run_ranks
from zerosync_strategy import ZeroSyncPlugin, shard_over

STEPS = 3


def test_modules_are_sharded_over_their_groups() -> None:
    def run() -> Any:
        rank, layout = int(os.environ["RANK"]), LAYOUTS["grid"]
        accelerator = Accelerator(deepspeed_plugin=ZeroSyncPlugin(stage=3), gradient_accumulation_steps=2)
        accelerator.state.deepspeed_plugin.deepspeed_config["zero_allow_untested_optimizer"] = True
        groups = process_groups(layout)
        outer, inner = deepspeed.zero.Init(), deepspeed.zero.Init(data_parallel_group=groups["second"])
        with outer, pytest.raises(ValueError, match="Use 'with shard_over"), inner:
            pass
        with inner, deepspeed.zero.Init(data_parallel_group=groups["second"]):
            pass  # ignored too, but it says the same
        plain = Model(lambda name: torch.enable_grad())
        for name, group in groups.items():
            shard_over(group, getattr(plain, name))
        for name, param in plain.named_parameters():
            group = next(g for g in layout.get(name.split(".")[0], [list(range(WORLD))]) if rank in g)
            param.data.copy_(values(name, group, param.data))
        model, optimizer = accelerator.prepare(plain, sgd(plain.parameters()))
        norms = []
        for k in range(2 * STEPS):
            with accelerator.accumulate(model):
                accelerator.backward(model(data(k, rank), skip=skips(k)))
                if accelerator.sync_gradients:
                    norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.4)))
                optimizer.step()
                optimizer.zero_grad()
        reference = Reference(layout, sgd)
        expected = reference.train(STEPS, clip=0.4)
        own = {name: value_of(param) for name, param in reference.of_rank(rank).items()}
        return distance(full_parameters(plain), own), norms, expected

    ranks = run_ranks(run, world_size=WORLD)
    for error, norms, expected in ranks:
        assert error == 0.0 and norms == ranks[0][1]
        assert max(abs(ours / theirs - 1) for ours, theirs in zip(norms, expected, strict=True)) < NORM
        assert min(expected) > 0.4
