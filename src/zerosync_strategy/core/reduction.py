"""Closing a window: from full local gradients to each rank's partition, by DeepSpeed's own reducer.

The seam to the window is :class:`Reducer`. Every parameter of the optimizer takes part in every reduction, with zeros
where this rank has no gradient: ranks may then use different parameters (W4 needs no message), and stage 3 does not
step a parameter with the partition that an earlier window left behind.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class Reducer(ABC):
    """Reduces the local gradients of one DeepSpeed ZeRO optimizer.

    A gradient is local (full, on the parameter) until :meth:`reduce`, then averaged and in this rank's partition.
    """

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    @property
    @abstractmethod
    def groups(self) -> list[list[torch.nn.Parameter]]:
        """The parameters that the optimizer steps, by DeepSpeed's parameter group; the same on every rank."""

    @abstractmethod
    def _reduce_parameter(self, group: int, param: torch.nn.Parameter) -> None: ...

    @abstractmethod
    def _prepare(self, first: bool) -> None: ...

    @torch.no_grad()
    def reduce(self, *, first: bool, final: bool) -> None:
        """Average the local gradients over the ranks into the partition. A collective call.

        Args:
            first: the partition holds nothing of this window yet.
            final: the optimizer step follows.
        """
        optimizer = self.optimizer
        optimizer.set_gradient_accumulation_boundary(final)
        if getattr(optimizer, "overlap_comm", False) and getattr(optimizer, "reduction_stream", None) is not None:
            optimizer.reduction_stream.synchronize()  # the previous window's reductions own the buckets until here
        self._prepare(first)
        with self._all_trainable():
            for index, group in enumerate(self.groups):
                for param in group:
                    self._reduce_parameter(index, param)
            optimizer.overlapping_partition_gradients_reduce_epilogue()
        # DeepSpeed clears accumulators at the next forward when this is set; the next window may have begun by then.
        optimizer._epilogue_ran_this_backward = False

    def finalize(self) -> None:
        """The step follows an early reduction: make the partition ready for it. Sends nothing."""
        self.optimizer.zerosync_stock_finalize()

    def drop(self) -> None:
        """Forget the local gradients."""
        for group in self.groups:
            for param in group:
                param.grad = None

    @abstractmethod
    def discard(self) -> None:
        """Forget what the partition holds of this window."""

    def reset(self) -> None:
        """Forget everything about this window, from whatever point an exception left. No collective."""
        optimizer = self.optimizer
        self.drop()
        self.discard()
        for bucket in optimizer.ipg_buckets.values():
            bucket.params.clear()
            bucket.elements = 0
        reduced = optimizer.params_already_reduced
        for key in reduced if isinstance(reduced, dict) else range(len(reduced)):
            reduced[key] = False
        optimizer._epilogue_ran_this_backward = False
        optimizer._backward_active_depth = 0
        optimizer.clear_backward_seen_flag()

    @contextmanager
    def _all_trainable(self) -> Iterator[None]:
        # A module frozen since its backward keeps the gradient it has, as in plain torch; DeepSpeed would skip it.
        frozen = [param for group in self.groups for param in group if not param.requires_grad]
        for param in frozen:
            param.requires_grad_(True)
        try:
            yield
        finally:
            for param in frozen:
                param.requires_grad_(False)


class Stage12Reducer(Reducer):
    """ZeRO-1 and ZeRO-2."""

    @property
    def groups(self) -> list[list[torch.nn.Parameter]]:
        return self.optimizer.bit16_groups

    def _prepare(self, first: bool) -> None:
        self.optimizer.setup_buckets()

    def _reduce_parameter(self, group: int, param: torch.nn.Parameter) -> None:
        optimizer = self.optimizer
        if optimizer.get_gradient_for_reduction(param) is None:
            if optimizer.use_grad_accum_attribute:
                param.grad_accum = torch.zeros_like(param, dtype=optimizer.gradient_accumulation_dtype)  # type: ignore[attr-defined]
            else:
                param.grad = torch.zeros_like(param)
        optimizer.reduce_independent_p_g_buckets_and_remove_grads(param, group)

    def drop(self) -> None:
        super().drop()
        for group in self.groups:
            for param in group:
                param.grad_accum = None  # type: ignore[attr-defined]

    def discard(self) -> None:
        optimizer = self.optimizer
        for index in range(len(self.groups)):
            optimizer.averaged_gradients[index] = None
            optimizer.all_grad_tensors[index] = None
        optimizer.micro_step_id = -1  # the next reduction starts the accumulators anew

    def reset(self) -> None:
        super().reset()
        for bucket in self.optimizer.ipg_buckets.values():
            bucket.clear()
        self.optimizer.extra_large_param_to_reduce.clear()
        self.optimizer._release_ipg_buffers()


class Stage3Reducer(Reducer):
    """ZeRO-3: parameters may be released, so their data has no elements while their gradient has all."""

    @property
    def groups(self) -> list[list[torch.nn.Parameter]]:
        return self.optimizer.fp16_groups

    def _prepare(self, first: bool) -> None:
        # DeepSpeed copies into the partition at step 0 and adds afterwards. It counts forwards, we count reductions.
        self.optimizer.micro_step_id = 0 if first else 1

    def _reduce_parameter(self, group: int, param: torch.nn.Parameter) -> None:
        if param.grad is None:
            _zero_gradient(param)
        self.optimizer.reduce_independent_p_g_buckets_and_remove_grads(param)

    def discard(self) -> None:
        self.optimizer.averaged_gradients = {}
        self.optimizer.micro_step_id = 0


def _zero_gradient(param: Any) -> None:
    """Give ``param`` a zero gradient of its full shape, gathered or released."""
    released = param.data
    # Autograd compares shapes on assignment; a view of one element has the full shape and no memory.
    param.data = released.new_zeros(1).expand(param.ds_shape)
    param.grad = torch.zeros(param.ds_shape, dtype=released.dtype, device=released.device)
    param.data = released
