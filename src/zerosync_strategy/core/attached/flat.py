"""ZeRO-1 and ZeRO-2: every rank has the parameters and steps a stripe of each bucket; the step gathers the result."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager

from torch import nn

from zerosync_strategy.core.attached.stage import EngineParts, Stage
from zerosync_strategy.core.engine import zero, zero3, zero12
from zerosync_strategy.core.engine.types import DeepSpeedEngine
from zerosync_strategy.core.failures.rank_state import Doing
from zerosync_strategy.core.gradients.stage12 import FlatShards
from zerosync_strategy.core.optimizer.edits import WeightPair, restore_flat_parameters
from zerosync_strategy.core.optimizer.masters import FlatMasters, StripedStates
from zerosync_strategy.core.optimizer.pending import FlatPendingGradients
from zerosync_strategy.core.optimizer.stepper import Stepper
from zerosync_strategy.core.optimizer.whole import OwnedStepper
from zerosync_strategy.core.options import ZeroSyncConfig
from zerosync_strategy.core.report import size_text


class FlatStage(Stage):
    """Stages 1 and 2: full parameters on each rank, in flat buffers, and master weights of its stripes.

    Attributes:
        states: the optimizer's, by stripes or in DeepSpeed's layout.
    """

    masters: FlatMasters

    def __init__(self, parts: EngineParts, shards: FlatShards, whole: bool) -> None:
        self._parts, self._shards, self._optimizer = parts, shards, shards.optimizer
        self.masters = FlatMasters(shards, lambda: parts.reducer.pipeline.windows_closed)
        self.states = StripedStates(shards)
        owned = OwnedStepper(shards, self.masters) if whole else None
        self.stepper = owned or Stepper(shards, self.masters)
        self.pending = FlatPendingGradients(*parts.of_pending, states=self.states, whole=owned)
        parts.window.begins = self.backward_begins
        self._times_written = 0  # by steps and checkpoints

    @staticmethod
    def check_options(engine: DeepSpeedEngine, config: ZeroSyncConfig) -> None:
        """Raise ``ValueError`` if an option is for another stage than that of ``engine``."""
        stage = zero.stage(engine)
        if config.parameters.keeps_any:
            raise ValueError(
                "ZeroSync option 'param_memory_budget' holds the gathered parameters of ZeRO stage 3, found stage"
                f" {stage}. Leave it out, or use stage 3."
            )
        if config.unit_modules is not None:
            raise ValueError(
                "ZeroSync option 'unit_modules' says what ZeRO stage 3 gathers as a whole, found stage"
                f" {stage}. Leave it out, or use stage 3."
            )
        if any(map(zero3.has_own_group, engine.module.parameters())):
            raise ValueError(
                f"shard_over() shards parameters of ZeRO stage 3, found stage {stage}. Use stage 3, or leave it out."
            )

    def forward(self) -> AbstractContextManager[None]:
        self._parts.window.forward_begins()
        return self._parts.activity(Doing.FORWARD)

    def backward_begins(self, opens: bool) -> None:
        self.stepper.backward_begins(opens)

    def pass_issued(self) -> None:
        """Nothing is compared."""

    def before_update(self) -> None:
        self.masters.forget_gathers()
        with self._parts.counter.apart("checkpoints"):  # these have left the states in DeepSpeed's layout
            self.states.lay_out(stock=False)
        self.adopt_edits()

    @contextmanager
    def updating(self) -> Iterator[None]:
        """The parameters that the step has updated are gathered by ours, and not by DeepSpeed."""
        if zero.offloads(self._optimizer):
            self._parts.reducer.norm.value()  # the host waits for it, and so for its copies of the gradients
        try:
            with zero12.parameter_gather(self._optimizer, self.masters.give):
                yield
        except BaseException:
            self.masters.join_gathers()
            raise

    def after_update(self) -> None:
        self.states.check()
        self._parts.edits.stepped(self._stepped())

    # ---- weights -------------------------------------------------------------------------------------------------

    def written(self, by_step: bool) -> None:
        self._times_written += 1

    def version(self) -> int:
        return self._times_written

    def adopt_edits(self) -> None:
        restore_flat_parameters(self._shards.optimizer, self._shards.groups, self._parts.names)
        self._parts.edits.adopt(self._stepped())

    def change_masters(self, change: Callable[[], None]) -> None:
        self.states.lay_out(stock=False)
        self.adopt_edits()
        change()
        self.take_masters(())

    def take_masters(self, others: Iterable[nn.Parameter]) -> None:
        self.masters.give_changed()
        self._parts.edits.stepped(self._stepped())

    def _stepped(self) -> Iterator[WeightPair]:
        optimizer = self._shards.optimizer
        for group, layout in zip(self._shards.groups, self._shards.layouts, strict=True):
            flat, master = zero12.flat_parameters(optimizer, group.index), zero12.master(optimizer, group.index).data
            for own in self.states.slices(layout):
                yield flat[own.start : own.stop], master.narrow(0, own.offset, own.stop - own.start)

    def in_step_layout(self) -> None:
        self.states.lay_out(stock=False)

    def in_stock_layout(self) -> None:
        self.states.lay_out(stock=True)

    def sends(self, nbytes: int) -> str:
        return f"{size_text(nbytes)} of parameters once"
