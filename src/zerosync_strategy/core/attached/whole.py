"""Attached engines whose optimizer needs whole parameters: each has an owner, the rank that steps it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from zerosync_strategy.core.attached.engine import AttachedEngine
from zerosync_strategy.core.attached.stage3 import Stage3Engine
from zerosync_strategy.core.attached.stage12 import Stage12Engine
from zerosync_strategy.core.checkpoints.manifests import DamageError
from zerosync_strategy.core.comm.collectives import largest
from zerosync_strategy.core.engine import checkpoint_files, saved_shards, zero, zero3, zero3_optimizer, zero12
from zerosync_strategy.core.engine.fragments import require_numel
from zerosync_strategy.core.engine.saved_shards import SavedShards
from zerosync_strategy.core.failures.agreement import together
from zerosync_strategy.core.failures.errors import AS_MANY, NOTHING_LOADED
from zerosync_strategy.core.gradients.owned import OwnedReducer
from zerosync_strategy.core.gradients.owned_stage3 import OwnedStage3Reducer
from zerosync_strategy.core.optimizer.exchanged import ExchangedStepper
from zerosync_strategy.core.optimizer.whole import OwnedStates, OwnedStepper, WholeStepper
from zerosync_strategy.core.options.config import ZeroSyncConfig


class WholeEngine(AttachedEngine):
    """What they have in common."""

    saves_by_name = True
    stepper: WholeStepper

    @classmethod
    def check_options(cls, engine: Any, config: ZeroSyncConfig) -> None:
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
        super().check_options(engine, config)

    def detach(self) -> NoReturn:
        raise RuntimeError(
            f"detach() found the optimizer {type(zero.stepping_optimizer(self.engine)).__name__}, which needs whole"
            " parameters: DeepSpeed would step flat shards. Leave the engine attached, or build it anew."
        )

    # ---- checkpoints: states by name -------------------------------------------------------------------------------

    @property
    def other_ranks(self) -> str:
        return "" if checkpoint_files.is_readable(self.engine) and not self.shards_over_groups else AS_MANY

    def examine(self, directory: Path, tag: str) -> None:
        if self.other_ranks:
            return
        what, own = f"read the checkpoint in {directory}", self.stepper.names(self.names)
        group = zero.data_parallel_group(self.engine.optimizer)

        def look() -> tuple[str, tuple[SavedShards, bool]]:
            saved = SavedShards(self.engine, directory, tag)
            return "", (saved, saved.ranks != dist.get_world_size(group) or saved.names(dist.get_rank(group)) != own)

        saved, is_other = together(what, look, lambda: NOTHING_LOADED)
        if largest([is_other], group)[0]:
            self.saved = together(what, lambda: ("", self._of_these_parameters(saved, own)), lambda: NOTHING_LOADED)

    def _of_these_parameters(self, saved: SavedShards, own: list[list[str]]) -> SavedShards:
        """Return ``saved``, which had other owners; a ``DamageError`` where its parameters are not the optimizer's."""
        groups = saved.groups()
        known = set(self.names.values())
        missing = [name for mine, theirs in zip(own, groups, strict=False) for name in mine if name not in theirs]
        unknown = [str(name) for theirs in groups for name in theirs if name not in known]
        if missing or unknown or len(groups) != len(own):
            raise DamageError(
                f"it has states of an optimizer that steps other parameters, or flat shards, in {len(groups)} group(s):"
                f" there is no {zero.listed(missing or unknown)} in both. Load it with the optimizer and the option"
                " elementwise_optimizer with which it was saved, or its weights alone, with load_optimizer_states=False"
            )
        return saved

    def save(self, stock: Callable[[], saved_shards.State]) -> saved_shards.State:
        """Return the state of the optimizer for a checkpoint: master weights in DeepSpeed's layout, states by name."""
        state = stock()
        return saved_shards.replaced(state, self.stepper.by_name(saved_shards.torch_state(state), self.names))

    def loaded(self, of_ranks: Sequence[Any], optimizer_states: bool) -> list[Any]:
        """Return what DeepSpeed is to load in place of ``of_ranks``, of which this rank's own is read."""
        group = zero.data_parallel_group(self.engine.optimizer)
        rank, masters = dist.get_rank(group), None
        if self.saved is None:
            state = of_ranks[rank]
            states, masters = saved_shards.torch_state(state), self._own_masters(state)
        else:
            state, states = self.saved.state(0), self.saved.torch_state(self.stepper.names(self.names))
            self._read_masters(self.saved)
            masters = self._present_masters()
        if optimizer_states:
            states = self.stepper.by_number(states, self.names)
        loaded: list[Any] = [None] * dist.get_world_size(group)
        loaded[rank] = saved_shards.replaced(state, states, masters)
        return loaded

    @torch.no_grad()
    def _read_masters(self, saved: SavedShards) -> None:
        """Let this rank have the saved master weights of what it owns."""
        of_name = saved.masters([self.names[param] for param in self.stepper.masters])
        for param, master in self.stepper.masters.items():
            master.data.view(-1).copy_(of_name[self.names[param]])

    def _own_masters(self, state: saved_shards.State) -> list[torch.Tensor] | None:
        """Return what DeepSpeed is to load in place of the master weights of this rank's own ``state``. Collective."""
        return None

    @abstractmethod
    def _present_masters(self) -> list[torch.Tensor]:
        """Return the master weights that DeepSpeed has of this rank."""


