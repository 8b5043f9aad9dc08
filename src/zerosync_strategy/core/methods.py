"""What an attached engine and its optimizer do differently.

These classes come before DeepSpeed's own (``interpose.py``). State is in the engine's handle alone, whose methods with
a leading underscore are for this file.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from zerosync_strategy.core import contract
from zerosync_strategy.core.checkpoints import UNREADABLE, UNWRITABLE, said_in_full, warn_of_open
from zerosync_strategy.core.rollcall import RankError
from zerosync_strategy.core.stages import Stage3Reducer, gather_parameters

if TYPE_CHECKING:
    from zerosync_strategy.core.attach import ZeroSync


class EngineMethods:
    """What an attached ``DeepSpeedEngine`` does differently. State is in its ZeroSync handle alone."""

    _zerosync: ZeroSync

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with self._zerosync._doing("the forward"), self._zerosync._forward():
            return super().forward(*args, **kwargs)  # type: ignore[misc]

    def backward(self, loss: Any, *args: Any, **kwargs: Any) -> Any:
        window = self._zerosync.window
        engine: Any = self
        if engine.gradient_accumulation_steps() > 1 and engine.is_gradient_accumulation_boundary():
            window.expect_last()
        if isinstance(loss, torch.Tensor) and loss.requires_grad and loss.grad_fn is None:
            loss = loss.clone()  # a cached loss is a leaf whose hook runs the real backwards; DeepSpeed wants a graph
        try:
            with self._zerosync._doing("the backward"), window.engine_backward():
                return super().backward(loss, *args, **kwargs)  # type: ignore[misc]
        except RankError:
            raise  # what is in flight will not come
        except BaseException:
            self._zerosync._release_gathered()
            raise

    def _backward_prologue(self) -> None:
        if any(param.requires_grad for param in self._zerosync.parameters):  # else the loss only passes through
            self._zerosync.window.inside_graph()
        super()._backward_prologue()  # type: ignore[misc]

    def allreduce_gradients(self, *args: Any, **kwargs: Any) -> None:
        """The window decides what is reduced when; it is asked through the gradients' own hooks."""

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Nothing is sent before the step in any case; legal on every stage."""
        yield

    @contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        """Upstream's explicit window: ours is open already, and the step closes it."""
        yield

    def zero_grad(self) -> None:
        self._zerosync.window.zero_grad()
        super().zero_grad()  # type: ignore[misc]

    def save_checkpoint(self, save_dir: Any, *args: Any, **kwargs: Any) -> Any:
        engine: Any = self
        if engine.global_rank == 0:
            warn_of_open(self._zerosync.window, "save_checkpoint() was called")
        what = f"write the checkpoint in {save_dir}"
        with said_in_full(what, UNWRITABLE), self._zerosync._doing(f"the attempt to {what}"):
            return super().save_checkpoint(save_dir, *args, **kwargs)  # type: ignore[misc]

    def load_checkpoint(self, load_dir: Any, *args: Any, **kwargs: Any) -> Any:
        # Gradients of the parameters that are about to be replaced mean nothing for the new ones.
        self._zerosync.abort("load_checkpoint() was called")
        what = f"read the checkpoint in {load_dir}"
        with said_in_full(what, UNREADABLE), self._zerosync._doing(f"the attempt to {what}"):
            return super().load_checkpoint(load_dir, *args, **kwargs)  # type: ignore[misc]

    def _zero3_consolidated_16bit_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        reducer = self._zerosync._reducer
        if isinstance(reducer, Stage3Reducer) and reducer.over_groups:
            raise ValueError(
                "DeepSpeed collects a full state_dict on rank 0, which lacks the parameters that other groups of ranks"
                " shard by shard_over(). Use full_state() of the handle that attach() returned: each group's first"
                " rank has the group's."
            )
        return super()._zero3_consolidated_16bit_state_dict(*args, **kwargs)  # type: ignore[misc]

    def get_deepcompile_backend(self, *args: Any, **kwargs: Any) -> Any:
        with self._zerosync._deepcompiling():
            return super().get_deepcompile_backend(*args, **kwargs)  # type: ignore[misc]

    def destroy(self) -> None:
        self._zerosync.abort("the engine was destroyed")
        self._zerosync._release()
        self.destroy()


class OptimizerMethods:
    """What an attached ZeRO optimizer does differently, on every stage."""

    _zerosync: ZeroSync

    def step(self, *args: Any, **kwargs: Any) -> Any:
        with self._zerosync._step():
            return super().step(*args, **kwargs)  # type: ignore[misc]

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        self._zerosync.window.zero_grad()
        super().zero_grad(*args, **kwargs)  # type: ignore[misc]

    def finalize_gradient_accumulation_boundary(self) -> None:
        """Unmanaged accumulation asks for this in ``engine.step``; the window does it in ``optimizer.step``."""

    def zerosync_stock_finalize(self) -> None:
        super().finalize_gradient_accumulation_boundary()  # type: ignore[misc]


class Stage12Methods(OptimizerMethods):
    """And on ZeRO-1 and ZeRO-2."""

    def step(self, *args: Any, **kwargs: Any) -> Any:
        if dist.get_backend() == "nccl":
            return super().step(*args, **kwargs)
        with contract.stage_1_and_2_parameter_gather(gather_parameters):
            return super().step(*args, **kwargs)

    def process_gradients(self, param: torch.nn.Parameter, i: int) -> None:
        self._zerosync._gradient_ready(param)

    def scaled_global_norm(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        reducer = self._zerosync._reducer
        if reducer.norm is None:
            reducer.norm = super().scaled_global_norm(*args, **kwargs)  # type: ignore[misc]
        return reducer.norm


class Stage3Methods(OptimizerMethods):
    """And on ZeRO-3."""

    def reduce_ready_partitions_and_remove_grads(self, param: torch.nn.Parameter) -> None:
        self._zerosync._gradient_ready(param)

    def _get_norm_groups(self) -> list[torch.Tensor]:
        reducer = self._zerosync._reducer
        if reducer.norm is None:
            assert isinstance(reducer, Stage3Reducer)
            reducer.norm = reducer.combine_norms(super()._get_norm_groups())  # type: ignore[misc]
        return [reducer.norm]
