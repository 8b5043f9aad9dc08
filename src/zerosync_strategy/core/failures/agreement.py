"""Comparisons between ranks, with one error on all: models and options (W4), and whether each rank succeeded.

Collective: an all-reduce of 64 bytes if all is well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from zerosync_strategy.core.comm.collectives import broadcast_object, digest, gather_words, is_alike
from zerosync_strategy.core.engine import zero3
from zerosync_strategy.core.failures.errors import CheckpointError, in_words, is_communication_error
from zerosync_strategy.core.failures.words import ranks_text

_SHOWN = 5
_KINDS = 4
"""Number of kinds (ranks with equal facts) of which one rank sends its facts."""
_MISSING = "missing"
_FAILED = "!"

Found = TypeVar("Found")


def require_same(where: str, facts: Mapping[str, str], process_group: Any = None) -> None:
    """Compare ``facts`` over the ranks of ``process_group``. Collective.

    If they differ, the first rank sends its facts, and one rank of each further kind sends its differences. Every rank
    raises a ``ValueError`` that begins with ``where`` and names the differing facts, their values and the ranks.
    """
    own = digest(repr(sorted(facts.items())))
    if is_alike(own, process_group):
        return
    by_name = _differences(facts, _kinds(own, process_group), process_group)
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
    # DeepSpeed's prefetching, and so the grouping of gathers, depends on all of these.
    frozen = "" if param.requires_grad else " frozen"
    persistent = " persistent" if zero3.is_persistent(param) else ""
    group = zero3.process_group(param) or getattr(param, "zerosync_sharded_over", None)
    ranks = "" if group is None else f", sharded over {dist.get_world_size(group)} ranks"
    return f"{zero3.full_shape(param)} {param.dtype}{frozen}{persistent}{ranks}"


def together(what: str, part: Callable[[], tuple[str, Found]], remedy: Callable[[], str]) -> Found:
    """Call ``part`` on every rank; return its result, if its facts are the same on all ranks (K2). Collective.

    Every rank raises a ``CheckpointError`` if one has failed or the facts differ. Communication errors are raised
    unchanged.

    Args:
        what: what all ranks do, for the error.
        part: returns this rank's facts as text, and its result.
        remedy: returns the end of the error text, on every rank. May be collective.
    """
    result: list[Found] = []
    failed: Exception | None = None
    try:
        said, found = part()
        result.append(found)
    except Exception as error:
        if is_communication_error(error):
            raise
        failed, said = error, _FAILED + in_words(error)
    own = digest(said)
    if is_alike(own, None):
        if failed is None:
            return result[0]
        text = said.removeprefix(_FAILED)
    else:
        kinds = {broadcast_object(said, ranks[0], None): ranks for ranks in _kinds(own, None)}
        problems = {text.removeprefix(_FAILED): ranks for text, ranks in kinds.items() if text.startswith(_FAILED)}
        text = "; ".join(f"{ranks_text(ranks)}: {text}" for text, ranks in (problems or kinds).items())
        text = text if problems else f"the ranks differ: {text}"
    raise CheckpointError(f"Cannot {what}: {text.rstrip(':. ')}. {remedy()}".rstrip()) from failed


def _kinds(own: list[int], process_group: Any) -> list[list[int]]:
    """Return the first kinds, each the list of the ranks with the same words. Collective."""
    kinds: dict[tuple[int, ...], list[int]] = {}
    for rank, words in enumerate(gather_words(own, process_group)):
        kinds.setdefault(tuple(words), []).append(rank)
    return list(kinds.values())[:_KINDS]


def _differences(facts: Mapping[str, str], kinds: Sequence[list[int]], process_group: Any) -> dict[str, list[str]]:
    """Return the differing facts by name, each with its values on the first ranks of the kinds. Collective."""
    first, *others = [ranks[0] for ranks in kinds]
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
    """Return the text of the first facts of ``by_name``: values with their ranks. Collective."""
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
