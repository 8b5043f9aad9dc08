"""W4: one verdict names the rank, the parameters, the module, the line, the window and the backward of each fault."""

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.faults.verdicts import FAULTS, early_verdicts, is_right, meet, verdicts
from tests.harness.engines import rank, start
from tests.harness.ranks import run_ranks
from zerosync_strategy.core.comm import collectives
from zerosync_strategy.core.comm.journal import SentCounter
from zerosync_strategy.core.failures.flight_recorder import Issued, Recorded, Wait, issued, recorded
from zerosync_strategy.core.failures.rank_state import Advice, Doing, Phase, RankState
from zerosync_strategy.core.failures.verdict import is_certain, judge
from zerosync_strategy.core.failures.words import ADVICE, error_text, report, sentence

# Each fault once; the slow test has all of it.
SOME = [
    (name, fault.stages[number % len(fault.stages)], 4 if number == 0 else 2)
    for number, (name, fault) in enumerate(FAULTS.items())
]
ALL = [(name, stage, ranks) for name, fault in FAULTS.items() for stage in fault.stages for ranks in (2, 4)]


@pytest.mark.extended(
    but=(
        "skips a backward-1-2",
        "is killed in a module-2-2",
        "sleeps in a module-3-2",
        "raises an exception-2-2",
    )
)
@pytest.mark.parametrize(("name", "stage", "world_size"), SOME)
def test_verdict_on_a_fault(name: str, stage: int, world_size: int) -> None:
    for verdict in verdicts(name, stage, world_size):
        assert is_right(name, verdict), verdict


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("name", "stage", "world_size"), ALL)
def test_verdict_on_every_fault(name: str, stage: int, world_size: int) -> None:
    test_verdict_on_a_fault(name, stage, world_size)


@pytest.mark.extended(but=("skips a module-3",))
@pytest.mark.parametrize(
    ("name", "stage"),
    [(name, stage) for name, fault in FAULTS.items() if fault.within is fault.before is None or fault.before is meet
     for stage in fault.stages],
)  # fmt: skip
def test_verdict_long_before_the_timeout(name: str, stage: int, tmp_path: Path) -> None:
    """Of ranks that wait for each other. On gloo, who ends is missed at once, and who sleeps may come."""
    for verdict in early_verdicts(name, stage, 2, tmp_path):
        assert is_right(name, verdict), verdict


# ---- without ranks ---------------------------------------------------------------------------------------------------

FORWARD = RankState(
    0,
    activity="the forward",
    doing=Doing.FORWARD,
    waits_for="the gather of 'a.weight'",
    steps=4,
    backward=2,
    line="t.py:3 f",
)
OTHER = replace(FORWARD, waits_for="the gather of 'b.weight'")
BARRIER = replace(FORWARD, activity="", doing=Doing.ELSE, waits_for="torch.distributed.barrier()", backward=1)
GONE, IDLE = RankState(0, Phase.GONE), replace(FORWARD, activity="", doing=Doing.ELSE, waits_for="")


def reduces(sizes: str, number: int = 7, complete: bool = False) -> RankState:
    recorded = Recorded("0", number, "nccl:all_reduce", sizes, "t.py:9 f", complete)
    return replace(IDLE, recorded=(recorded,))


