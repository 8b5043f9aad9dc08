"""The checker against a brute-force oracle: a graph of everything that orders, and reachability in it."""

import random
from dataclasses import dataclass, field

import pytest

from tests.harness.racecheck.checker import Access, Block, Checker, Clock, Kind, Operation, Timeline

SIZE = 8


@dataclass
class Program:
    """A random program, told to the checker and drawn as a graph side by side.

    Nodes are what was issued, in order; an edge leads to what must be complete before. Every stream has a node that it
    ended with last, and an event has the node after which it was recorded.
    """

    seed: int
    streams: int = 3
    checker: Checker = field(default_factory=Checker)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.care = self.random.choice([0.0, 0.9, 1.0])  # how often an access is ordered and recorded as it should be
        self.timelines = [self.checker.host, *(Timeline(f"s{index}") for index in range(self.streams))]
        self.after: list[list[int]] = []  # of each node: those that it comes after
        self.last: list[int | None] = [None] * len(self.timelines)
        self.events: list[tuple[Clock, int | None]] = []
        self.blocks: list[tuple[Block, list[tuple[int, Access]], list[list[tuple[int, Access]]]]] = []
        self.freed: list[tuple[int, list[tuple[int, Access]]]] = []
        self.own: dict[int, tuple[int, Access]] = {}
        self.races: set[tuple[Operation, Operation]] = set()
        self.reuses: set[tuple[Operation, Operation]] = set()

    def node(self, timeline: int, *after: int | None) -> int:
        """Something on a timeline: after what was last there, after all the host waited for, and after these."""
        before = [self.last[timeline], self.last[0], *after]
        self.after.append([node for node in before if node is not None])
        self.last[timeline] = len(self.after) - 1
        return len(self.after) - 1

    def precedes(self, first: int, second: int) -> bool:
        seen, todo = {second}, [second]
        while todo:
            for node in self.after[todo.pop()]:
                if node not in seen:
                    seen.add(node)
                    todo.append(node)
        return first in seen

    def run(self, steps: int) -> None:
        self.allocate()
        for _ in range(steps):
            action = self.random.choices(
                [
                    self.access,
                    self.record_event,
                    self.wait_event,
                    self.synchronize,
                    self.allocate,
                    self.free,
                    self.record,
                ],
                weights=[10, 3, 3, 1, 2, 1, 1],
            )[0]
            action()

    def allocate(self) -> None:
        timeline = self.random.randrange(1, len(self.timelines))
        self.blocks.append((self.checker.allocate(self.timelines[timeline], SIZE), [], []))
        # What was freed there, and which of it was still in use by another timeline as far as the host could know.
        _, _, before = self.blocks[-1]
        before.extend(uses for owner, uses in self.freed if owner == timeline)
        # ... and the last use of the timeline itself, which nobody else need have waited for.
        before.extend([use] for owner, use in self.own.items() if owner == timeline)

    def free(self) -> None:
        if len(self.blocks) < 2:
            return
        block, uses, _ = self.blocks.pop(self.random.randrange(len(self.blocks)))
        self.checker.free(block)
        owner = self.timelines.index(block.timeline)

        def pending(uses: list[tuple[int, Access]], *timelines: int) -> list[tuple[int, Access]]:
            ends = [end for timeline in timelines if (end := self.last[timeline]) is not None]
            return [use for use in uses if not any(self.precedes(use[0], end) for end in ends)]

        uses = pending(uses, 0, *map(self.timelines.index, block.recorded))
        self.freed.append((owner, pending(uses, owner)))
        own = [use for use in uses if use[1].operation.timeline is block.timeline]
        if owner in self.own:
            own.append(self.own[owner])
        if own:
            self.own[owner] = max(own, key=lambda use: use[1].operation.time)

    def record(self) -> None:
        block, _, _ = self.random.choice(self.blocks)
        block.recorded.append(self.random.choice(self.timelines))

    def access(self) -> None:
        timeline = self.random.randrange(len(self.timelines))
        block, uses, before = self.random.choice(self.blocks)
        start = self.random.randrange(SIZE)
        stop = self.random.randrange(start + 1, SIZE + 1)
        if self.random.random() < 0.3:
            start, stop = 0, SIZE
        if self.random.random() < self.care:
            block.recorded.append(self.timelines[timeline])
            for other, last in zip(self.timelines, list(self.last), strict=True):
                self.timelines[timeline].wait(other.clock)
                self.node(timeline, last)
        operation = self.checker.issue(self.timelines[timeline], "op", str(len(self.after)))
        node = self.node(timeline)
        access = Access(start, stop, self.random.random() < 0.5, operation)
        for generation in before:
            for other, use in generation:
                if not self.precedes(other, node):
                    self.reuses.add((use.operation, operation))
        if access.writes and (start, stop) == (0, SIZE):
            before.clear()
        for other, use in uses:
            if (access.writes or use.writes) and access.overlaps(use) and not self.precedes(other, node):
                self.races.add((use.operation, operation))
        uses.append((node, access))
        self.checker.access(block, start, stop, access.writes, operation)

    def record_event(self) -> None:
        timeline = self.random.randrange(1, len(self.timelines))
        clock = Clock(self.timelines[timeline].clock)
        clock.join(self.checker.host.clock)
        self.events.append((clock, self.node(timeline)))

    def wait_event(self) -> None:
        if self.events:
            clock, node = self.random.choice(self.events)
            timeline = self.random.randrange(len(self.timelines))
            self.timelines[timeline].wait(clock)
            self.node(timeline, node)

    def synchronize(self) -> None:
        timeline = self.random.randrange(1, len(self.timelines))
        self.checker.host.wait(self.timelines[timeline].clock)
        self.node(0, self.last[timeline])

    def found(self, kind: Kind) -> set[tuple[Operation, Operation]]:
        findings = [finding for finding in self.checker.findings.values() if finding.kind is kind]
        return {(finding.first.operation, finding.second.operation) for finding in findings}


@pytest.mark.parametrize("first", range(0, 400, 100))
def test_random_programs_have_exactly_the_findings_of_brute_force(first: int) -> None:
    races = reuses = silent = 0
    for seed in range(first, first + 100):
        program = Program(seed, streams=2 + seed % 3)
        program.run(60)
        assert program.found(Kind.RACE) == program.races, seed
        assert program.found(Kind.REUSE) == program.reuses, seed
        races += bool(program.races)
        reuses += bool(program.reuses)
        silent += not program.races and not program.reuses
    assert races and reuses and silent, (races, reuses, silent)
