"""What all systems train, and the systems that are driven directly."""

from __future__ import annotations

import datetime
import importlib
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import deepspeed
import phases
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from zerosync_strategy import attach, prepare_cpu

CONTEXT = 32
MODELS = {"10m": {"layers": 6, "width": 384}, "35m": {"layers": 11, "width": 512}}
LEARNING_RATE = 1e-4
MUON_RATE, ADAM_RATE = 0.02, 3e-3  # of the example
TIMEOUT = datetime.timedelta(minutes=5)  # for a collective


sys.path.append(str(Path(__file__).resolve().parents[1] / "examples"))
gpt: Any = importlib.import_module("gpt")
muon: Any = importlib.import_module("muon")


def make_model(model: str) -> torch.nn.Module:
    """The GPT of that size, with the same initial parameters every time."""
    torch.manual_seed(0)
    return gpt.GPT(**MODELS[model], context=CONTEXT)


def make_optimizer(module: torch.nn.Module, is_muon: bool = False) -> torch.optim.Optimizer:
    """The optimizer of every system; ``is_muon``: Muon for the matrices, AdamW for the rest.

    Its large epsilon makes the result depend on the gradients' scale, and little on their rounding errors. The default
    would hide a wrong scale from the comparison of the final parameters.
    """
    if is_muon:  # of all that DeepSpeed's own takes for matrices in this model
        params = list(module.parameters())
        matrices, others = ([each for each in params if (each.dim() > 1) is wide] for wide in (True, False))
        return muon.MuonWithAdamW(matrices, others)  # type: ignore[no-any-return]
    return torch.optim.AdamW(module.parameters(), lr=LEARNING_RATE, eps=1e-3)


def make_batches(round_: int, rank: int, accumulate: int, batch: int) -> list[torch.Tensor]:
    """A rank's micro-batches for one optimizer step."""
    data = torch.Generator().manual_seed(1000 * round_ + rank)
    return [torch.randint(256, (batch, CONTEXT), generator=data) for _ in range(accumulate)]


def engine_config(stage: int, **zero: Any) -> dict[str, Any]:
    """The configuration of every DeepSpeed engine, but for the number of micro-batches."""
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": 25_000_000,
            "allgather_bucket_size": 50_000_000,
            "stage3_prefetch_bucket_size": 5_000_000,
            **zero,
        },
    }


def shard(module: Any, mesh: DeviceMesh, stage: int) -> None:
    """FSDP2 on every block and the root; stage 2 keeps the gathered parameters from the forward to the backward."""
    for part in (*module.blocks, module):
        fully_shard(part, mesh=mesh, reshard_after_forward=stage == 3)


def full(param: torch.nn.Parameter) -> torch.Tensor:
    """A parameter in full; collective where it is sharded."""
    if isinstance(param, DTensor):
        return param.detach().full_tensor()
    with deepspeed.zero.GatheredParameters([param], enabled=hasattr(param, "ds_id")):
        return param.detach().clone()


def report_of(zerosync: Any) -> dict[str, Any]:
    """The numbers of ZeroSync's report of the last step."""
    names = ("reductions", "bytes_sent", "floor_bytes", "peak_unreduced_bytes", "peak_held_bytes", "peak_node_bytes")
    return {name: getattr(zerosync.report, name) for name in names} | {"budgets": str(zerosync.report.budgets)}


class System(ABC):
    """A model, its optimizer, and a way to train on several ranks. Each process has one.

    Attributes:
        module: the model as its author wrote it, whatever wraps it.
        steps: optimizer steps that were made.
    """

    module: torch.nn.Module
    steps: int

    @abstractmethod
    def run(self, turns: Iterable[Sequence[torch.Tensor]]) -> None:
        """One optimizer step on each turn's micro-batches: the gradient is their mean, over all ranks.

        The next turn is asked for when the step is complete, and not before.
        """

    def report(self) -> dict[str, Any]:
        """What the system itself says of its last step."""
        return {}


