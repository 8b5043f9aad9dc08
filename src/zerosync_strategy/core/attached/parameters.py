"""What ZeRO's stages do otherwise with parameters in the course of a window: the events of the one and of the other."""

# ruff: noqa: B027  (a stage that has nothing to do at an event has no method for it)

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from zerosync_strategy.core.comm.traffic import EngineCounter
from zerosync_strategy.core.gradients.reducer import Reducer
from zerosync_strategy.core.gradients.window import Window
from zerosync_strategy.core.optimizer.pending import Section
from zerosync_strategy.core.options.config import ZeroSyncConfig
from zerosync_strategy.core.params.edits import MasterWeights
from zerosync_strategy.core.params.scheduler import GatherScheduler


@dataclass(frozen=True)
class Parts:
    """What an attached engine has before its parameters, and they use.

    Attributes:
        names: of the module's parameters.
        edits: finds what the program has written to parameters, for what the optimizer steps.
        activity: a context around what may communicate (W4).
    """

    engine: Any
    config: ZeroSyncConfig
    names: dict[Any, str]
    reducer: Reducer
    window: Window
    edits: MasterWeights
    traffic: EngineCounter
    activity: Section


class Weights(ABC):
    """What saves, loads, edits and exchanges see of the parameters of one attached engine, by its stage."""

    scheduler: GatherScheduler | None = None

    def as_they_are(self) -> AbstractContextManager[None]:
        """Around DeepSpeed's own work on parameters: what it reads is not unsharded for it."""
        return nullcontext()

    @abstractmethod
    def written(self, by_step: bool) -> None:
        """A step has written the parameters, or a checkpoint was loaded, perhaps half-way."""

    @abstractmethod
    def version(self) -> int:
        """Return a number that grows whenever a step or a checkpoint changes the parameters."""

    @abstractmethod
    def adopt_edits(self) -> None:
        """Let a step or a checkpoint start from the parameters as the program has left them (N1)."""

    @abstractmethod
    def change_masters(self, change: Callable[[], None]) -> None:
        """Let ``change`` change the weights that the optimizer steps, and all ranks have the parameters. Collective."""

    def in_stock_layout(self) -> None:
        """DeepSpeed is about to read or write the optimizer's shards, in its own layout. Collective after a step."""

    def before_save(self) -> None:
        """A checkpoint is about to be written."""

    def release_held(self) -> None:
        """A checkpoint is about to read or write shards: release what is gathered of them."""

    def node_shards(self) -> list[torch.Tensor]:
        """Return what is kept of parameters in shards of the node now."""
        return []


class Parameters(ABC):
    """What trains the parameters of one attached engine, by its stage (``flat.py``, ``sharded.py``).

    The methods are called in the order in which they stand here: by forwards and backwards, by the step, in the end.
    """

    # ---- forwards and backwards ----------------------------------------------------------------------------------

    @abstractmethod
    def forward(self) -> AbstractContextManager[None]:
        """Around a forward."""

    def backward(self) -> AbstractContextManager[None]:
        """Around ``engine.backward``."""
        return nullcontext()

    def graph_begins(self) -> None:
        """From inside an autograd graph, before the first gradient."""

    def backward_begins(self) -> None:
        """A backward of the window begins."""

    def first_uses(self) -> Mapping[int, int] | None:
        """Return when the forward has used each parameter first, where the backward gathers some between others."""
        return None

    # ---- the step ------------------------------------------------------------------------------------------------

    def before_reduction(self) -> None:
        """A step has begun; the gradients are about to be reduced."""

    @abstractmethod
    def before_update(self) -> None:
        """The gradients are reduced; the optimizer is about to step."""

    def updating(self) -> AbstractContextManager[None]:
        """Around the optimizer's step."""
        return nullcontext()

    @abstractmethod
    def after_update(self) -> None:
        """The optimizer has stepped."""

    # ---- what else, and the end ----------------------------------------------------------------------------------

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """While active, all parameters are gathered. Collective."""
        yield

    def compiling(self) -> None:
        """DeepCompile is about to compile the engine, and gathers by itself from here on."""

    @abstractmethod
    def sends(self, nbytes: int) -> str:
        """Return in words what a step sends of the parameters, which have ``nbytes`` to send once."""

    def detach(self) -> None:
        """Detach what the stage has of its own."""

    def detached(self, destroyed: bool) -> None:
        """The engine is as it was, or ``destroyed``."""
