"""A comparison of the ranks before the first step: their models and options must be the same (W4)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from zerosync_strategy.core.comm.collectives import broadcast_object, digest, gather_words, is_alike
from zerosync_strategy.core.engine import zero3
from zerosync_strategy.core.failures.answers import ranks_text

_SHOWN = 5
_KINDS = 4
"""Of so many kinds of ranks, one sends what it has."""
_MISSING = "missing"


def require_same(where: str, facts: Mapping[str, str], process_group: Any = None) -> None:
    """Compare ``facts`` over the ranks of ``process_group``. Collective: 64 bytes are reduced if they agree.

    Else the first rank sends its facts, and one rank of each of the next kinds what it has otherwise.

    Raises:
        ValueError: on every rank, naming the facts that differ and which ranks have what; ``where`` leads the message.
    """
    own = digest(repr(sorted(facts.items())))
    if is_alike(own, process_group):
        return
    by_name = _differences(facts, own, process_group)
    shown = [f"  {name}: {values}" for name, values in _described(facts, by_name, process_group).items()]
    more = f"\n  and {len(by_name) - _SHOWN} more" if len(by_name) > _SHOWN else ""
    raise ValueError(
        f"{where} found ranks that are not alike:\n"
        + "\n".join(shown)
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


def said_by_ranks(text: str, process_group: Any) -> dict[str, list[int]]:
    """Return the texts of the first kinds of ranks, with their ranks. Collective: 64 bytes are reduced if all agree."""
    own = digest(text)
    if is_alike(own, process_group):
        return {text: list(range(dist.get_world_size(process_group)))}
    kinds = _kinds(own, process_group)[:_KINDS]
    return {broadcast_object(text, ranks[0], process_group): ranks for ranks in kinds}


def _kinds(own: list[int], process_group: Any) -> list[list[int]]:
    """Return the ranks of each kind, by the first of them: those with the same words. Collective."""
    kinds: dict[tuple[int, ...], list[int]] = {}
    for rank, words in enumerate(gather_words(own, process_group)):
        kinds.setdefault(tuple(words), []).append(rank)
    return list(kinds.values())


def _differences(facts: Mapping[str, str], own: list[int], process_group: Any) -> dict[str, list[str]]:
    """Return, by name, the values of facts that differ between the first ranks of the first kinds. Collective."""
    first, *others = [ranks[0] for ranks in _kinds(own, process_group)[:_KINDS]]
    reference: dict[str, str] = broadcast_object(dict(facts), first, process_group)
    different = {
        name: facts.get(name, _MISSING)
        for name in {**reference, **facts}
        if facts.get(name, _MISSING) != reference.get(name, _MISSING)
    }
    values: dict[str, list[str]] = {}
    for rank in others:
        for name, value in broadcast_object(different, rank, process_group).items():
            values.setdefault(name, [reference.get(name, _MISSING)]).append(value)
    return values


def _described(facts: Mapping[str, str], by_name: Mapping[str, list[str]], process_group: Any) -> dict[str, str]:
    """Return the first facts of ``by_name``, each with its values and their ranks. Collective."""
    shown = list(by_name)[:_SHOWN]
    of_ranks = gather_words([digest(facts.get(name, _MISSING))[0] for name in shown], process_group)
    described = {}
    for index, name in enumerate(shown):
        text = {digest(value)[0]: value for value in by_name[name]}
        ranks: dict[str, list[int]] = {}
        for rank, words in enumerate(of_ranks):
            ranks.setdefault(text.get(words[index], "something else"), []).append(rank)
        described[name] = "; ".join(f"{value} on {_ranks(having)}" for value, having in ranks.items())
    return described


def _ranks(ranks: list[int]) -> str:
    return ranks_text(ranks) if len(ranks) > 8 else f"rank {', '.join(map(str, ranks))}"
