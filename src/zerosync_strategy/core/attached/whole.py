"""Attached engines whose optimizer needs whole parameters: each has an owner, the rank that steps it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from zerosync_strategy.core.attached.engine import AttachedEngine
from zerosync_strategy.core.attached.stage3 import Stage3Engine
from zerosync_strategy.core.attached.stage12 import Stage12Engine
from zerosync_strategy.core.engine import checkpoint_files, zero, zero3_optimizer, zero12
from zerosync_strategy.core.gradients.owned import OwnedReducer
from zerosync_strategy.core.optimizer.exchanged import ExchangedStep
from zerosync_strategy.core.optimizer.whole import OwnedStates, OwnedStep, WholeStep
from zerosync_strategy.core.options.config import ZeroSyncConfig


class WholeEngine(AttachedEngine):
    """What they have in common."""

    frozen: WholeStep

    def detach(self) -> NoReturn:
        raise RuntimeError(
            f"detach() found the optimizer {type(zero.stepping_optimizer(self.engine)).__name__}, which needs whole"
            " parameters: DeepSpeed would step flat shards. Leave the engine attached, or build it anew."
        )

    @abstractmethod
    def loaded(self, saved: Sequence[Any], optimizer_states: bool) -> list[Any]:
        """Return what DeepSpeed is to load in place of ``saved``, of which this rank's own is read."""

    def _own_rank(self) -> int:
        return dist.get_rank(zero.data_parallel_group(self.engine.optimizer))


class WholeStage12Engine(WholeEngine, Stage12Engine):
    """An engine of stage 1 or 2: a rank's shard is what it owns."""

    reducer: OwnedReducer
    frozen: OwnedStep

    @staticmethod
    def check_options(engine: Any, config: ZeroSyncConfig) -> None:
        _check_options(engine)
        if config.gather_changes:
            raise ValueError(
                f"ZeroSync option 'gather_changes' got {config.gather_changes!r}, and the optimizer"
                f" {type(zero.stepping_optimizer(engine)).__name__} needs whole parameters: ranks have parts of other"
                " sizes, whose codes would have, too. Leave it out."
            )
        Stage12Engine.check_options(engine, config)

    def _make_reducer(self) -> OwnedReducer:
        return OwnedReducer(self.engine.optimizer, self.config, self.names, self.messages, self.topology)

    def _make_frozen(self) -> OwnedStep:
        return OwnedStep(self.reducer)

    def _make_states(self) -> OwnedStates:
        return OwnedStates(self.reducer, self.frozen)

    def save(self, stock: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the state of the optimizer for a checkpoint: master weights in DeepSpeed's layout, states by name."""
        with zero12.masters_replaced(self.engine.optimizer, self.frozen.stock_masters()):
            state = stock()
        states = self.frozen.by_name(zero12.saved_states(state), self.names)
        return zero12.with_saved(state, zero12.saved_masters(state), states)

    def loaded(self, saved: Sequence[Any], optimizer_states: bool) -> list[Any]:
        state, own = list(saved), self._own_rank()
        masters = self.frozen.own_masters(zero12.saved_masters(state[own]))
        states = zero12.saved_states(state[own])
        if optimizer_states:
            states = self.frozen.by_number(states, self.names)
        state[own] = zero12.with_saved(state[own], masters, states)
        return state


class WholeStage3Engine(WholeEngine, Stage3Engine):
    """An engine of stage 3: shards go to owners before a step, and back after it."""

    frozen: ExchangedStep

    @staticmethod
    def check_options(engine: Any, config: ZeroSyncConfig) -> None:
        _check_options(engine)
        Stage3Engine.check_options(engine, config)

    def _make_frozen(self) -> ExchangedStep:
        return ExchangedStep(self.reducer, self.masters.digest)

    def save(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return the state of the optimizer for a checkpoint, with the states of parameters by name."""
        states = self.frozen.by_name(zero3_optimizer.saved_states(state), self.names)
        return zero3_optimizer.with_saved_states(state, states)

    def loaded(self, saved: Sequence[Any], optimizer_states: bool) -> list[Any]:
        state, own = list(saved), self._own_rank()
        if optimizer_states:
            states = self.frozen.by_number(zero3_optimizer.saved_states(state[own]), self.names)
            state[own] = zero3_optimizer.with_saved_states(state[own], states)
        return state

    def read_state(self, param: Any, key: str) -> torch.Tensor:
        """Return a state of ``param``; see :meth:`WholeStep.read_state`. Collective."""
        layout = next(layout for layout in self.reducer.layouts if param in layout.columns)
        return self.frozen.read_state(param, key, self.frozen.owners[param], layout.process_group)

    def refuse_local_state(self, function: str) -> NoReturn:
        """Raise: a rank has no shard of a state."""
        raise ValueError(
            f"{function} found an optimizer that needs whole parameters, whose states are not sharded. Use"
            " safe_get_full_optimizer_state() or safe_set_full_optimizer_state()."
        )


def _check_options(engine: Any) -> None:
    """Raise a ``ValueError`` where DeepSpeed is to keep or to load states by element."""
    name = type(zero.stepping_optimizer(engine)).__name__
    if zero.offloads(engine.optimizer):
        raise ValueError(
            f"attach() found the optimizer {name}, which needs whole parameters, and"
            " 'zero_optimization.offload_optimizer'. Leave that out, or use an optimizer that updates each element by"
            " itself."
        )
    if checkpoint_files.loads_universal(engine):
        raise ValueError(
            f"attach() found the optimizer {name}, which needs whole parameters, and 'checkpoint.load_universal' ="
            " true, which has states by element. Load a checkpoint of as many ranks, or use an optimizer that updates"
            " each element by itself."
        )
