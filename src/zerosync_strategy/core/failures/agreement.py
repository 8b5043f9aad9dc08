"""Comparisons between ranks, each with one error on all of them.

*Facts.* Models and options must be the same (W4), and all ranks save or load, or none (K2): an all-reduce of 64 bytes
if they agree.

*Aborted windows* (W3). Off NCCL, tags distinguish messages. NCCL matches collectives by their order alone: ranks that
abort a backward after different numbers of collectives would sum gradients of different windows, or take gradients for
parameters. So the ranks compare these numbers through the store, once, before they send anything else. Each rank makes
at most six requests, however long another rank takes. If nothing was aborted, nothing is sent or waited for.

*Gathers of ZeRO-3* (W4). A log of what a rank gathers, and its digest, find ranks that gather differently. Where
gathers can have a tag, the digest is the tag, so gathers that differ do not match. Elsewhere the ranks of a group
compare digests in each optimizer step, by one message of 16 bytes.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import zip_longest
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from zerosync_strategy.core.comm.collectives import (
    all_reduce,
    broadcast_object,
    digest,
    gather_objects,
    gather_words,
    is_alike,
    new_name,
    note_launch,
    timeout_of,
)
from zerosync_strategy.core.comm.journal import SentCounter
from zerosync_strategy.core.comm.streams import HostCopy, Streams
from zerosync_strategy.core.engine import zero3
from zerosync_strategy.core.engine.types import Store
from zerosync_strategy.core.engine.zero import listed
from zerosync_strategy.core.failures.errors import CheckpointError, RankError, in_words, is_communication_error
from zerosync_strategy.core.failures.rank_state import Cause, Departure, Doing
from zerosync_strategy.core.failures.words import ranks_text

_SHOWN = 5
_KINDS = 4
"""The most kinds that send facts. A kind: the ranks with equal facts, of which the first one sends them."""
_MISSING = "missing"
_FAILED = "!"

Found = TypeVar("Found")


def require_same(where: str, facts: Mapping[str, str], process_group: ProcessGroup | None = None) -> None:
    """Compare ``facts`` over the ranks of ``process_group``. Collective.

    If they differ, the first rank sends its facts, and one rank of each other kind its differences. Every rank raises a
    ``ValueError`` that begins with ``where`` and names the differing facts, their values and the ranks.
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


def _fact(param: torch.nn.Parameter) -> str:
    # DeepSpeed's prefetching, and so the grouping of gathers, depends on all of these.
    frozen = "" if param.requires_grad else " frozen"
    persistent = " persistent" if zero3.is_persistent(param) else ""
    group = zero3.process_group(param) or getattr(param, "zerosync_sharded_over", None)
    ranks = "" if group is None else f", sharded over {dist.get_world_size(group)} ranks"
    return f"{zero3.full_shape(param)} {param.dtype}{frozen}{persistent}{ranks}"


def together(what: str, part: Callable[[], tuple[str, Found]], remedy: Callable[[], str]) -> Found:
    """Call ``part`` on every rank; return its result if it succeeded everywhere with the same facts (K2). Collective.

    Otherwise every rank raises a ``CheckpointError``. Communication errors are raised unchanged.

    Args:
        what: what all ranks do, for the error.
        part: returns facts, as text, and this rank's result.
        remedy: returns the end of the error text. Called on every rank; may be collective.
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


def _kinds(own: list[int], process_group: ProcessGroup | None) -> list[list[int]]:
    """Return the first kinds, each as a list of its ranks; ``own``: the digest of this rank's facts. Collective."""
    kinds: dict[tuple[int, ...], list[int]] = {}
    for rank, words in enumerate(gather_words(own, process_group)):
        kinds.setdefault(tuple(words), []).append(rank)
    return list(kinds.values())[:_KINDS]


def _differences(
    facts: Mapping[str, str], kinds: Sequence[list[int]], process_group: ProcessGroup | None
) -> dict[str, list[str]]:
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


