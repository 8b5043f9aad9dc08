"""A comparison of the ranks before the first step: their models and options must be the same (W4)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

from zerosync_strategy.core.comm.collectives import gather_objects
from zerosync_strategy.core.engine import zero3

_SHOWN = 5


def require_same(where: str, facts: Mapping[str, str], process_group: Any = None) -> None:
    """Compare ``facts`` over the ranks of ``process_group``. Collective: one digest from each rank if they agree.

    Raises:
        ValueError: on every rank, naming the facts that differ and what each rank has; ``where`` leads the message.
    """
    digest = hashlib.sha256(repr(sorted(facts.items())).encode()).hexdigest()
    if len(set(gather_objects(digest, process_group))) == 1:
        return
    differing = list(_differences(gather_objects(dict(facts), process_group)))
    more = f"\n  and {len(differing) - _SHOWN} more" if len(differing) > _SHOWN else ""
    raise ValueError(
        f"{where} found ranks that are not alike:\n"
        + "\n".join(differing[:_SHOWN])
        + f"{more}\nBuild the same model with the same options on every rank."
    )


def model_facts(model: torch.nn.Module) -> dict[str, str]:
    """Return shape, dtype and ``requires_grad`` of every parameter by name; under ZeRO-3 also its number of ranks."""
    return {f"parameter {name}": _fact(param) for name, param in model.named_parameters()}


def _fact(param: Any) -> str:
    # How far DeepSpeed prefetches, and so what it gathers together, depends on all of these.
    frozen = "" if param.requires_grad else " frozen"
    persistent = " persistent" if zero3.is_persistent(param) else ""
    group = zero3.process_group(param) or getattr(param, "zerosync_sharded_over", None)
    ranks = "" if group is None else f", sharded over {dist.get_world_size(group)} ranks"
    return f"{zero3.full_shape(param)} {param.dtype}{frozen}{persistent}{ranks}"


def _differences(facts: list[dict[str, str]]) -> Iterator[str]:
    for name in dict.fromkeys(name for of_rank in facts for name in of_rank):
        by_value: dict[str, list[int]] = {}
        for rank, of_rank in enumerate(facts):
            by_value.setdefault(of_rank.get(name, "missing"), []).append(rank)
        if len(by_value) > 1:
            yield f"  {name}: " + "; ".join(f"{value} on rank {_ranks(ranks)}" for value, ranks in by_value.items())


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return f"{shown}, ..." if len(ranks) > 8 else shown
