"""Ranks on gloo in processes of their own, which live beside those of others and take turns with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from multiprocessing import get_context
from typing import Any

from hosts import LOCAL, free_port, tune, variables_of_rank

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
        spawn, port = get_context("spawn"), free_port()
        self._turns, self._ranks = [], []
        for rank in range(RANKS):
            given = variables_of_rank([LOCAL] * RANKS, rank, port) | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
            given |= environment or {}
            ours, theirs = spawn.Pipe()
            process = spawn.Process(target=_serve, args=(serve, theirs, *arguments, given), daemon=True)
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


def _serve(serve: Callable[..., None], *arguments: Any) -> None:
    tune()
    serve(*arguments)