@pytest.mark.parametrize(
    ("states", "cause", "ranks"),
    [
        ([FORWARD, FORWARD, OTHER], "other order", (2,)),
        ([FORWARD, OTHER], "other order", (0, 1)),  # neither departs from what it did: nobody can know
        ([FORWARD, replace(OTHER, departure="gathered 'backward.b' where it gathered 'a'")], "other modules", (1,)),
        ([replace(FORWARD, departure="x"), replace(OTHER, departure="x"), FORWARD, FORWARD], "other modules", (0, 1)),
        # All depart alike, as where evaluation begins: that tells them not apart.
        ([replace(FORWARD, departure="x"), replace(FORWARD, departure="x"), replace(OTHER, departure="x")],
         "other order", (2,)),
        ([FORWARD, BARRIER], "other call", (1,)),
        ([replace(FORWARD, doing=Doing.UPDATES), BARRIER], "other call", (1,)),
        ([BARRIER, BARRIER, FORWARD], "other order", (2,)),
        ([FORWARD, IDLE, FORWARD], "elsewhere", (1,)),
        ([FORWARD, GONE, IDLE], "process ended", (1,)),
        ([FORWARD, replace(IDLE, phase=Phase.FAILED, failure="ValueError in the forward"), GONE], "exception", (1,)),
        ([FORWARD, FORWARD], "same call", (0, 1)),
        ([reduces("[4]"), reduces("[4]"), reduces("[5]")], "other call", (2,)),  # NCCL: nobody waits on the host
        ([reduces("[4]"), reduces("[4]", 6, complete=True)], "elsewhere", (1,)),
        ([FORWARD, replace(FORWARD, verdict="rank 1 slept")], "reported before", ()),
    ],
)  # fmt: skip
def test_causes(states: list[RankState], cause: str, ranks: tuple[int, ...]) -> None:
    verdict = judge([replace(state, rank=rank) for rank, state in enumerate(states)])
    assert verdict is not None and (verdict.cause, verdict.ranks) == (cause, ranks), verdict
    assert all(str(rank) in sentence(verdict) for rank in ranks)


def test_a_verdict_that_was_told_keeps_its_advice() -> None:
    """A rank that asks when another has stopped gets what that has told, and no other advice."""
    apart = [replace(FORWARD, reduces=True, backward=1), replace(FORWARD, reduces=True, backward=2, rank=1)]
    first = report(apart)
    told = replace(FORWARD, verdict=first.verdict, advises=first.advises)
    for found in (first, report([told, replace(FORWARD, rank=1)])):
        text = error_text(1, "the reduction", "before its first step", RuntimeError("gone"), found)
        assert ADVICE[Advice.OTHER_BACKWARDS] in text and "Either a rank has ended" not in text


def test_nobody_waits() -> None:
    assert judge([IDLE, replace(IDLE, rank=1)]) is None


def test_a_verdict_on_a_thousand_ranks_is_short() -> None:
    states = [replace(FORWARD, rank=rank, line=f"t.py:{rank} f") for rank in range(1024)]
    states[700] = replace(IDLE, rank=700)
    verdict = judge(states)
    assert verdict is not None and verdict.ranks == (700,) and len(sentence(verdict)) < 400


def test_collectives_of_nccl_have_the_names_of_their_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    """By gloo in NCCL's place, whose entries stand for NCCL's: their state says whether they are complete.

    gloo's own recorder knows none of them. It has a collective of the same group, with a number that NCCL's have too.
    """

    def run() -> list[Recorded]:
        start()
        monkeypatch.setattr(collectives, "backend_for", lambda *_: "nccl")
        for k in range(3):
            words = f"the reduction of the gradients of '{k}'"
            how = collectives.Summing(SentCounter(), label=words)
            collectives.reduce_scatter(torch.ones(2, 4), dist.group.WORLD, how).wait()
        bindings: Any = torch._C._distributed_c10d
        dump = pickle.loads(bindings._dump_fr_trace())
        if "entries" not in dump:
            return []
        entries = [entry for entry in dump["entries"] if "reduce" in entry["profiling_name"]]
        of_nccl = [
            entry | {"profiling_name": "nccl:_reduce_scatter_base", "state": "scheduled" if is_last else "completed"}
            for entry, is_last in zip(entries, (False, False, True), strict=True)
        ]
        of_gloo = [entries[1] | {"profiling_name": "gloo:broadcast"}]
        nccls, others = dump | {"entries": of_nccl, "nccl_comm_state": {}}, dump | {"entries": of_gloo}
        monkeypatch.setattr(bindings, "_dump_nccl_trace", lambda: pickle.dumps(nccls, 2), raising=False)
        monkeypatch.setattr(bindings, "_dump_fr_trace", lambda: pickle.dumps(others, 2), raising=False)
        return list(recorded())

    for found in run_ranks(run):
        if not found:
            pytest.skip("this release of torch records no collectives of gloo")
        last, of_gloo = found
        assert last.label == "the reduction of the gradients of '2'" and not last.complete
        assert last.text.startswith("the reduction of the gradients of '2' (collective ")
        assert of_gloo.name == "gloo:broadcast" and of_gloo.label == "" and of_gloo.complete


