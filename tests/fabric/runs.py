"""One way to make a Fabric, and the loop that most tests run: shared by the Fabric tests."""

import inspect
import logging
import warnings
from collections.abc import Callable
from typing import Any

import torch
from lightning.fabric import Fabric
from torch import nn

from tests.harness.oracle import Oracle
from tests.harness.problem import WORLD, Data, backward_of, loss_of, network, sgd
from zerosync_strategy.fabric import ZeroSyncFabricStrategy


def make_fabric(
    stage: int | None, fabric: type = Fabric, strategy: Any = ZeroSyncFabricStrategy, **options: Any
) -> Any:
    """A launched Fabric on CPU over the ranks of this job; options of Fabric itself, and of the strategy."""
    logging.getLogger("lightning.fabric").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=UserWarning, module="lightning")
    of_fabric = {name: options.pop(name) for name in ("precision", "plugins", "callbacks") if name in options}
    if stage == 3 and not options:
        options["config"] = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}  # else all are persistent
    made = fabric(accelerator="cpu", devices=WORLD, strategy=strategy(stage, **options), **of_fabric)
    made.launch()
    return made


def trained(
    fabric: Any, optimizer: Callable[[Any], torch.optim.Optimizer] = sgd, make: Callable[[], nn.Module] = network
) -> Any:
    """A model and its optimizer, set up."""
    net = make()
    return fabric.setup(net, optimizer(net.parameters()))


def set_up(fabric: Any, net: nn.Module, optimizer: Any, scheduler: Any) -> tuple[Any, Any, Any]:
    """`fabric.setup()`, with the scheduler where this release of Fabric takes one."""
    if "scheduler" in inspect.signature(fabric.setup).parameters:
        return fabric.setup(net, optimizer, scheduler=scheduler)
    return *fabric.setup(net, optimizer), scheduler


def losses(fabric: Any, model: nn.Module, batches: range, every: int = 1) -> Any:
    """The loss of each of this rank's batches, as a share of the mean over `every`."""
    data = Data(64)
    for batch in batches:
        yield loss_of(model, data.batch(batch, fabric.global_rank)) / every


def backward(plain: Oracle, batches: range, every: int = 1) -> None:
    """The same backwards of the oracle, on every rank."""
    for batch in batches:
        backward_of(plain, batch, every)
