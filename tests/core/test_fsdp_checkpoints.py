"""Distributed checkpoints of ours in other hands, and those of others here: FSDP2, and plain torch."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests.core.test_checkpoints import error_of
from tests.harness import engines
from tests.harness.engines import rank
from tests.harness.oracle import Oracle, distance, full_parameters
from tests.harness.ranks import run_ranks
from zerosync_strategy import attach


class Net(nn.Module):
    """With tied weights, a frozen layer and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding, self.still, self.head = nn.Linear(7, 11, bias=False), nn.Linear(11, 11), nn.Linear(7, 11)
        self.head.weight = self.embedding.weight
        self.still.requires_grad_(False)
        self.register_buffer("scale", torch.full((2,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (torch.tanh(self.still(self.embedding(x))) * self.head(x) * self.scale[0]).square().mean()

    def optimizer(self) -> torch.optim.Optimizer:
        matrices = [param for param in self.parameters() if param.requires_grad and param.dim() > 1]
        rest = [param for param in self.parameters() if param.requires_grad and param.dim() == 1]
        return torch.optim.AdamW([{"params": matrices}, {"params": rest, "lr": 3e-3}], lr=1e-2)


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(4, 7, generator=torch.Generator().manual_seed(10 * step + rank))


def ours(stage: int, steps: range, saved: Path | None, folder: Path) -> dict[str, torch.Tensor]:
    engine = engines.make_engine(net := Net(), net.optimizer(), stage)
    attach(engine, checkpoint_format="distributed")
    if saved is not None:
        engine.load_checkpoint(saved.parent, tag=saved.name)
    for step in steps:
        engine.backward(engine(batch(step, rank())))
        engine.step()
    engine.save_checkpoint(folder.parent, tag=folder.name)
    return full_parameters(engine.module)


def of_fsdp(steps: range, saved: Path | None, folder: Path) -> dict[str, torch.Tensor]:
    engines.start()
    net = Net()
    fully_shard(net, mesh=init_device_mesh("cpu", (torch.distributed.get_world_size(),)))
    optimizer = net.optimizer()

    def state() -> dict[str, Any]:
        model, of_optimizer = get_state_dict(net, optimizer)
        return {"model": model, "optimizer": of_optimizer}

    if saved is not None:
        found = state()
        dcp.load(found, checkpoint_id=saved)
        set_state_dict(net, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])
    for step in steps:
        net(batch(step, rank())).backward()
        optimizer.step()
        optimizer.zero_grad()
    dcp.save(state(), checkpoint_id=folder)
    return {
        name: (param.full_tensor() if isinstance(param, DTensor) else param).detach()
        for name, param in net.named_parameters()
    }


def plain_torch(steps: int, ranks: int) -> dict[str, torch.Tensor]:
    oracle = Oracle(net := Net(), net.optimizer(), ranks)
    for step in range(steps):
        oracle.backward(lambda rank, step=step: net(batch(step, rank)))
        oracle.step()
    return full_parameters(net)


def test_fsdp_and_back(tmp_path: Path) -> None:
    """ZeRO-3, FSDP2, ZeRO-2, each from what the one before has saved."""
    ended = [
        run_ranks(ours, 3, range(2), None, tmp_path / "zero3"),
        run_ranks(of_fsdp, range(2, 4), tmp_path / "zero3", tmp_path / "fsdp"),
        run_ranks(ours, 2, range(4, 6), tmp_path / "fsdp", tmp_path / "zero2"),
    ]
    for number, of_ranks in enumerate(ended, start=1):
        (oracle,) = run_ranks(plain_torch, 2 * number, 2, world_size=1)
        assert [distance(parameters, oracle) for parameters in of_ranks] == [0.0, 0.0], number


def test_one_file_of_plain_torch(tmp_path: Path) -> None:
    run_ranks(ours, 3, range(2), None, tmp_path / "saved", world_size=3)
    dcp_to_torch_save(tmp_path / "saved", tmp_path / "all.pt")
    found = torch.load(tmp_path / "all.pt", weights_only=False)
    net = Net()
    net.load_state_dict(found["model"])
    groups, states = found["optimizer"]["param_groups"], found["optimizer"]["state"]
    assert [group["params"] for group in groups] == [["embedding.weight"], ["head.bias"]]
    assert [states[name]["step"] for group in groups for name in group["params"]] == [2.0, 2.0]
    assert [group["lr"] for group in groups] == [1e-2, 3e-3]
    (oracle,) = run_ranks(plain_torch, 2, 3, world_size=1)
    assert distance(full_parameters(net), oracle) == 0.0


def test_what_is_not_read_of_others_is_an_error(tmp_path: Path) -> None:
    """Nested states, an optimizer's state under other keys, and one without a model are not left out in silence."""

    def run() -> None:
        engines.start()
        optimizer = (net := Net()).optimizer()
        optimizer.param_groups[0]["note"] = {"of": [torch.ones(2)]}
        model, nested = get_state_dict(net, optimizer)
        _, flat = get_state_dict(net, net.optimizer(), options=StateDictOptions(flatten_optimizer_state_dict=True))
        dcp.save({"model": model, "optimizer": nested}, checkpoint_id=tmp_path / "nested")
        dcp.save({"model": model, "optimizer": flat}, checkpoint_id=tmp_path / "flat")
        dcp.save(model, checkpoint_id=tmp_path / "bare")
        dcp.save({"model": {"other": torch.ones(2)}}, checkpoint_id=tmp_path / "other")
        attach(engine := engines.make_engine(net := Net(), net.optimizer(), 2), checkpoint_format="distributed")
        said = {name: error_of(engine.load_checkpoint, tmp_path, tag=name) for name in ("nested", "flat", "bare")}
        assert "'optimizer.param_groups.0.note.of.0' is part of a nested state" in said["nested"]
        assert "it has no optimizer states, as get_state_dict() returns them" in said["flat"]
        assert "it has no 'model'" in said["bare"]
        options = {"load_module_strict": False, "load_optimizer_states": False}
        assert "it has none of the parameters" in error_of(engine.load_checkpoint, tmp_path, tag="other", **options)
        for name in ("nested", "flat"):
            assert "load_optimizer_states=False" in said[name]
            engine.load_checkpoint(tmp_path, tag=name, load_optimizer_states=False)

    run_ranks(run, world_size=1)
