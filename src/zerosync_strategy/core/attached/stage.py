"""The interface of what ZeRO's stages do with the parameters of an engine (``flat.py``, ``sharded.py``)."""

# ruff: noqa: B027  (a stage that has nothing to do at an event has no method for it)

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import nn

from zerosync_strategy.core.attached.statistics import RunningStatistics
from zerosync_strategy.core.checkpoints.background import StagingMemory
from zerosync_strategy.core.comm.journal import SentCounter
from zerosync_strategy.core.engine.types import DeepSpeedEngine
from zerosync_strategy.core.gradients.reducer import FirstUses, Reducer
from zerosync_strategy.core.gradients.window import Window
from zerosync_strategy.core.optimizer.edits import MasterWeights
from zerosync_strategy.core.optimizer.masters import Masters
from zerosync_strategy.core.optimizer.pending import PendingGradients, Section
from zerosync_strategy.core.optimizer.stepper import Stepper
from zerosync_strategy.core.options import ZeroSyncConfig
from zerosync_strategy.core.params.module_parameters import ModuleParameters
from zerosync_strategy.core.params.scheduler import GatherScheduler

Around = Callable[[], AbstractContextManager[None]]
"""Makes a context around something; ``nullcontext`` where a stage has nothing to do there."""


@dataclass(frozen=True)
class EngineParts:
    """The parts of an attached engine that its stage uses.

    Attributes:
        names: of the module's parameters.
        edits: takes what the program has written to parameters into the master weights.
        statistics: of BatchNorm and the like, alike on all ranks after a step; ``None``: the module has none.
        counter: of what the engine sends.
        copies: of what checkpoints in the background have; ``None``: they are written at once.
        activity: makes a context of what may communicate, for errors (W4).
        apart: makes a context in which traffic is not counted for the step.
    """

    engine: DeepSpeedEngine
    config: ZeroSyncConfig
    names: dict[nn.Parameter, str]
    reducer: Reducer
    window: Window
    edits: MasterWeights
    statistics: RunningStatistics | None
    counter: SentCounter
    copies: StagingMemory | None
    activity: Section
    apart: Section

    @property
    def of_pending(self) -> tuple[DeepSpeedEngine, Reducer, Window, Section, Section]:
        """What :class:`PendingGradients` is made of."""
        return self.engine, self.reducer, self.window, self.activity, self.apart


class Stage(ABC):
    """What one ZeRO stage does with the parameters of one attached engine.

    The methods stand in the order in which forwards, backwards and the step call them. Those for saves, loads, edits
    and exchanges of weights follow.

    Attributes:
        masters: the master weights that this rank steps.
        stepper: makes the step of the torch optimizer.
        pending: the gradients of the window, for the program.
        scheduler: of gathers. ``of_module``: shared by all engines of the module. ``None``: the stage gathers nothing.
    """

    masters: Masters
    stepper: Stepper
    pending: PendingGradients
    scheduler: GatherScheduler | None = None
    of_module: ModuleParameters | None = None

    # ---- forwards and backwards ----------------------------------------------------------------------------------

    @abstractmethod
    def forward(self) -> AbstractContextManager[None]:
        """Around a forward."""

    backward: Around = nullcontext
    """Around ``engine.backward``."""

    @abstractmethod
    def backward_begins(self, opens: bool) -> FirstUses | None:
        """Called when a backward of the window begins; ``opens``: it is the first.

        Return when the forward first used each parameter; ``None`` if the backward gathers none on its way.
        """

    # ---- the step ------------------------------------------------------------------------------------------------

    @abstractmethod
    def pass_issued(self) -> None:
        """Called in a step, when all gradients are being reduced, before the norm."""

    @abstractmethod
    def before_update(self) -> None:
        """Called in a step before the optimizer steps. Gradients may still be reduced, so nothing may read them."""

    updating: Around
    """Around the optimizer's step."""

    @abstractmethod
    def after_update(self) -> None:
        """Called when the optimizer has stepped."""

    # ---- weights -------------------------------------------------------------------------------------------------

    as_they_are: Around = nullcontext
    """Around DeepSpeed's own work on parameters: its reads do not unshard them."""

    @abstractmethod
    def written(self, by_step: bool) -> None:
        """Record that a step has written the parameters, or that a checkpoint was loaded, perhaps partly."""

    @abstractmethod
    def version(self) -> int:
        """Return a number that grows whenever a step or a checkpoint changes the parameters."""

    @abstractmethod
    def adopt_edits(self) -> None:
        """Take the program's edits of parameters into the master weights, before a step or a checkpoint (N1)."""

    @abstractmethod
    def change_masters(self, change: Callable[[], None]) -> None:
        """Let ``change`` change the master weights, and give all ranks the resulting parameters. Collective."""

    @abstractmethod
    def take_masters(self, others: Iterable[nn.Parameter]) -> None:
        """Give all ranks the parameters of the loaded master weights. Collective.

        ``others``: parameters that are not in the optimizer, of which this rank has loaded its shard.
        """

    def in_step_layout(self) -> None:
        """Bring the optimizer's shards into the layout of a step. Collective if they are in DeepSpeed's."""

    def in_stock_layout(self) -> None:
        """Restore DeepSpeed's layout before it reads or writes the optimizer's shards. Collective after a step."""

    def before_save(self) -> None:
        """Called before a checkpoint is written."""

    def release_held(self) -> None:
        """Reshard held parameters, because a checkpoint is about to read or write shards."""

    def node_shards(self) -> list[torch.Tensor]:
        """Return the present node shards of parameters."""
        return []

    # ---- other events, and the end -------------------------------------------------------------------------------

    reading: Around = nullcontext
    """Around a call of the program: what it gathers counts for this one of the module's engines."""

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """While active, all parameters are gathered. Collective."""
        yield

    def compiling(self) -> None:
        """Called before DeepCompile compiles the engine; its graphs gather from then on."""

    @abstractmethod
    def sends(self, nbytes: int) -> str:
        """Return in words what a step sends of the parameters; sending them once takes ``nbytes``."""

    def detach(self) -> None:
        """Undo what the stage has set up."""

    def detached(self, destroyed: bool) -> None:
        """Called when the engine is restored, or ``destroyed``."""