def test_a_rank_waits_for_the_first_collective_that_is_not_complete() -> None:
    """The host has launched more behind it, and collectives of another process group before."""
    names = [("1", 4, True), ("1", 7, False), ("1", 5, False), ("0", 2, False)]
    records = tuple(Recorded(group, number, "nccl:reduce", complete=complete) for group, number, complete in names)
    assert replace(FORWARD, recorded=records).pending == records[2]
    assert replace(FORWARD, recorded=records[:1]).pending is None


def test_collectives_of_a_process_group_that_is_made_anew(tmp_path: Path) -> None:
    """Torch keeps those of the first, of the same name and numbers."""

    def start(name: str) -> None:
        # A file each: at one address, a rank that is ahead would meet the first group's store, which is about to go.
        dist.init_process_group("gloo", init_method=f"file://{tmp_path}/{name}", rank=rank(), world_size=2)

    def run() -> tuple[int, bool]:
        start("first")
        for _ in range(5):
            dist.all_reduce(torch.ones(4))
        dist.destroy_process_group()
        start("second")
        for _ in range(2):
            dist.broadcast(torch.ones(7), 0)
        found = recorded()
        return (found[0].number, found[0].sizes == "[7]") if found else (2, True)

    assert run_ranks(run) == [(2, True)] * 2


# ---- what is certain -------------------------------------------------------------------------------------------------


def on_nccl(name: str, number: int) -> dict[str, Any]:
    """An entry of torch's flight recorder."""
    return {
        "process_group": ("0", "default_pg"), "pg_id": 0, "collective_seq_id": number, "profiling_name": f"nccl:{name}",
        "state": "scheduled", "retired": False, "input_sizes": [[4]], "is_p2p": False,
    }  # fmt: skip


def test_collectives_of_nccl_that_do_not_meet() -> None:
    """NCCL matches them by their order alone, so another one with the same number comes in the place of the awaited."""
    entries = [on_nccl("reduce", 6), on_nccl("_all_gather_base", 7)]
    keys = [("nccl", "0", number, f"nccl:{name}", "") for name, number in
            [("reduce", 6), ("_all_gather_base", 7), ("reduce", 7), ("reduce", 8)]]  # fmt: skip
    same = [Issued.SAME, Issued.SAME, Issued.OTHER, Issued.NOT_YET]
    assert list(issued(keys, entries)) == same
    assert list(issued([("gloo", "0", 7, "gloo:barrier", "")], entries)) == [Issued.NOT_YET]


def test_only_what_no_rank_can_issue_any_more_is_waited_for_in_vain() -> None:
    def waiting(by_rank: Any, blocks: bool, *members: int) -> list[RankState]:
        return [
            replace(FORWARD, rank=rank, wait=Wait(keys[rank], members, blocks), issued=found)
            for rank, found in enumerate(by_rank)
        ]

    keys = [("nccl", "0", 7, "nccl:reduce", ""), ("nccl", "0", 7, "nccl:broadcast", ""), ("nccl", "1", 3, "x", "")]
    other = waiting([(1, 2, 1), (2, 1, 1)], blocks=False)
    assert is_certain(other, keys)
    assert not is_certain(other, keys[:1])  # the last inquiry knew of one alone
    assert not is_certain([*other, replace(IDLE, rank=2, issued=(1, 1, 1))], keys)  # who computes may know better
    assert not is_certain(waiting([(1, 0, 0), (0, 1, 0)], blocks=False), keys)  # hosts that may go on
    assert is_certain(waiting([(1, 0, 0), (0, 1, 0)], True, 0, 1), keys)
    assert not is_certain(waiting([(1, 0, 1), (0, 1, 1), (0, 0, 1)], True, 0, 1), keys)  # all have issued the last
    assert not is_certain(waiting([(1, 0), (1, 1)], True, 0, 1), keys)  # all have issued the first
    assert not is_certain([FORWARD, GONE], keys) and is_certain([FORWARD, replace(GONE, rank=1, pid=7)], keys)
