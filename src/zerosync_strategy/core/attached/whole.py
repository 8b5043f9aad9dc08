"""An attached engine of ZeRO-1 or ZeRO-2 whose optimizer needs whole parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from zerosync_strategy.core.attached.stage12 import Stage12Engine
from zerosync_strategy.core.engine import checkpoint_files, zero, zero12
from zerosync_strategy.core.gradients.owned import OwnedReducer
from zerosync_strategy.core.optimizer.whole import OwnedStates, WholeStep
from zerosync_strategy.core.options.config import ZeroSyncConfig


class WholeStage12Engine(Stage12Engine):
    """The parts of an engine that gives each parameter to one rank, its owner."""

    reducer: OwnedReducer
    frozen: WholeStep

    @staticmethod
    def check_options(engine: Any, config: ZeroSyncConfig) -> None:
        Stage12Engine.check_options(engine, config)
        name = type(zero.stepping_optimizer(engine)).__name__
        if zero.offloads(engine.optimizer):
            raise ValueError(
                f"attach() found the optimizer {name}, which needs whole parameters, and"
                " 'zero_optimization.offload_optimizer'. Leave that out, or use an optimizer that updates each element"
                " by itself."
            )
        if checkpoint_files.loads_universal(engine):
            raise ValueError(
                f"attach() found the optimizer {name}, which needs whole parameters, and 'checkpoint.load_universal' ="
                " true, which has states by element. Load a checkpoint of as many ranks, or use an optimizer that"
                " updates each element by itself."
            )

    def _make_reducer(self) -> OwnedReducer:
        return OwnedReducer(self.engine.optimizer, self.config, self.names, self.messages, self.topology)

    def _make_frozen(self) -> WholeStep:
        return WholeStep(self.reducer)

    def _make_states(self) -> OwnedStates:
        return OwnedStates(self.reducer, self.frozen)

    # ---- checkpoints -----------------------------------------------------------------------------------------------

    def save(self, stock: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the state of the optimizer for a checkpoint: master weights in DeepSpeed's layout, states by name."""
        optimizer = self.engine.optimizer
        with zero12.masters_replaced(optimizer, self.frozen.stock_masters()):
            state = stock()
        states = self.frozen.by_name(zero12.saved_states(state), self.names)
        return zero12.with_saved(state, zero12.saved_masters(state), states)

    def loaded(self, saved: Sequence[Any]) -> list[Any]:
        """Return what DeepSpeed is to load in place of ``saved``, of which this rank's own is read."""
        state, own = list(saved), dist.get_rank(zero.data_parallel_group(self.engine.optimizer))
        masters = self.frozen.own_masters(zero12.saved_masters(state[own]))
        states = self.frozen.by_number(zero12.saved_states(state[own]), self.names)
        state[own] = zero12.with_saved(state[own], masters, states)
        return state

    def detach(self) -> None:
        raise RuntimeError(
            f"detach() found the optimizer {type(zero.stepping_optimizer(self.engine)).__name__}, which needs whole"
            " parameters: DeepSpeed would step flat shards. Leave the engine attached, or build it anew."
        )
