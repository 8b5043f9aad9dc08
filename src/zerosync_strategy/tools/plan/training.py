"""A training as rank 0 of W, of which the others do not exist: real DeepSpeed on torch's fake process group."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from zerosync_strategy.core.attached.stage3 import Stage3Engine
from zerosync_strategy.core.attaching import attach
from zerosync_strategy.core.comm import messages
from zerosync_strategy.core.comm.traffic import CollectiveCounter
from zerosync_strategy.core.engine import contract, torch_internals, zero, zero3
from zerosync_strategy.core.optimizer.problems import needs_whole_parameters
from zerosync_strategy.core.options.budgets import AUTO
from zerosync_strategy.tools.plan.jobs import (
    BETWEEN,
    CHANGES,
    STOCK,
    WITHIN,
    Cluster,
    LeftOut,
    OptionSet,
    UsageError,
    Workload,
)
from zerosync_strategy.tools.plan.models import build, imported, loss_of, shape_of


def join(cluster: Cluster) -> None:
    """Make the process group of this process, rank 0 of ``cluster``, as on its backend."""
    contract.require(torch_internals.PLAN)
    from torch.testing._internal.distributed.fake_pg import FakeStore

    on_one_node = cluster.per_node == cluster.ranks
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=cluster.ranks)
    if cluster.backend == "gloo":
        # By these two ZeroSync chooses how to send.
        dist.get_backend_config = lambda group=None: "cpu:gloo"
        messages.on_one_host = lambda process_group: on_one_node


class LevelCounter(CollectiveCounter):
    """Counts by kind and, where nodes have several ranks, by whether ranks of one node meet, or one of each node."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__()
        self._cluster = cluster
        self._levels: dict[Any, str] = {}  # by process group

    def _add(self, kind: str, nbytes: int, process_group: Any, to: int | None, distinct: bool = False) -> None:
        super()._add(kind + self._level(process_group, to), nbytes, process_group, to, distinct)

    def _level(self, process_group: Any, to: int | None) -> str:
        if not self._cluster.has_levels:
            return ""
        if to is not None:
            return WITHIN if to < self._cluster.per_node else BETWEEN  # of rank 0
        if process_group not in self._levels:
            ranks = dist.get_process_group_ranks(process_group)
            nodes = {rank // self._cluster.per_node for rank in ranks}
            self._levels[process_group] = {1: WITHIN, len(ranks): BETWEEN}.get(len(nodes), "")
        return self._levels[process_group]


class Training:
    """An engine with ZeroSync attached, or without, and what it trains.

    Args:
        backwards: of one optimizer step.

    Attributes:
        module, engine, zerosync: ``zerosync`` is ``None`` for stock DeepSpeed.
        parameters: number of elements of the model.
        batch: shape of a micro-batch.
        options: of ZeroSync, in force. What a step changes needs its arithmetic, and the other ranks': it is left out.
        nbytes_once: bytes of each gradient, as it is reduced, and of each parameter that is trained.

    Raises:
        LeftOut: its optimizer needs whole parameters, which these options do not give it.
    """

    def __init__(self, workload: Workload, options: OptionSet, cluster: Cluster, backwards: int) -> None:
        import deepspeed

        self.backwards = backwards
        self.module, self._batch = build(workload)
        self.batch = shape_of(self._batch)
        optimizer = _optimizer(workload.optimizer, self.module)
        shards_alone = options.system == STOCK or options.options.get(CHANGES)
        if shards_alone and needs_whole_parameters(optimizer, options.options.get("elementwise_optimizer", False)):
            raise LeftOut
        params = list(self.module.parameters())
        self.parameters = sum(param.numel() for param in params)
        nbytes = sum(param.numel() * param.element_size() for param in params)
        trained = [param for param in params if param.requires_grad]
        elements = sum(param.numel() for param in trained)
        in_parameters = sum(param.numel() * param.element_size() for param in trained)
        self.engine, *_ = deepspeed.initialize(
            model=self.module,
            optimizer=optimizer,
            config=_configuration(workload, options, backwards),
            dist_init_required=False,
        )
        self.options = {name: value for name, value in options.options.items() if name != CHANGES}
        match self.options.get("param_memory_budget"):
            case float(part):
                self.options["param_memory_budget"] = int(part * nbytes)
            case {"device": float(part), **others}:
                self.options["param_memory_budget"] = {"device": int(part * nbytes), **others}
        reduced_in = zero.reduction_dtype(self.engine.optimizer)
        self.nbytes_once = in_parameters + reduced_in.itemsize * elements
        nodes = {"node_size": cluster.per_node} if self.options.get("node_size", AUTO) == AUTO else {}
        self.zerosync = None if options.system == STOCK else attach(self.engine, **self.options | nodes)

    def node_shards(self) -> list[torch.Tensor]:
        """Return what is kept in node shards now."""
        return [] if self.zerosync is None else self.zerosync._attached.node_shards()

    def gathered_by_changes(self) -> int:
        """Return how many elements ``gather_changes`` would gather by their changes after the step that comes.

        On stages 1 and 2 all that is trained; on stage 3 of that what is held on the device now.
        """
        if self.zerosync is None:
            return 0
        params = [param for param in self.module.parameters() if param.requires_grad]
        attached = self.zerosync._attached
        if isinstance(attached, Stage3Engine):
            held = {record.param for record in attached.cache.plan.held()}
            params = [param for param in params if param in held and not zero3.is_persistent(param)]
        return sum(map(zero3.full_numel, params))

    def forward(self) -> Any:
        """Return the loss of the micro-batch."""
        return loss_of(self.engine, self._batch) / (1 if self.zerosync is None else self.backwards)

    def backward(self, loss: Any) -> None:
        """Backward, and what stock DeepSpeed does after it."""
        is_stock = self.zerosync is None
        self.engine.backward(loss)
        if is_stock and not self.engine.is_gradient_accumulation_boundary():
            self.engine.step()

    def step(self) -> None:
        """Step the optimizer.

        Raises:
            RuntimeError: nothing was stepped.
        """
        before = self.engine.skipped_steps
        self.engine.step()
        if self.engine.skipped_steps != before:
            raise RuntimeError("a step was skipped: gradients are not finite. Plan with a batch of usual values.")


def _optimizer(name: str, module: torch.nn.Module) -> Any:
    if ":" in name:
        return imported("optimizer", name)(module)
    cls: Any = getattr(torch.optim, name, None)
    if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)):
        raise UsageError(
            f"optimizer {name!r} is no class of torch.optim, such as AdamW or SGD. Others are package.module:function,"
            " which is given the module."
        )
    try:
        return cls(module.parameters(), lr=1e-4)  # type: ignore[call-arg]
    except ValueError as problem:
        raise UsageError(
            f"optimizer {name!r}: {problem}. Give package.module:function, which makes one of the module."
        ) from problem


def _configuration(workload: Workload, options: OptionSet, backwards: int) -> dict[str, Any]:
    given: dict[str, Any] = {name: value for name, value in workload.deepspeed.items() if name != "zerosync"}
    zero = {**given.pop("zero_optimization", {}), "stage": options.stage}
    for name in ("train_batch_size", "optimizer", "scheduler", "fp16"):
        given.pop(name, None)
    return {
        "gradient_clipping": 0.0,
        **given,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": backwards if options.system == STOCK else 1,
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": workload.dtype == "bf16"},
        "zero_optimization": zero,
    }
