"""A training as rank 0 of W, of which the others do not exist: real DeepSpeed on torch's fake process group."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from zerosync_strategy.core.comm import messages
from zerosync_strategy.core.engine import contract, torch_internals
from zerosync_strategy.core.handle import attach
from zerosync_strategy.tools.plan.jobs import STOCK, Cluster, OptionSet, UsageError, Workload
from zerosync_strategy.tools.plan.models import build, loss_of, shape_of


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


class Training:
    """An engine with ZeroSync attached, or without, and what it trains.

    Args:
        backwards: of one optimizer step.

    Attributes:
        module, engine, zerosync: ``zerosync`` is ``None`` for stock DeepSpeed.
        parameters: number of elements of the model.
        batch: shape of a micro-batch.
        options: of ZeroSync, in force.
    """

    def __init__(self, workload: Workload, options: OptionSet, backwards: int) -> None:
        import deepspeed

        optimizer: Any = getattr(torch.optim, workload.optimizer, None)
        is_one = isinstance(optimizer, type) and issubclass(optimizer, torch.optim.Optimizer)
        if not is_one:
            raise UsageError(f"optimizer {workload.optimizer!r} is no class of torch.optim, such as AdamW or SGD.")
        self.backwards = backwards
        self.module, self._batch = build(workload)
        self.batch = shape_of(self._batch)
        params = list(self.module.parameters())
        self.parameters = sum(param.numel() for param in params)
        nbytes = sum(param.numel() * param.element_size() for param in params)
        self.engine, *_ = deepspeed.initialize(
            model=self.module,
            optimizer=optimizer(params, lr=1e-4),
            config=_configuration(workload, options, backwards),
            dist_init_required=False,
        )
        self.options = dict(options.options)
        match self.options.get("param_memory_budget"):
            case float(part):
                self.options["param_memory_budget"] = int(part * nbytes)
            case {"device": float(part), **others}:
                self.options["param_memory_budget"] = {"device": int(part * nbytes), **others}
        self.zerosync = None if options.system == STOCK else attach(self.engine, **self.options)

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
