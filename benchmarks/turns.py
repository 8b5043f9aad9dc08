"""Ranks on gloo in processes of their own, which live beside those of others and take turns with them."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from multiprocessing import get_context
from typing import Any

RANKS = 2


class Ranks:
    """Two ranks that wait for their turn.

    Args:
        serve: what each rank runs: called with its end of a pipe, ``arguments`` and the environment of the rank. For
            each number that it receives it makes so many steps and sends what they took; it ends with 0.
        arguments: as ``serve`` takes them.
        environment: more of it.
    """

    def __init__(self, serve: Callable[..., None], *arguments: Any, environment: Mapping[str, str] | None = None):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        spawn = get_context("spawn")
        self._turns, self._ranks = [], []
        for rank in range(RANKS):
            own = {"RANK": rank, "LOCAL_RANK": rank, "NODE_RANK": 0, "WORLD_SIZE": RANKS, "LOCAL_WORLD_SIZE": RANKS}
            own |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": 1}
            given = {name: str(value) for name, value in own.items()} | dict(environment or {})
            ours, theirs = spawn.Pipe()
            process = spawn.Process(target=serve, args=(theirs, *arguments, given), daemon=True)
            process.start()
            theirs.close()
            self._turns.append(ours)
            self._ranks.append(process)

    def step(self, steps: int) -> list[Any]:
        """Return what ``steps`` steps took, by rank."""
        for turns in self._turns:
            turns.send(steps)
        return [turns.recv() for turns in self._turns]

    def end(self) -> None:
        """End the ranks."""
        for turns in self._turns:
            turns.send(0)
        for process in self._ranks:
            process.join(30)
            process.kill()
