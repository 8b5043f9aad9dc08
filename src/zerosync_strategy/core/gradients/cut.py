"""Buckets of ZeRO-3: each gradient stays where autograd accumulates it until the bucket is packed in one call."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from zerosync_strategy.core.engine import zero, zero3
from zerosync_strategy.core.gradients.buckets import Bucket, Chunk
from zerosync_strategy.core.gradients.layout import CutLayout


class CutBucket(Bucket):
    """A bucket of one layout that cuts each gradient by itself. See :class:`Bucket`."""

    layout: CutLayout

    def __init__(self, *common: Any, **named: Any) -> None:
        super().__init__(*common, **named)
        layout, params = self.layout, self.params
        self._counted: set[int] = set()  # ids of parameters
        self._width = sum(layout.shard_numels[param] for param in params)
        self._numels = [zero3.full_numel(param) for param in params]
        # torch._chunk_cat cuts a tensor as ZeRO-3 does: into shards that are as even as can be, the last ones padded.
        for param, numel in zip(params, self._numels, strict=True):
            assert layout.shard_numels[param] == -(-numel // layout.world_size)
        self.target = (layout.columns[params[0]], self._width)

    def collect(self, param: Any) -> None:
        if param.grad is None:
            return
        if self.local.converts:
            gradient = param.grad.detach().to(self.local.dtype)
            before = zero.accumulated_gradient(param)
            zero.set_accumulated_gradient(param, gradient if before is None else before.add_(gradient))
            param.grad = None
        if id(param) not in self._counted:
            self._counted.add(id(param))
            self.local.count(self.local.nbytes(param))

    def chunks(self, before: float) -> Iterator[Chunk]:
        layout = self.layout
        gradients = [self._gradient(param) for param in self.params]
        device = self.params[0].device
        shape = layout.world_size, self._width
        dense = gradients[0]
        if len(gradients) == 1 and dense is not None and dense.is_contiguous() and dense.numel() == shape[0] * shape[1]:
            packed = dense.view(shape).to(layout.dtype)  # as it lies
        elif all(gradient is None for gradient in gradients):
            packed = torch.zeros(shape, dtype=layout.dtype, device=device)
        else:
            packed = torch.empty(shape, dtype=layout.dtype, device=device)
            pieces = [
                torch.zeros(numel, dtype=self.dtype, device=device) if gradient is None else gradient.reshape(-1)
                for numel, gradient in zip(self._numels, gradients, strict=True)
            ]
            if any(piece.dtype is not self.dtype for piece in pieces):
                pieces = [piece.to(layout.dtype) for piece in pieces]
            torch._chunk_cat(pieces, 0, layout.world_size, out=packed)
        for gradient in gradients:
            if gradient is not None:
                self.streams.record_stream_for_reduction(gradient)
        if before != 1.0:
            packed.mul_(before)
        offset, width = self.target
        # Packed, it has the size of a bucket already; a parameter as it lies may be larger.
        yield from self._columns(packed, offset, self._chunk_width if len(self.params) == 1 else width)

    def drop(self) -> None:
        for param in self.params:
            param.grad = None
            if self.local.converts:
                zero.set_accumulated_gradient(param, None)
        self.local.count(-sum(self.local.nbytes(param) for param in self.params if id(param) in self._counted))
        self._counted.clear()

    def _gradient(self, param: Any) -> torch.Tensor | None:
        gradient: torch.Tensor | None = zero.accumulated_gradient(param) if self.local.converts else param.grad
        return gradient
