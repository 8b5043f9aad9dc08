"""Sums of what ranks have sent, in fp32 and in an order that is the same in every run."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def sum_in_order(rows: Sequence[torch.Tensor], out: torch.Tensor | None) -> torch.Tensor:
    """Return the sum of ``rows`` in fp32 and in their order, in ``out`` if that is fp32."""
    if len(rows) == 1:
        return rows[0].float()
    if out is not None and out.dtype is torch.float32:
        if torch.float32 in (rows[0].dtype, rows[1].dtype):
            total = torch.add(rows[0], rows[1], out=out)
        else:  # which would be rounded before it is written
            total = out.copy_(rows[0]).add_(rows[1])
    else:
        total = rows[0].float() + rows[1]
    for row in rows[2:]:
        total += row
    return total


def tree_sum(rows: torch.Tensor) -> torch.Tensor:
    """Return the sum of ``rows`` in fp32, in an order that their number alone decides, in log2(W) additions.

    ``rows`` are written to if they are in fp32, or else one copy of them is.
    """
    rows, left = rows.float(), len(rows)
    while left > 1:
        half = (left + 1) // 2
        rows[: left - half] += rows[half:left]
        left = half
    return rows[0].clone()  # which keeps no memory of the others