class _Direct(System):
    """A system with a training loop of its own."""

    steps = 0

    def run(self, turns: Iterable[Sequence[torch.Tensor]]) -> None:
        for batches in turns:
            self.step(batches)
            self.steps += 1

    @abstractmethod
    def step(self, batches: Sequence[torch.Tensor]) -> None:
        """One optimizer step."""


class _DeepSpeed(_Direct):
    own_muon = False  # is_muon: DeepSpeed's own

    def __init__(self, model: str, stage: int, accumulate: int, is_muon: bool = False, **zero: Any) -> None:
        self.module = make_model(model)
        config = engine_config(stage, **zero) | {"gradient_accumulation_steps": accumulate}
        own = is_muon and self.own_muon
        if own:
            config["optimizer"] = {"type": "Muon", "params": {"muon_lr": MUON_RATE, "adam_lr": ADAM_RATE}}
        self.engine, *_ = deepspeed.initialize(
            model=self.module,
            model_parameters=list(self.module.parameters()) if own else None,
            optimizer=None if own else make_optimizer(self.module, is_muon),
            config=config,
            dist_init_required=False,
        )

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        with phases.of("forward"):
            return gpt.next_byte_loss(self.engine(batch), batch)

    def backward(self, loss: torch.Tensor) -> None:
        with phases.of("backward"):
            self.engine.backward(loss)

    def finish(self) -> None:
        with phases.of("step"):
            self.engine.step()


class Stock(_DeepSpeed):
    """DeepSpeed's own gradient accumulation: ``backward`` and ``step`` for every micro-batch."""

    own_muon = True

    def step(self, batches: Sequence[torch.Tensor]) -> None:
        for batch in batches:
            self.backward(self.loss(batch))
            self.finish()


class Coalesced(_DeepSpeed):
    """DeepSpeed's own ``coalesce_grad_reduction`` around all backwards."""

    def step(self, batches: Sequence[torch.Tensor]) -> None:
        with self.engine.coalesce_grad_reduction():
            for batch in batches:
                self.backward(self.loss(batch) / len(batches))
        self.finish()


class ZeroSync(_DeepSpeed):
    """ZeroSync attached to a DeepSpeed engine."""

    def __init__(self, model: str, stage: int, options: dict[str, Any], is_muon: bool = False, **zero: Any) -> None:
        super().__init__(model, stage, 1, is_muon, **zero)
        self.zerosync = attach(self.engine, **options)

    def step(self, batches: Sequence[torch.Tensor]) -> None:
        for batch in batches:
            self.backward(self.loss(batch) / len(batches))
        self.finish()

    def report(self) -> dict[str, Any]:
        return report_of(self.zerosync)


class _Torch(_Direct):
    """A module of plain torch, and its optimizer."""

    optimizer: torch.optim.Optimizer

    def backward(self, model: torch.nn.Module, batch: torch.Tensor, of: int) -> None:
        """Forward and backward of one of so many micro-batches."""
        with phases.of("forward"):
            loss = gpt.next_byte_loss(model(batch), batch) / of
        with phases.of("backward"):
            loss.backward()

    def finish(self) -> None:
        with phases.of("step"):
            self.optimizer.step()
            self.optimizer.zero_grad()


class DDP(_Torch):
    """DistributedDataParallel that synchronises in the last backward only."""

    def __init__(self, model: str, is_muon: bool = False) -> None:
        self.module = make_model(model)
        self.ddp = DistributedDataParallel(self.module, gradient_as_bucket_view=True)
        self.optimizer = make_optimizer(self.module, is_muon)

    def step(self, batches: Sequence[torch.Tensor]) -> None:
        for number, batch in enumerate(batches, 1):
            with nullcontext() if number == len(batches) else self.ddp.no_sync():
                self.backward(self.ddp, batch, len(batches))
        self.finish()


