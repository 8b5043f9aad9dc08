"""The step of an optimizer that needs whole parameters: this rank steps those that it owns, in their own shapes.

The groups of the program's own torch optimizer have, in place of its parameters, the fp32 master weights of those that
this rank owns. It steps once per optimizer step, with all groups. Its states are where it makes them: on the owner,
whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from zerosync_strategy.core.comm.collectives import broadcast_object
from zerosync_strategy.core.engine import zero12
from zerosync_strategy.core.gradients.owned import OwnedLayout, OwnedReducer
from zerosync_strategy.core.optimizer.frozen import FrozenParameters
from zerosync_strategy.core.optimizer.states import StripedStates


class WholeStep(FrozenParameters):
    """Lets the torch optimizer of ZeRO-1 or 2 step what this rank owns. What is frozen has no gradient there.

    Attributes:
        masters: by parameter that this rank owns, its master weights, as the torch optimizer has them.

    Raises:
        ValueError: the optimizer has stepped DeepSpeed's flat shards.
    """

    def __init__(self, reducer: OwnedReducer) -> None:
        super().__init__(reducer)
        self._layouts: list[OwnedLayout] = reducer.layouts
        self._left_out: set[Any] = set()
        self.masters: dict[Any, torch.nn.Parameter] = {}
        zero_optimizer, torch_optimizer = reducer.optimizer, reducer.optimizer.optimizer
        for layout in self._layouts:
            if torch_optimizer.state.pop(zero12.master(zero_optimizer, layout.group_index), None):
                raise ValueError(
                    f"attach() found that the optimizer {type(torch_optimizer).__name__}, which needs whole parameters,"
                    " has stepped flat shards. Call attach() before the first step and before load_checkpoint()."
                )
        for layout in self._layouts:
            flat = zero12.give_own_master(zero_optimizer, layout.group_index, layout.shard_numel)
            params = zero12.params_in_order(zero_optimizer, layout.group_index)
            own = {param: self._view(flat, layout, param) for param in params if param in layout.own_offsets}
            self.masters |= own
            torch_optimizer.param_groups[layout.group_index]["params"] = list(own.values())
            for param in params:  # made with the optimizer
                state = torch_optimizer.state.pop(param, None)
                if state and param in own:
                    torch_optimizer.state[own[param]] = state

    @torch.no_grad()
    def _view(self, flat: torch.Tensor, layout: OwnedLayout, param: Any) -> torch.nn.Parameter:
        begin = layout.own_offsets[param]
        view = torch.nn.Parameter(flat.data[begin : begin + param.numel()].view(param.shape))
        view.data.copy_(param)
        return view

    @contextmanager
    def stepping(self) -> Iterator[None]:
        self._left_out, self._frozen = self._frozen or set(), None
        try:
            yield
        finally:
            for master in self.masters.values():
                master.grad = None

    def step_group(self, index: int) -> None:
        """DeepSpeed has the gradients of the group ``index`` ready; with those of the last one, step."""
        optimizer = self._reducer.optimizer
        for layout in (layout for layout in self._layouts if layout.group_index == index):
            flat = zero12.master(optimizer, index)
            for param, begin in layout.own_offsets.items():
                master, end = self.masters[param], begin + param.numel()
                master.data = flat.data[begin:end].view(param.shape)
                master.grad = None if param in self._left_out else flat.grad[begin:end].view(param.shape)
        if index == len(optimizer.optimizer.param_groups) - 1:
            zero12.step_torch_optimizer(optimizer)

    # ---- checkpoints -----------------------------------------------------------------------------------------------

    def state(self, names: Mapping[Any, str], group: Any) -> list[Any]:
        return []

    def load(self, state: list[Any], names: Mapping[Any, str]) -> None:
        self._frozen = None

    def stock_masters(self) -> list[torch.Tensor]:
        """Return this rank's master weights as DeepSpeed lays them out, by group. Collective."""
        optimizer = self._reducer.optimizer
        masters = []
        for layout in self._layouts:
            master, flat = (each(optimizer, layout.group_index) for each in (zero12.master, zero12.flat_parameters))
            masters.append(layout.to_stock(master.data, flat.numel(), flat.device))
        return masters

    def own_masters(self, stock: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return this rank's master weights of what :meth:`stock_masters` has returned. Collective."""
        masters = []
        for layout, saved in zip(self._layouts, stock, strict=True):
            flat = zero12.flat_parameters(self._reducer.optimizer, layout.group_index)
            masters.append(layout.from_stock(saved, flat.numel(), flat.device))
        return masters

    def by_name(self, state: dict[str, Any], names: Mapping[Any, str]) -> dict[str, Any]:
        """Return the ``state_dict()`` of the torch optimizer with names of parameters in place of its numbers."""
        name_of = self._names(names)
        return {
            "state": {name_of[number]: of_param for number, of_param in state["state"].items()},
            "param_groups": [
                group | {"params": [name_of[number] for number in group["params"]]} for group in state["param_groups"]
            ],
        }

    def by_number(self, state: dict[str, Any], names: Mapping[Any, str]) -> dict[str, Any]:
        """Return for the torch optimizer what :meth:`by_name` has returned.

        Raises:
            ValueError: it is of other parameters than those that this rank owns.
        """
        name_of = self._names(names)
        number_of = {name: number for number, name in enumerate(name_of)}
        own = [[names[param] for param in self.masters if param in layout.own_offsets] for layout in self._layouts]
        saved = [group["params"] for group in state["param_groups"]]
        if saved != own:
            raise ValueError(
                "load_checkpoint() found states of an optimizer that steps other parameters on this rank, or flat"
                f" shards: {saved} in place of {own}. Load it with the optimizer and the option elementwise_optimizer"
                " with which it was saved, or its weights alone, with load_optimizer_states=False."
            )
        return {
            "state": {number_of[name]: of_param for name, of_param in state["state"].items()},
            "param_groups": [
                group | {"params": [number_of[name] for name in group["params"]]} for group in state["param_groups"]
            ],
        }

    def _names(self, names: Mapping[Any, str]) -> list[str]:
        """Return the names of the parameters that this rank owns, as the torch optimizer numbers them."""
        param_of = {id(master): param for param, master in self.masters.items()}
        groups = self._reducer.optimizer.optimizer.param_groups
        return [names[param_of[id(master)]] for group in groups for master in group["params"]]


class OwnedStates(StripedStates):
    """Master weights and states of an optimizer that needs whole parameters, each on its owner.

    Args:
        step: which has them.
    """

    def __init__(self, reducer: OwnedReducer, step: WholeStep) -> None:
        super().__init__(reducer)
        self._step = step

    def read(self, param: Any, key: str | None) -> torch.Tensor:
        if key is None:
            return super().read(param, key)
        layout = self.layout_of(param)
        assert isinstance(layout, OwnedLayout)
        value = self._state_of(param).get(key)
        value = broadcast_object(
            value.cpu() if isinstance(value, torch.Tensor) else None, layout.owners[param], layout.process_group
        )
        if value is None:
            raise _no_state(key)
        return value.to(param.device, torch.float32)

    def write(self, param: Any, value: torch.Tensor, key: str | None) -> None:
        if key is None:
            super().write(param, value, key)
        elif param in self._step.masters:
            if not isinstance(target := self._state_of(param).get(key), torch.Tensor):
                raise _no_state(key)
            target.copy_(value)

    def _state_of(self, param: Any) -> dict[str, Any]:
        """Return the states of ``param``; empty where another rank has them."""
        master = self._step.masters.get(param)
        return {} if master is None else self._optimizer.optimizer.state.get(master, {})


def _no_state(key: str) -> ValueError:
    return ValueError(f"{key!r} is no state of the optimizer's for this parameter.")
