"""Checkpoints of an optimizer that needs whole parameters: states are by name, and load on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from zerosync_strategy.core.checkpoints.manifests import DamageError
from zerosync_strategy.core.comm.collectives import largest
from zerosync_strategy.core.engine import checkpoint_files, zero
from zerosync_strategy.core.engine.checkpoint_files import (
    SavedShards,
    State,
    masters_of,
    torch_state_of,
    with_torch_state,
)
from zerosync_strategy.core.failures.agreement import together
from zerosync_strategy.core.failures.errors import AS_MANY, NOTHING_LOADED
from zerosync_strategy.core.optimizer.whole import WholeStepper


class StatesByName:
    """The checkpoint format of one optimizer: master weights in DeepSpeed's layout, and states by name, each whole.

    :attr:`saved`: the checkpoint being loaded, if each rank reads it by names; ``None`` if DeepSpeed reads it.
    """

    def __init__(self, engine: Any, stepper: WholeStepper, names: Mapping[Any, str], over_groups: bool) -> None:
        self._engine, self._stepper, self._names, self._over_groups = engine, stepper, names, over_groups
        self._group = zero.data_parallel_group(engine.optimizer)
        self.saved: SavedShards | None = None

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
        if checkpoint_files.loads_universal(engine):
            raise ValueError(
                f"attach() found the optimizer {name}, which needs whole parameters, and 'checkpoint.load_universal' ="
                " true, which has states by element. Leave that out, and load the checkpoint that save_checkpoint()"
                " wrote, on any number of ranks."
            )

    @property
    def other_ranks(self) -> str:
        """The remedy for a checkpoint that another number of ranks has saved; empty: load it."""
        return "" if checkpoint_files.is_readable(self._engine) and not self._over_groups else AS_MANY

    def examine(self, directory: Path, tag: str) -> None:
        """Find how to load a verified checkpoint with the optimizer's states. Collective.

        Raise ``CheckpointError`` on every rank if this optimizer cannot load it.
        """
        if self.other_ranks:
            return
        what, own = f"read the checkpoint in {directory}", self._stepper.names(self._names)

        def look() -> tuple[str, tuple[SavedShards, bool]]:
            saved = SavedShards(self._engine, directory, tag)
            ranks, rank = dist.get_world_size(self._group), dist.get_rank(self._group)
            return "", (saved, saved.ranks != ranks or saved.names(rank) != own)

        saved, is_other = together(what, look, lambda: NOTHING_LOADED)
        if largest([is_other], self._group)[0]:
            self.saved = together(what, lambda: ("", self._of_these_parameters(saved, own)), lambda: NOTHING_LOADED)

    def _of_these_parameters(self, saved: SavedShards, own: list[list[str]]) -> SavedShards:
        """Return ``saved``, which had other owners; raise ``DamageError`` if its parameters are not the optimizer's."""
        groups = saved.groups()
        known = set(self._names.values())
        missing = [name for mine, theirs in zip(own, groups, strict=False) for name in mine if name not in theirs]
        unknown = [str(name) for theirs in groups for name in theirs if name not in known]
        if missing or unknown or len(groups) != len(own):
            raise DamageError(
                f"it has states of an optimizer that steps other parameters, or flat shards, in {len(groups)} group(s):"
                f" there is no {zero.listed(missing or unknown)} in both. Load it with the optimizer and the option"
                " elementwise_optimizer with which it was saved, or its weights alone, with load_optimizer_states=False"
            )
        return saved

    def save(self, stock: Callable[[], State]) -> State:
        """Return the state of the optimizer for a checkpoint; ``stock`` returns DeepSpeed's."""
        with self._stepper.masters_in_stock_layout():
            state = stock()
        return with_torch_state(state, self._stepper.by_name(torch_state_of(state), self._names))

    def load(self, of_ranks: Sequence[Any], optimizer_states: bool, stock: Callable[..., Any]) -> Any:
        """Load the saved states ``of_ranks``, of which only this rank's is read. ``stock`` loads DeepSpeed's."""
        stepper, rank = self._stepper, dist.get_rank(self._group)
        by_name = self.saved is not None
        masters: list[torch.Tensor] | None
        if self.saved is None:
            state = of_ranks[rank]
            states, masters = torch_state_of(state), stepper.own_masters(masters_of(state))
        else:
            state, states = self.saved.state(0), self.saved.torch_state(stepper.names(self._names))
            self._read_masters(self.saved)
            masters = stepper.present_masters()
        if optimizer_states:
            states = stepper.by_number(states, self._names)
        loaded: list[Any] = [None] * dist.get_world_size(self._group)
        loaded[rank] = with_torch_state(state, states, masters)
        result = stock(loaded, by_name)
        if by_name:
            stepper.give()
        return result

    @torch.no_grad()
    def _read_masters(self, saved: SavedShards) -> None:
        """Read the saved master weights of the parameters that this rank owns."""
        of_name = saved.masters([self._names[param] for param in self._stepper.masters])
        for param, master in self._stepper.masters.items():
            master.data.view(-1).copy_(of_name[self._names[param]])


def refuse_states_by_name(engine: Any, directory: Path, tag: str) -> None:
    """Raise if the verified checkpoint, of the same number of ranks, has states of whole parameters. Collective.

    The error is a ``CheckpointError`` on every rank.
    """
    if checkpoint_files.loads_universal(engine) or not checkpoint_files.is_readable(engine):
        return

    def look() -> tuple[str, None]:
        own = checkpoint_files.files_to_load(engine, directory, tag, shards=True)[-1]
        if checkpoint_files.is_by_name(checkpoint_files.read(own)["optimizer_state_dict"]):
            raise DamageError(
                "it has states of an optimizer that steps whole parameters, and"
                f" {type(zero.stepping_optimizer(engine)).__name__} steps flat shards. Load it with the optimizer and"
                " the option elementwise_optimizer with which it was saved, or its weights alone, with"
                " load_optimizer_states=False"
            )
        return "", None

    together(f"read the checkpoint in {directory}", look, lambda: NOTHING_LOADED)