class FSDP2(_Torch):
    """``fully_shard`` with gradients reduced in the last backward only.

    Stage 2 keeps the gathered parameters over all micro-batches, stage 3 frees them after each use.

    Args:
        per_node: ranks among which parameters are sharded, with a replica on each node (HSDP); 0: among all.
        accumulates_shards: gradients are reduced within the node in every backward, and between nodes in the last.
    """

    def __init__(self, model: str, stage: int, per_node: int = 0, accumulates_shards: bool = False) -> None:
        self.module: Any = make_model(model)
        self.stage, self.accumulates_shards = stage, accumulates_shards
        ranks = dist.get_world_size()
        shape, names = ((ranks // per_node, per_node), ("replicate", "shard")) if per_node else ((ranks,), ("shard",))
        shard(self.module, init_device_mesh("cpu", shape, mesh_dim_names=names), stage)
        self.optimizer = make_optimizer(self.module)

    def step(self, batches: Sequence[torch.Tensor]) -> None:
        for number, batch in enumerate(batches, 1):
            last = number == len(batches)
            if self.accumulates_shards:
                self.module.set_requires_all_reduce(last)
            else:
                self.module.set_requires_gradient_sync(last)
            self.module.set_reshard_after_backward(last or self.stage == 3)
            self.backward(self.module, batch, len(batches))
        self.finish()


def make_system(name: str, model: str, accumulate: int) -> System:
    """A directly driven system by its name, and the process group that it needs.

    ``zerosync-2@25`` has a gradient budget of 25 % of the gradients' bytes, ``@all`` none. ``zerosync-3@25`` has such a
    parameter budget, and releases what is beyond it at once; ``zerosync-3@auto900MiB`` chooses it within that limit.
    ``-node`` keeps gradients and parameters in node shards, and nothing else, ``-node-params`` gradients in full;
    ``-each`` keeps nothing, and reduces in every backward; ``-flat`` sends as if each rank were a node. With ``-muon``
    matrices are trained with Muon, stock's with DeepSpeed's own.
    """
    prepare_cpu()
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, timeout=TIMEOUT, verbose=False)
    is_muon = "-muon" in name
    kind, _, variant = name.replace("-muon", "").partition("-")
    if kind == "ddp":
        return DDP(model, is_muon)
    stage = int(variant[0])
    per_node = int(os.environ["LOCAL_WORLD_SIZE"])
    if kind == "fsdp2":
        return FSDP2(model, stage, per_node if "-hybrid" in variant else 0, variant.endswith("-scatter"))
    if kind == "stock":
        of_node: dict[str, Any] = {"zero_hpz_partition_size": per_node} if variant.endswith("-hpz") else {}
        if is_muon and stage == 3:  # DeepSpeed's own reduces whole gradients there
            of_node["reduce_scatter"] = False
        return Stock(model, stage, accumulate, is_muon, **of_node)
    if kind == "coalesced":
        return Coalesced(model, stage, 1)
    options: dict[str, Any] = {"param_memory_budget": "all"} if variant.endswith("-held") else {}
    if variant.endswith("-node"):
        options["grad_memory_budget"] = {"device": 0, "node": "all"}
    if variant.endswith(("-node", "-node-params")):
        options |= {"param_memory_budget": {"device": 0, "node": "all"}} if stage == 3 else {}
    if "-each" in variant:
        options["grad_memory_budget"] = 0
    if variant.endswith("-flat"):
        options["node_size"] = 1
    budget = name.partition("@")[2]
    option = "grad_memory_budget" if stage < 3 else "param_memory_budget"
    if budget.isdigit():
        with torch.device("meta"):
            size = sum(param.numel() * param.element_size() for param in make_model(model).parameters())
        options[option] = size * int(budget) // 100
    elif budget.startswith("auto"):
        options[option] = {"auto": budget.removeprefix("auto")}
    elif stage == 3 and budget == "all":
        options[option] = "all"
    # Beyond the budget, little stays gathered.
    released = {"stage3_max_live_parameters": 2_000_000, "stage3_max_reuse_distance": 0} if budget else {}
    return ZeroSync(model, stage, options, is_muon, **released)