def _described(
    facts: Mapping[str, str], by_name: Mapping[str, list[str]], process_group: ProcessGroup | None
) -> dict[str, str]:
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


# ---- collectives that must match -------------------------------------------------------------------------------------


_Gathers = list[tuple[int, ...]]  # ids of parameters, by gather


class GatherActivity(NamedTuple):
    """The activity of a rank that gathers the parameters with these ids. It outlives the gather, so has no engine."""

    names: Mapping[int, str]
    ids: tuple[int, ...]
    ranks: str
    reader: str = ""

    @property
    def doing(self) -> Doing:
        return Doing.GATHER

    @property
    def module(self) -> str:
        """The module that has the first parameter."""
        return self.names.get(self.ids[0], "").rpartition(".")[0]

    def __str__(self) -> str:
        reader = f" for {self.reader}" if self.reader else ""
        return f"the gather of {_listed(self.names, self.ids)} over the ranks {self.ranks}{reader}"


class GatherDigest:
    """The log and digest of this rank's gathers since the last step, over one process group of several ranks.

    ``tagged``: gathers have tags, so those of different parameters do not match. ``device``: that the group uses.
    """

    def __init__(self, process_group: ProcessGroup, tagged: bool, device: torch.device, streams: Streams) -> None:
        self.process_group = process_group
        self.tagged = tagged
        self._streams = streams
        self._gathers: _Gathers = []
        self._before: _Gathers = []  # in the last window
        self._step = self._digest = 0
        # Made once: with a tensor from a list, or new pinned memory, the host would wait for the device.
        self._extremes = torch.zeros(2, dtype=torch.int64, device=device)
        self._answer = HostCopy(streams, 2)
        self._unread: tuple[int, _Gathers] | None = None  # the digest and the log that were compared

    def add(self, ids: tuple[int, ...], digested: bytes) -> int:
        """Add a gather of parameters by their ids, also as bytes; return a tag of 31 bits, the highest set.

        Ranks of the group get the same tag if all their gathers since the last step are the same.
        """
        self._gathers += (ids,)
        self._digest = zlib.crc32(digested, self._digest)
        return 2**30 | self._digest % 2**30

    def compare_window(self, names: Mapping[int, str], counter: SentCounter) -> None:
        """Before a step, compare digests over the ranks, unless gathers have tags, and start a new log. Collective.

        On a device with streams, the host does not wait for the result but reads it in the next call. If digests
        differ, every rank of the group raises a ``RankError`` with the first gather that differs.
        """
        self.check(names)
        if not self.tagged:
            for element, value in zip(self._extremes, (self._digest, -self._digest), strict=True):
                element.fill_(value)
            work = all_reduce(self._extremes, self.process_group, counter, dist.ReduceOp.MAX, async_op=True)
            note_launch(self.process_group, self._extremes.device, "the comparison of what ranks have gathered")
            work.wait()
            self._answer.begin(self._extremes)
            self._unread = self._digest, self._gathers
        self._step += 1
        self._before, self._gathers, self._digest = self._gathers, [], self._step
        if not self._streams.concurrent:
            self.check(names)

    def departure(self, names: Mapping[int, str]) -> Departure | None:
        """Return how the gathers of this window differ from the last window; ``None`` if they do not."""
        for now, then in zip(self._gathers, self._before, strict=False):
            if now != then:
                text = f"gathered {_listed(names, now)} where it gathered {_listed(names, then)} in the window before"
                return Departure(Cause.OTHER_MODULES, text)
        return None

    def check(self, names: Mapping[int, str]) -> None:
        """Read the result of the last :meth:`compare_window`, once. If digests differ: collective, and raises."""
        if self._unread is None:
            return
        (compared, gathers), self._unread = self._unread, None
        if self._answer.arrived().tolist() == [compared, -compared]:
            return
        numbered = enumerate(zip_longest(*gather_objects(gathers, self.process_group)), start=1)
        number, by_rank = next((number, by_rank) for number, by_rank in numbered if len(set(by_rank)) > 1)
        found = "\n".join(
            f"  rank {dist.get_global_rank(self.process_group, rank)}: "
            + (_listed(names, ids, len(ids)) if ids else "had gathered all that it wanted")
            for rank, ids in enumerate(by_rank)
        )
        raise RankError(
            f"Ranks gathered different parameters between two optimizer steps; in gather {number}:\n{found}\nUnder"
            " ZeRO-3 all ranks must run the same modules in the same order, unless all parameters are held"
            " (param_memory_budget='all'). What they have computed since is wrong: go back to the last checkpoint."
        )


