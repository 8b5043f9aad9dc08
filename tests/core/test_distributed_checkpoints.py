"""Distributed checkpoints: any number of ranks on any stage goes on, as plain torch that never stopped."""

from pathlib import Path
from typing import Any

import torch

from tests.harness.engines import make_engine, rank
from tests.harness.oracle import distance, full_parameters
from tests.harness.ranks import run_ranks
from tests.harness.universal import STEPS, Net, batch, plain_torch, started
from zerosync_strategy import attach

RUNS = ((2, 2), (3, 1), (1, 3), (3, 4), (2, 4), (3, 2), (3, 3), (1, 2), (2, 1))
"""Stage and ranks of each run; the next goes on where it has ended."""
DISTRIBUTED = {"checkpoint_format": "distributed"}


def test_other_stages_and_numbers_of_ranks(tmp_path: Path) -> None:
    def train(run: int) -> dict[str, torch.Tensor]:
        stage, ranks = RUNS[run]
        net = Net() if run else started(Net())
        zero = {"stage3_param_persistence_threshold": 12, "sub_group_size": 50} if stage == 3 else {}
        zero |= {"offload_optimizer": {"device": "cpu"}} if run == 5 else {}
        engine = make_engine(net, net.optimizer(), stage, zero)
        options: dict[str, Any] = DISTRIBUTED | {"checkpoint_background": run % 2 == 0}
        if ranks == 4:  # two nodes, and all in their shards
            of_nodes = {"device": 0, "node": "all"}
            options |= {"grad_memory_budget": of_nodes, "node_size": 2}
            options |= {"param_memory_budget": of_nodes} if stage == 3 else {}
        elif stage == 3:
            options |= {"param_memory_budget": "all"}
        attach(engine, **options)
        if run:
            if run % 3:
                engine.backward(engine(batch(9, 0, rank())))
                engine.step()
            _, said = engine.load_checkpoint(tmp_path)
            assert said == {"run": run - 1}
        for step in range(run * STEPS, (run + 1) * STEPS):
            for backward in range(2):
                engine.backward(engine(batch(step, backward, rank())))
            engine.step()
        assert engine.global_steps == (run + 1) * STEPS
        engine.save_checkpoint(tmp_path, tag=f"run{run}", client_state={"run": run})
        engine.backward(engine(batch(8, 0, rank())))
        ended = full_parameters(engine.module)
        engine.destroy()
        return ended

    (oracle,) = run_ranks(plain_torch, Net.optimizer, [ranks for _, ranks in RUNS], world_size=1)
    for run, expected in enumerate(oracle):
        ended = run_ranks(train, run, world_size=RUNS[run][1])
        assert max(distance(parameters, expected) for parameters in ended) == 0.0, RUNS[run]
