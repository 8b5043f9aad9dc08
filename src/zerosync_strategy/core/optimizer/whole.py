"""The step of an optimizer that needs whole parameters: this rank steps those that it owns, in their own shapes.

The groups of the program's own torch optimizer hold fp32 master weights in place of its parameters, for the parameters
that this rank owns. It steps once per optimizer step, with all groups. The states of a parameter are on its owner, and
by name in DeepSpeed's checkpoints.
"""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zerosync_strategy.core.comm.collectives import broadcast_object
from zerosync_strategy.core.engine import zero, zero12
from zerosync_strategy.core.engine.saved_files import SavedState, masters_of, torch_state_of, with_torch_state
from zerosync_strategy.core.engine.types import DeepSpeedEngine
from zerosync_strategy.core.gradients.owned import OwnedLayout
from zerosync_strategy.core.gradients.shards import GradientShards
from zerosync_strategy.core.gradients.stage12 import FlatShards
from zerosync_strategy.core.optimizer.masters import FlatMasters, Masters
from zerosync_strategy.core.optimizer.stepper import Stepper


class WholeStepper(Stepper):
    """Makes the torch optimizer step the parameters that this rank owns. Frozen ones have no gradient in the step.

    :attr:`masters` holds the master weights that the torch optimizer steps, by parameter that this rank owns. Raises a
    ``ValueError`` if the optimizer has already stepped DeepSpeed's flat shards.
    """

    def __init__(self, shards: GradientShards, masters: Masters) -> None:
        super().__init__(shards, masters)
        self.left_out: set[nn.Parameter] = set()  # frozen parameters, which the running step leaves out
        self.masters: dict[nn.Parameter, nn.Parameter] = {}
        if any(self._zero.optimizer.state.get(master.flat) for master in masters.by_param()):
            raise ValueError(
                f"attach() found that the optimizer {type(self._zero.optimizer).__name__}, which needs whole"
                " parameters, has stepped flat shards. Call attach() before the first step and before"
                " load_checkpoint()."
            )

    def take(self, groups: list[list[nn.Parameter]]) -> None:
        """Replace the parameters of the torch optimizer, in ``groups``, by this rank's :attr:`masters`."""
        optimizer = self._zero.optimizer
        made = dict(optimizer.state)  # states that its constructor made, also for frozen parameters
        for key in made:
            if isinstance(key, torch.Tensor):  # others are the optimizer's own, by name
                del optimizer.state[key]
        for group, params in zip(optimizer.param_groups, groups, strict=True):
            own = [param for param in params if param in self.masters]
            group["params"] = [self.masters[param] for param in own]
            for param in (param for param in own if made.get(param)):
                optimizer.state[self.masters[param]] = made[param]

    @contextmanager
    def stepping(self) -> Iterator[None]:
        self.left_out, self._frozen = self._frozen or set(), None
        try:
            yield
        finally:
            for master in self.masters.values():
                master.grad = None

    def change(self, change: Callable[[], None]) -> None:
        change()

    def states_of(self, param: nn.Parameter) -> dict[str, Any]:
        """Return the optimizer's states of ``param``; empty if another rank owns it."""
        master = self.masters.get(param)
        return {} if master is None else self._zero.optimizer.state.get(master, {})

    @abstractmethod
    def owner(self, param: nn.Parameter) -> tuple[int, dist.ProcessGroup]:
        """Return the rank of the owner of ``param`` in its process group, and the process group."""

    def read_state(self, param: nn.Parameter, key: str) -> torch.Tensor:
        """Return a state of ``param`` in fp32; a ``ValueError`` if it does not exist. Collective."""
        value = self.states_of(param).get(key)
        value = value.cpu() if isinstance(value, torch.Tensor) else None
        found = broadcast_object(value, *self.owner(param))
        if found is None:
            raise ValueError(f"{key!r} is no state of the optimizer's for this parameter.")
        return found.to(param.device, torch.float32)

    def write_state(self, param: nn.Parameter, value: torch.Tensor, key: str) -> None:
        """Set a state of ``param``, if this rank owns it; a ``ValueError`` if the state does not exist."""
        if param in self.masters:
            if not isinstance(target := self.states_of(param).get(key), torch.Tensor):
                raise ValueError(f"{key!r} is no state of the optimizer's for this parameter.")
            target.copy_(value)

    # ---- checkpoints -----------------------------------------------------------------------------------------------

    def state(self, names: Mapping[nn.Parameter, str], group: dist.ProcessGroup) -> Sequence[object]:
        return []

    def load(self, state: list[Any], names: Mapping[nn.Parameter, str]) -> None:
        self._frozen = None

    def by_name(self, state: dict[str, Any], names: Mapping[nn.Parameter, str]) -> dict[str, Any]:
        """Return the torch optimizer's ``state_dict()`` with names of parameters in place of numbers."""
        return _renamed(state, dict(enumerate(itertools.chain.from_iterable(self.names(names)))))

    def by_number(self, state: dict[str, Any], names: Mapping[nn.Parameter, str]) -> dict[str, Any]:
        """Return the ``state_dict()`` for the torch optimizer: the inverse of :meth:`by_name`, for owned parameters."""
        numbered = enumerate(itertools.chain.from_iterable(self.names(names)))
        return _renamed(state, {name: number for number, name in numbered})

    def names(self, names: Mapping[nn.Parameter, str]) -> list[list[str]]:
        """Return the names of the parameters that this rank owns, by the torch optimizer's groups."""
        param_of = {id(master): param for param, master in self.masters.items()}
        groups = self._zero.optimizer.param_groups
        return [[names[param_of[id(master)]] for master in group["params"]] for group in groups]

    @abstractmethod
    def give(self) -> None:
        """Send the owners' :attr:`masters` to all ranks. Collective."""

    def masters_in_stock_layout(self) -> AbstractContextManager[None]:
        """While active, DeepSpeed has this rank's master weights in its own layout. Collective."""
        return nullcontext()

    def own_masters(self, stock: list[torch.Tensor]) -> list[torch.Tensor] | None:
        """Convert saved master weights from DeepSpeed's layout; ``None``: load ``stock`` as it is. Collective."""
        return None