def _listed(names: Mapping[int, str], ids: Sequence[int], shown: int = 3) -> str:
    return listed([repr(names.get(param_id, f"parameter {param_id}")) for param_id in ids], shown)


class BegunCollectives:
    """Counts, by process group, the reductions and gathers that this rank begins in a window.

    If the window is aborted, the ranks of each group compare the counts. Collective over each of the groups.
    """

    def __init__(self, process_groups: Iterable[ProcessGroup]) -> None:
        self._names = {group: new_name(group) for group in dict.fromkeys(process_groups)}
        self._expected = False  # a rank may have begun some in this window
        self._begun: Counter[ProcessGroup] = Counter()  # by process group
        self._aborted: Counter[ProcessGroup] | None = None  # counts of an aborted window, until they are compared
        self._compared = 0

    def expect(self) -> None:
        """Note that collectives may begin in this window, so that an abort has to compare their numbers."""
        self._expected = True

    def add(self, process_group: ProcessGroup) -> None:
        """Count a collective that this rank sends next; after an aborted window, :meth:`compare_aborted` first."""
        if self._aborted is not None:
            self.compare_aborted()
        self._begun[process_group] += 1

    def close(self) -> None:
        """End the window, after the same collectives on all ranks of a group."""
        self._expected = False
        self._begun.clear()

    def abort(self) -> None:
        """End the window at any point."""
        if self._expected and self._aborted is None:
            self._aborted = self._begun.copy()
        self.close()

    def compare_aborted(self) -> None:
        """Compare the counts of an aborted window before the first collective of the next one. Collective.

        Raises a ``RankError`` if the counts differ, or if some rank has not aborted within the timeout of a group.
        """
        if self._aborted is None:
            return
        begun, self._aborted = self._aborted, None
        self._compared += 1
        for group, name in self._names.items():
            _compare_begun(f"zerosync/aborted/{name}/{self._compared}", begun[group], group)


def _compare_begun(key: str, begun: int, process_group: ProcessGroup) -> None:
    group: Any = process_group or dist.group.WORLD
    size, timeout = dist.get_world_size(group), timeout_of(group).total_seconds()
    store: Store = dist.distributed_c10d._get_default_store()
    store.add(f"{key}/{begun}", 1)
    arrived = store.add(key, 1)
    if arrived == size:
        store.set(f"{key}/all", "")
    else:
        with suppress(dist.DistStoreError):  # timed out
            store.clone().wait([f"{key}/all"], timedelta(seconds=timeout))  # a connection of its own, as it blocks
        arrived = store.add(key, 0)
    others = size - store.add(f"{key}/{begun}", 0)
    if others == 0:
        return
    found = f"{others} of {size} ranks after another number of them"
    if arrived < size:
        found = f"only {arrived} of {size} ranks have done so within {timeout:g} s"
    raise RankError(
        f"A backward was aborted after this rank had begun {begun} collective(s), and {found}. What is begun"
        " cannot be taken back, and would meet those of the next window. Go back to the last checkpoint in new"
        " processes. With coalesce=True and overlap_last=False, nothing is reduced before the step, and under ZeRO-3"
        " with param_memory_budget='all', nothing is gathered in a backward: an exception in it leaves nothing behind."
    )
