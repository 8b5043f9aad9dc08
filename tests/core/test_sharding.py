"""How to say that parameters belong to a group of ranks, and what is refused."""

from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from tests.harness.engines import configuration, make_engine, rank, start
from tests.harness.groups import ROWS, WORLD
from tests.harness.ranks import run_ranks
from zerosync_strategy import attach, shard_over

CONFIG = configuration(stage=3)


def engine_of(model: nn.Module, stage: int = 3, **zero: Any) -> Any:
    return make_engine(model, torch.optim.AdamW(model.parameters()), stage, zero)


def net(width: int = 4) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, width), nn.Linear(width, width), nn.Linear(width, 4))


def test_a_dimension_of_a_mesh_and_what_is_refused() -> None:
    def run() -> None:
        start()
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "expert"))
        groups = [dist.new_group(ranks) for ranks in ROWS]
        own = groups[rank() // 2]

        model = net()
        shard_over(mesh["expert"], model[0], model[1])
        engine = engine_of(model)
        ranks = [dist.get_process_group_ranks(param.ds_process_group) for param in model.parameters()]
        assert [each == ROWS[rank() // 2] for each in ranks] == [
            True, True, True, True, False, False,
        ]  # fmt: skip
        attach(engine).detach()
        with pytest.raises(
            ValueError, match=r"weight' of Linear is sharded already.*Build the module inside 'with shard"
        ):
            shard_over(own, model[2])
        engine.destroy()

        with pytest.raises(ValueError, match=r"of one dimension, got 2: \('replica', 'expert'\)"):
            shard_over(mesh)
        with pytest.raises(ValueError, match=f"process group that rank {rank()} is not in"):
            shard_over(groups[1 - rank() // 2])
        with pytest.raises(TypeError, match="process group or a DeviceMesh, got list"):
            shard_over([0, 1])
        with pytest.raises(TypeError, match="takes modules after the process group, got ProcessGroup"):
            shard_over(own, own)  # type: ignore[arg-type]

        model = net()
        shard_over(own, model[1])
        with pytest.raises(ValueError, match=r"shard_over\(\) shards parameters of ZeRO stage 3, found stage 2"):
            attach(engine_of(model, stage=2))

        # DeepSpeed's own way converts what is built outside of it as well.
        model = net()
        with deepspeed.zero.Init(data_parallel_group=own, config_dict_or_path=CONFIG):
            model[1] = nn.Linear(4, 4)
        with pytest.raises(
            ValueError, match=r"parameter '0.weight' is sharded over the ranks \[0, 1\] of .* on rank 0, 1;"
        ):
            attach(engine_of(model))

        inner = deepspeed.zero.Init(data_parallel_group=own, config_dict_or_path=CONFIG)
        with (
            pytest.raises(ValueError, match=r"was entered inside another zero.Init, .* Use 'with shard_over"),
            deepspeed.zero.Init(config_dict_or_path=CONFIG),
            inner,
        ):
            pass
        with inner, deepspeed.zero.Init(data_parallel_group=own, config_dict_or_path=CONFIG):
            pass  # over the same ranks there is nothing to ignore

        model = net()
        shard_over(own, model[1])
        with pytest.raises(ValueError, match=r"'1.weight' is .* Leave 'zero_hpz_partition_size' out. on rank 0, 1;"):
            attach(engine_of(model, zero_hpz_partition_size=2))

        model = net(width=4 + rank() // 2)
        shard_over(own, model)
        with pytest.raises(ValueError, match=r"parameter 0.weight: \(4, 4\).* on rank 0, 1; \(5, 4\).* on rank 2, 3"):
            attach(engine_of(model))

    run_ranks(run, world_size=WORLD)
