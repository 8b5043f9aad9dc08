"""An attached engine of ZeRO-1 or ZeRO-2: optimizer states in stripes, parameters gathered after a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from zerosync_strategy.core.attached.engine import AttachedEngine
from zerosync_strategy.core.attached.meter import StepMeter
from zerosync_strategy.core.budgets.automatic import automatic_budgets
from zerosync_strategy.core.engine import compilation, zero, zero3, zero12
from zerosync_strategy.core.failures.doing import Doing
from zerosync_strategy.core.gradients.stage12 import Stage12Reducer
from zerosync_strategy.core.optimizer.pending import FlatPendingGradients
from zerosync_strategy.core.optimizer.states import StripedStates
from zerosync_strategy.core.options.config import ZeroSyncConfig
from zerosync_strategy.core.params.arriving import ArrivingParameters
from zerosync_strategy.core.params.edits import Weights, restore_flat_parameters, weights_of_stage_1_2


class Stage12Engine(AttachedEngine):
    """The parts that only stages 1 and 2 have. ``arriving`` has gathers in flight with ``overlap_gather`` only."""

    reducer_class = Stage12Reducer
    reducer: Stage12Reducer

    def __init__(self, engine: Any, config: ZeroSyncConfig) -> None:
        super().__init__(engine, config)
        self.states = self._make_states()
        self.arriving = ArrivingParameters(self.reducer.streams, self.activity)
        common = (engine, self.reducer, self.window, self.activity, self.traffic.apart)
        self.pending = FlatPendingGradients(*common, states=self.states)
        self.meter = StepMeter(engine.module, self.traffic, self.window, self.reducer)
        self.budgets = automatic_budgets(engine, config, self.reducer)
        self._times_written = 0  # parameters, by steps and checkpoints

    @classmethod
    def check_options(cls, engine: Any, config: ZeroSyncConfig) -> None:
        super().check_options(engine, config)
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

    def _make_states(self) -> StripedStates:
        return StripedStates(self.reducer)

    def wait_for_parameters(self) -> None:
        self.arriving.wait_for_all()

    def parameters_written(self, by_step: bool) -> None:
        self._times_written += 1

    def adopt_edits(self) -> None:
        restore_flat_parameters(self.engine.optimizer, self.reducer.groups, self.names)
        self.masters.adopt(self._weights())

    def change_masters(self, change: Callable[[], None]) -> None:
        self.wait_for_parameters()
        self.states.to_stripes()
        self.adopt_edits()
        self.stepper.change(change)
        self.reducer.give_masters()
        self.masters.stepped(self._weights())

    def version(self) -> int:
        self.wait_for_parameters()
        return self._times_written

    def _weights(self) -> Iterator[Weights]:
        own = map(self.states.slices, self.reducer.layouts)
        return weights_of_stage_1_2(self.engine.optimizer, zip(self.reducer.groups, own, strict=True))

    @contextmanager
    def forward(self) -> Iterator[None]:
        if self.arriving.is_waiting and compilation.is_compiled(self.engine.module):
            self.arriving.wait_for_all()  # graphs are guarded by the classes of parameters
        with self.activity(Doing.FORWARD):
            yield

    def _before_update(self) -> None:
        with self.traffic.apart("checkpoints"):  # which have left them in DeepSpeed's layout
            self.states.to_stripes()
        self.adopt_edits()
        if zero.offloads(self.engine.optimizer):
            self.reducer.norm()  # for which the host waits, and so for its copies of the gradients

    @contextmanager
    def gather_parameters(self) -> Iterator[None]:
        """Around the step of DeepSpeed's optimizer, which gathers parameters."""
        overlap = self.arriving.launched if self.config.overlap_gather else None
        try:
            with zero12.parameter_gather(self.engine.optimizer, lambda: self.reducer.gather_parameters(overlap)):
                yield
        except BaseException:
            self.reducer.join_gathers()
            raise

    def _after_update(self) -> None:
        self.states.check()
        if self.config.overlap_gather:
            self.arriving.begin()
        else:
            self.masters.stepped(self._weights())

    def in_stock_layout(self) -> None:
        self.wait_for_parameters()
        self.states.to_stock()