def _renamed(state: dict[str, Any], new: Mapping[Any, Any]) -> dict[str, Any]:
    """Return a torch optimizer's ``state_dict()`` with the keys of its parameters mapped by ``new``."""
    groups = [group | {"params": [new[key] for key in group["params"]]} for group in state["param_groups"]]
    # The optimizer's own states have names, which stay.
    states = {new.get(key, key): of_param for key, of_param in state["state"].items()}
    return {"state": states, "param_groups": groups}


class OwnedStepper(WholeStepper):
    """The stepper of stages 1 and 2: a rank's shards hold the parameters that it owns, and their gradients."""

    def __init__(self, shards: FlatShards, masters: FlatMasters) -> None:
        super().__init__(shards, masters)
        self._give = masters.give
        self._layouts = [layout for layout in shards.layouts if isinstance(layout, OwnedLayout)]
        groups: list[list[nn.Parameter]] = [[] for _ in self._zero.optimizer.param_groups]
        for layout in self._layouts:
            flat = zero12.give_own_master(self._zero, layout.group_index, layout.shard_numel)
            groups[layout.group_index] = zero12.params_in_order(self._zero, layout.group_index)
            self.masters |= {param: self._view(flat, layout, param) for param in layout.own_offsets}
        self.take(groups)

    @torch.no_grad()
    def _view(self, flat: torch.Tensor, layout: OwnedLayout, param: nn.Parameter) -> nn.Parameter:
        begin = layout.own_offsets[param]
        view = nn.Parameter(flat.data[begin : begin + param.numel()].view(param.shape))
        view.data.copy_(param)
        return view

    def step_group(self, index: int) -> None:
        """Take the gradients of the group ``index``, which DeepSpeed has prepared. With the last group, step."""
        for layout in (layout for layout in self._layouts if layout.group_index == index):
            flat = zero12.master(self._zero, index)
            for param, begin in layout.own_offsets.items():
                master, end = self.masters[param], begin + param.numel()
                master.data = flat.data[begin:end].view(param.shape)
                master.grad = None if param in self.left_out else flat.grad[begin:end].view(param.shape)
        if index == len(self._zero.optimizer.param_groups) - 1:
            zero.step_torch_optimizer(self._zero)

    def owner(self, param: nn.Parameter) -> tuple[int, dist.ProcessGroup]:
        layout = next(layout for layout in self._layouts if param in layout.owners)
        return layout.owners[param], layout.process_group

    @torch.no_grad()
    def give(self) -> None:
        self._give()

    def masters_in_stock_layout(self) -> AbstractContextManager[None]:
        masters = []
        for layout in self._layouts:
            master, flat = (each(self._zero, layout.group_index) for each in (zero12.master, zero12.flat_parameters))
            masters.append(layout.to_stock(master.data, flat.numel(), flat.device))
        return zero12.masters_replaced(self._zero, masters)

    def own_masters(self, stock: list[torch.Tensor]) -> list[torch.Tensor]:
        masters = []
        for layout, saved in zip(self._layouts, stock, strict=True):
            flat = zero12.flat_parameters(self._zero, layout.group_index)
            masters.append(layout.from_stock(saved, flat.numel(), flat.device))
        return masters


class StatesByName:
    """The checkpoint format of one optimizer: master weights in DeepSpeed's layout, and states by name, each whole."""

    def __init__(self, engine: DeepSpeedEngine, stepper: WholeStepper, names: Mapping[nn.Parameter, str]) -> None:
        self._stepper, self._names = stepper, names
        self._group = zero.data_parallel_group(engine.optimizer)

    @staticmethod
    def check_options(engine: DeepSpeedEngine) -> None:
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

    def save(self, stock: Callable[[], SavedState]) -> SavedState:
        """Return the state of the optimizer for a checkpoint; ``stock`` returns DeepSpeed's."""
        with self._stepper.masters_in_stock_layout():
            state = stock()
        return with_torch_state(state, self._stepper.by_name(torch_state_of(state), self._names))

    def load(self, of_ranks: Sequence[SavedState], optimizer_states: bool, stock: Callable[[object], object]) -> object:
        """Load the saved states ``of_ranks``, of the same owners. ``stock`` loads DeepSpeed's."""
        rank = dist.get_rank(self._group)
        state = of_ranks[rank]
        states, masters = torch_state_of(state), self._stepper.own_masters(masters_of(state))
        if optimizer_states:
            states = self._stepper.by_number(states, self._names)
        loaded: list[Any] = [None] * dist.get_world_size(self._group)
        loaded[rank] = with_torch_state(state, states, masters)
        return stock(loaded)