class WholeStage12Engine(WholeEngine, Stage12Engine):
    """An engine of stage 1 or 2: a rank's shard is what it owns."""

    reducer_class = OwnedReducer
    reducer: OwnedReducer
    stepper: OwnedStepper

    def _make_stepper(self) -> OwnedStepper:
        return OwnedStepper(self.reducer)

    def _make_states(self) -> OwnedStates:
        return OwnedStates(self.reducer, self.stepper)

    def save(self, stock: Callable[[], saved_shards.State]) -> saved_shards.State:
        with zero12.masters_replaced(self.engine.optimizer, self.stepper.stock_masters()):
            return super().save(stock)

    def _own_masters(self, state: saved_shards.State) -> list[torch.Tensor]:
        return self.stepper.own_masters(saved_shards.masters(state))

    def _present_masters(self) -> list[torch.Tensor]:
        return [zero12.master(self.engine.optimizer, layout.group_index) for layout in self.reducer.layouts]


class WholeStage3Engine(WholeEngine, Stage3Engine):
    """An engine of stage 3: gradients are reduced to owners, which give all ranks the shards of what they step."""

    reducer_class = OwnedStage3Reducer
    reducer: OwnedStage3Reducer
    stepper: ExchangedStepper

    def _make_stepper(self) -> ExchangedStepper:
        return ExchangedStepper(self.reducer, self.masters.digest)

    def _present_masters(self) -> list[torch.Tensor]:
        return zero3_optimizer.flat_master_weights(self.engine.optimizer)

    def read_state(self, param: Any, key: str) -> torch.Tensor:
        """Return a state of ``param``; see :meth:`WholeStepper.read_state`. Collective."""
        return self.stepper.read_state(param, key)

    def read_gradient(self, param: Any) -> torch.Tensor:
        """Return the averaged gradient of ``param``, in fp32. Collective."""
        layout = self.reducer.layout_of(param)
        return layout.read(self.reducer.shards[layout], param)

    def write_gradient(self, param: Any, value: torch.Tensor) -> None:
        """Set the averaged gradient of ``param``, where this rank owns it."""
        require_numel(value, zero3.full_shape(param))
        layout = self.reducer.layout_of(param)
        layout.write(value, self.reducer.shards[layout], param)

    def refuse_local(self, function: str) -> NoReturn:
        """Raise: a rank has no shard of a gradient or a state."""
        raise ValueError(
            f"{function} found an optimizer that needs whole parameters, whose gradients and states are not sharded."
            f" Use {function.replace('local', 'full')}."
        )
