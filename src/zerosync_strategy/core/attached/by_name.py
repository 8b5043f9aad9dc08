"""DeepSpeed's checkpoints of an optimizer that needs whole parameters: states are by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.distributed as dist

from zerosync_strategy.core.engine import zero
from zerosync_strategy.core.engine.saved_files import State, masters_of, torch_state_of, with_torch_state
from zerosync_strategy.core.optimizer.whole import WholeStepper


class StatesByName:
    """The checkpoint format of one optimizer: master weights in DeepSpeed's layout, and states by name, each whole."""

    def __init__(self, engine: Any, stepper: WholeStepper, names: Mapping[Any, str]) -> None:
        self._stepper, self._names = stepper, names
        self._group = zero.data_parallel_group(engine.optimizer)

    @staticmethod
    def check_options(engine: Any) -> None:
        """Raise ``ValueError`` if the configuration of ``engine`` does not fit an optimizer of whole parameters."""
        name = type(zero.stepping_optimizer(engine)).__name__
        if zero.offloads(engine.optimizer):
            raise ValueError(
                f"attach() found the optimizer {name}, which needs whole parameters, and"
                " 'zero_optimization.offload_optimizer'. Leave that out, or use an optimizer that updates each element"
                " by itself."
            )

    def own_names(self) -> list[list[str]]:
        """Return the names of the parameters that this rank owns, by the torch optimizer's groups."""
        return self._stepper.names(self._names)

    def save(self, stock: Callable[[], State]) -> State:
        """Return the state of the optimizer for a checkpoint; ``stock`` returns DeepSpeed's."""
        with self._stepper.masters_in_stock_layout():
            state = stock()
        return with_torch_state(state, self._stepper.by_name(torch_state_of(state), self._names))

    def load(self, of_ranks: Sequence[Any], optimizer_states: bool, stock: Callable[[Any], Any]) -> Any:
        """Load the saved states ``of_ranks``, of the same owners. ``stock`` loads DeepSpeed's."""
        rank = dist.get_rank(self._group)
        state = of_ranks[rank]
        states, masters = torch_state_of(state), self._stepper.own_masters(masters_of(state))
        if optimizer_states:
            states = self._stepper.by_number(states, self._names)
        loaded: list[Any] = [None] * dist.get_world_size(self._group)
        loaded[rank] = with_torch_state(state, states, masters)
        return stock(loaded)
