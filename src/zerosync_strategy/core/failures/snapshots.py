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

from zerosync_strategy.core.failures.flight_recorder import Recorded
from zerosync_strategy.core.failures.rank_state import Phase, RankState

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
        state: of the rank.
        written: when, in seconds of the wall clock.
        since: since when the rank has not moved.
        world_size: of its job.
    """

    state: RankState
    written: float
    since: float
    world_size: int

    def save(self, directory: Path) -> None:
        """Write the file, or replace it."""
        path = directory / _NAME.format(self.state.rank)
        partial = path.with_suffix(f".{os.getpid()}.{threading.get_ident()}")
        partial.write_text(json.dumps(vars(self) | {"state": self.state.encode()}))
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
                found.append(Snapshot(**fields | {"state": RankState.decode(fields["state"])}))
            except (ValueError, KeyError, TypeError) as problem:
                raise ValueError(f"{path} is no file of ZeroSync's: {problem}") from None
        return sorted(found, key=lambda snapshot: snapshot.state.rank)


class Snapshots:
    """Writes the file of this process.

    Args:
        directory: for the files of all ranks; it is made.
        rank, world_size: of the job.
        state: returns what this process is doing, with a look into torch's flight recorder if it is asked for one.
    """

    def __init__(self, directory: Path, rank: int, world_size: int, state: Callable[[bool], RankState]) -> None:
        self._directory, self._rank, self._world_size, self._state = directory, rank, world_size, state
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
            self._look(self._state(False), writes=True)

    def _look(self, state: RankState, writes: bool) -> None:
        """Note since when the rank has been where ``state`` says, and write the file if it ``writes``."""
        now, where = time.time(), replace(state, seconds=0, recorded=())
        if where != self._where:
            self._since, self._where, self._recorded = now, where, None
        elif not state.recorded:
            if self._recorded is None:
                self._recorded = self._state(True).recorded
            state = replace(state, recorded=self._recorded)
        if writes:
            with suppress(OSError):  # the run goes on, and tries again
                Snapshot(state, now, self._since, self._world_size).save(self._directory)

    def end(self, finished: bool) -> None:
        """End the thread.

        Args:
            finished: the program has come to its end.
        """
        self._ended.set()
        self._thread.join(timeout=2 * SECONDS)
        with self._lock:
            state = self._state(False)
            if finished:
                state = RankState(self._rank, Phase.FINISHED, position=state.position, pid=state.pid, host=state.host)
            self._look(state, writes=True)

    def _run(self) -> None:
        every = interval(self._world_size)
        due = time.monotonic() + every * self._rank / self._world_size
        while not self._ended.wait(SECONDS):
            with self._lock:
                is_due = time.monotonic() >= due
                self._look(self._state(False), is_due)
            due += every * is_due
