"""The systems that are compared. Each trains its own copy of the same GPT on the same batches."""

from __future__ import annotations

import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from zerosync_strategy import attach

CONTEXT = 32
MODELS = {"10m": {"layers": 6, "width": 384}, "35m": {"layers": 11, "width": 512}}
LEARNING_RATE = 1e-4


def _load_gpt() -> Any:
    path = Path(__file__).resolve().parents[1] / "examples" / "gpt.py"
    spec = importlib.util.spec_from_file_location("gpt", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


gpt = _load_gpt()


def make_model(model: str) -> torch.nn.Module:
    """The GPT of that size, with the same initial parameters every time."""
    torch.manual_seed(0)
    return gpt.GPT(**MODELS[model], context=CONTEXT)


def make_optimizer(module: torch.nn.Module) -> torch.optim.Optimizer:
    """The optimizer of every system.

    Its large epsilon makes the result depend on the gradients' scale, and little on their rounding errors. The default
    would hide a wrong scale from the comparison of the final parameters.
    """
    return torch.optim.AdamW(module.parameters(), lr=LEARNING_RATE, eps=1e-3)


class System(ABC):
    """A model, its optimizer, and a way to make one optimizer step on several ranks.

    Attributes:
        module: the model as its author wrote it, whatever wraps it.
    """

    module: torch.nn.Module

    @abstractmethod
    def step(self, batches: Sequence[torch.Tensor]) -> None:
        """One optimizer step on this rank's micro-batches: the gradient is their mean, over all ranks."""

    @abstractmethod
    def full(self, param: torch.nn.Parameter) -> torch.Tensor:
        """A parameter in full; collective where it is sharded."""

    def resume(self) -> None:  # noqa: B027
        """Right before a step of this system."""

    def pause(self) -> None:  # noqa: B027
        """Right after a step of this system: the others are next."""

    def report(self) -> dict[str, int]:
        """What the system itself says of its last step."""
        return {}


class _DeepSpeed(System):
    def __init__(self, model: str, stage: int, accumulate: int, **zero: Any) -> None:
        self.module = make_model(model)
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": accumulate,
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
        self.engine, *_ = deepspeed.initialize(
            model=self.module, optimizer=make_optimizer(self.module), config=config, dist_init_required=False
        )

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        return gpt.next_byte_loss(self.engine(batch), batch)

    def full(self, param: torch.nn.Parameter) -> torch.Tensor:
        with deepspeed.zero.GatheredParameters([param], enabled=hasattr(param, "ds_id")):
            return param.detach().clone()


class Stock(_DeepSpeed):
    """DeepSpeed's own gradient accumulation: ``backward`` and ``step`` for every micro-batch."""

    def step(self, batches: Sequence[torch.Tensor]) -> None:
        for batch in batches:
            self.engine.backward(self.loss(batch))
            self.engine.step()


class Coalesced(_DeepSpeed):
    """DeepSpeed's own ``coalesce_grad_reduction`` around all backwards."""

    def step(self, batches: Sequence[torch.Tensor]) -> None:
        with self.engine.coalesce_grad_reduction():
            for batch in batches:
                self.engine.backward(self.loss(batch) / len(batches))
        self.engine.step()


class ZeroSync(_DeepSpeed):
    """ZeroSync attached to a DeepSpeed engine."""

    def __init__(self, model: str, stage: int, options: dict[str, Any], **zero: Any) -> None:
        super().__init__(model, stage, 1, **zero)
        self.zerosync = attach(self.engine, **options)
        self.pause()

    def step(self, batches: Sequence[torch.Tensor]) -> None:
        for number, batch in enumerate(batches, 1):
            loss = self.loss(batch) / len(batches)
            if number == len(batches):
                self.zerosync.window.expect_last()
            self.engine.backward(loss)
        self.engine.step()

    # Its counter counts the collectives of every engine of the process. The others need not pay for that, and the
    # report is to be of this system alone.
    def resume(self) -> None:
        self.zerosync.counter.start()

    def pause(self) -> None:
        self.zerosync.counter.stop()

    def report(self) -> dict[str, int]:
        report = self.zerosync.report
        assert report is not None
        names = ("reductions", "bytes_sent", "floor_bytes", "peak_unreduced_bytes", "peak_held_bytes")
        return {name: getattr(report, name) for name in names}


class DDP(System):
    """DistributedDataParallel that synchronises in the last backward only."""

    def __init__(self, model: str) -> None:
        self.module = make_model(model)
        self.ddp = DistributedDataParallel(self.module, gradient_as_bucket_view=True)
        self.optimizer = make_optimizer(self.module)

    def step(self, batches: Sequence[torch.Tensor]) -> None:
        for number, batch in enumerate(batches, 1):
            with nullcontext() if number == len(batches) else self.ddp.no_sync():
                (gpt.next_byte_loss(self.ddp(batch), batch) / len(batches)).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def full(self, param: torch.nn.Parameter) -> torch.Tensor:
        return param.detach()


class FSDP2(System):
    """``fully_shard`` on every block and the root; gradients are reduced in the last backward only.

    Stage 2 keeps the gathered parameters over all micro-batches, stage 3 frees them after each use.
    """

    def __init__(self, model: str, stage: int) -> None:
        self.module: Any = make_model(model)
        self.stage = stage
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for part in (*self.module.blocks, self.module):
            fully_shard(part, mesh=mesh, reshard_after_forward=stage == 3)
        self.optimizer = make_optimizer(self.module)

    def step(self, batches: Sequence[torch.Tensor]) -> None:
        for number, batch in enumerate(batches, 1):
            last = number == len(batches)
            self.module.set_requires_gradient_sync(last)
            self.module.set_reshard_after_backward(last or self.stage == 3)
            (gpt.next_byte_loss(self.module(batch), batch) / len(batches)).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def full(self, param: torch.nn.Parameter) -> torch.Tensor:
        return param.detach().full_tensor()  # type: ignore[attr-defined]


def make_system(name: str, model: str, accumulate: int) -> System:
    """A system by its name; ``zerosync-2@25`` has a gradient budget of 25 % of the gradients' bytes, ``@all`` none."""
    kind, _, variant = name.partition("-")
    if kind == "ddp":
        return DDP(model)
    stage = int(variant[0])
    if kind == "fsdp2":
        return FSDP2(model, stage)
    if kind == "stock":
        return Stock(model, stage, accumulate)
    if kind == "coalesced":
        return Coalesced(model, stage, 1)
    options: dict[str, Any] = {"param_memory_budget": "all"} if variant.endswith("-held") else {}
    zero = {"round_robin_gradients": True} if variant.endswith("-rr") else {}
    percent = name.partition("@")[2]
    if percent.isdigit():
        with torch.device("meta"):
            size = sum(param.numel() * param.element_size() for param in make_model(model).parameters())
        options["grad_memory_budget"] = size * int(percent) // 100
    return ZeroSync(model, stage, options, **zero)
