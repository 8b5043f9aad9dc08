"""A file per rank with what its process is doing, for ``zerosync doctor --dump``.

With ``ZEROSYNC_DUMP_DIR``, a thread looks at the main thread once a second, as a sampling profiler does, and writes
what it sees: as often, but no more than :data:`FILES` a second of all ranks together, who share the file system's
directory, and each in its turn. A rank that is stuck stays where it is, so its file is right; that of a process that
was killed is :func:`interval` old at most. What fails is written at once. What training does costs nothing for it.
Torch's flight recorder is looked at once a rank is stuck.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from zerosync_strategy.core.failures.answers import Answer
from zerosync_strategy.core.failures.state import RankState, Recorded

DUMP_DIR = "ZEROSYNC_DUMP_DIR"
"""The environment variable that names the directory."""
SECONDS = 1.0
FILES = 100
"""That all ranks together write in a second, at most."""
_NAME = "zerosync_rank_{}.json"


def interval(world_size: int) -> float:
    """Return the seconds from one file of a rank to its next."""
    return max(SECONDS, world_size / FILES)


@dataclass(frozen=True)
class Snapshot:
    """What a file has.

    Attributes:
        answer: what the rank says of itself.
        written: when, in seconds of the wall clock.
        since: since when the rank has not moved.
        world_size: of its job.
    """

    answer: Answer
    written: float
    since: float
    world_size: int

    def save(self, directory: Path) -> None:
        """Write the file, or replace it."""
        path = directory / _NAME.format(self.answer.rank)
        fields = {"written": self.written, "since": self.since, "world_size": self.world_size}
        partial = path.with_suffix(f".{os.getpid()}.{threading.get_ident()}")
        partial.write_text(json.dumps(fields | {"answer": self.answer.encode()}))
        partial.replace(path)

    @staticmethod
    def load_all(directory: Path) -> list[Snapshot]:
        """Return those of all ranks that have one in ``directory``, by rank.

        Raises:
            ValueError: a file is none of these.
        """
        found = []
        for path in directory.glob(_NAME.format("*")):
            try:
                fields = json.loads(path.read_text())
                found.append(Snapshot(**fields | {"answer": Answer.decode(fields["answer"])}))
            except (ValueError, KeyError, TypeError) as problem:
                raise ValueError(f"{path} is no file of ZeroSync's: {problem}") from None
        return sorted(found, key=lambda snapshot: snapshot.answer.rank)


class Snapshots:
    """Writes the file of this process.

    Args:
        directory: for the files of all ranks; it is made.
        rank, world_size: of the job.
        status: returns what this process is doing, with a look into torch's flight recorder if it is asked for one.
    """

    def __init__(self, directory: Path, rank: int, world_size: int, status: Callable[[bool], Answer]) -> None:
        self._directory, self._rank, self._world_size, self._status = directory, rank, world_size, status
        self._since = 0.0
        self._where: object = None  # when it was looked at last
        self._recorded: tuple[Recorded, ...] | None = None  # once it is stuck there
        self._lock = threading.Lock()
        self._ended = threading.Event()
        directory.mkdir(parents=True, exist_ok=True)
        self._thread = threading.Thread(target=self._run, name="zerosync-snapshots", daemon=True)
        self._thread.start()

    def write(self) -> None:
        """Write the file now."""
        with self._lock:
            self._look(self._status(False), is_due=True)

    def _look(self, answer: Answer, is_due: bool) -> None:
        """Note since when the rank has been where ``answer`` says, and write the file if it is due."""
        now, state = time.time(), answer.state
        if (where := _where(answer)) != self._where:
            self._since, self._where, self._recorded = now, where, None
        elif state is not None and not state.recorded:
            if self._recorded is None:
                self._recorded = (self._status(True).state or state).recorded
            answer = replace(answer, state=replace(state, recorded=self._recorded))
        if not is_due:
            return
        with suppress(OSError):  # the run goes on, and tries again
            Snapshot(answer, now, self._since, self._world_size).save(self._directory)

    def end(self, finished: bool) -> None:
        """End the thread. A second call does nothing.

        Args:
            finished: the program has come to its end.
        """
        if self._ended.is_set():
            return
        self._ended.set()
        self._thread.join(timeout=2 * SECONDS)
        with self._lock:
            answer = self._status(False)
            if finished:
                state = RankState(answer.rank, has_finished=True)
                answer = replace(answer, activity="has come to the end of its program", seconds="", state=state)
            self._look(answer, is_due=True)

    def _run(self) -> None:
        every = interval(self._world_size)
        due = time.monotonic() + every * self._rank / self._world_size
        while not self._ended.wait(SECONDS):
            with self._lock:
                is_due = time.monotonic() >= due
                self._look(self._status(False), is_due)
            due += every * is_due


def _where(answer: Answer) -> object:
    state = answer.state
    return answer.activity, answer.position, answer.place, state and (state.waits_for, state.backward, state.failure)
