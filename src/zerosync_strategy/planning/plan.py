"""``plan()``: replay option sets, and say which are worth their memory."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any

from zerosync_strategy.planning.jobs import STOCK, Cluster, OptionSet, Workload, usual_sets
from zerosync_strategy.planning.replay import PREFIX, describe
from zerosync_strategy.planning.timing import Bounds, Crossing, bounds, crossing
from zerosync_strategy.version import __version__

MEASURE = "measure"


class PlanError(RuntimeError):
    """A replay failed; the message says which, and why."""


@dataclass(frozen=True)
class Outcome:
    """One option set, replayed.

    Attributes:
        options: which; budgets in bytes.
        collectives: by kind, calls and bytes that one rank sends in a step.
        peak: bytes of live tensors by kind at the moment of the step when they are most.
        resident: the same of those that something was written to, which is what a CPU's memory is given to.
        sent: over which links, and how long they take.
        time: bounds of the step's seconds.
    """

    options: OptionSet
    collectives: dict[str, tuple[int, int]]
    peak: dict[str, int]
    resident: dict[str, int]
    sent: Crossing
    time: Bounds

    @property
    def bytes_sent(self) -> int:
        """Bytes that one rank sends in a step."""
        return sum(nbytes for _, nbytes in self.collectives.values())

    @property
    def calls(self) -> int:
        """Collectives of a step."""
        return sum(calls for calls, _ in self.collectives.values())

    @property
    def memory(self) -> int:
        """Bytes at the peak."""
        return sum(self.peak.values())


@dataclass(frozen=True)
class Plan:
    """All option sets of one workload on one cluster.

    Attributes:
        parameters: number of elements of the model.
        compute: seconds of computation in a step; 0 where it is not known.
    """

    workload: Workload
    cluster: Cluster
    parameters: int
    compute: float
    outcomes: tuple[Outcome, ...]

    def fits(self, outcome: Outcome) -> int | None:
        """Return the bytes that ``outcome`` leaves of the device's memory, negative if it does not fit."""
        return None if self.cluster.memory is None else self.cluster.memory - outcome.memory

    @property
    def front(self) -> tuple[Outcome, ...]:
        """Those of ZeroSync that no other of its beats in memory and bytes, by rising memory."""
        ours = [each for each in self.outcomes if each.options.system != STOCK]
        ours.sort(key=lambda each: (each.memory, each.bytes_sent))
        front: list[Outcome] = []
        for each in ours:
            if not front or each.bytes_sent < front[-1].bytes_sent:
                front.append(each)
        return tuple(front)

    @property
    def recommended(self) -> Outcome | None:
        """The one on the front that fits and sends least; ``None`` where none fits."""
        fitting = [each for each in self.front if (self.fits(each) or 0) >= 0]
        return min(fitting, key=lambda each: each.bytes_sent, default=None)

    def to_json(self) -> str:
        """Return all of it as a JSON object."""
        outcomes = [
            {
                "name": each.options.name, **dataclasses.asdict(each), "bytes_sent": each.bytes_sent,
                "calls": each.calls, "memory": each.memory, "left": self.fits(each), "on_front": each in self.front,
                "recommended": each is self.recommended,
            }
            for each in self.outcomes
        ]  # fmt: skip
        of_plan = {name: dataclasses.asdict(getattr(self, name)) for name in ("workload", "cluster")}
        found = {"version": __version__, **of_plan, "parameters": self.parameters, "compute": self.compute}
        return json.dumps({**found, "outcomes": outcomes}, indent=1)


def plan(
    workload: Workload,
    cluster: Cluster,
    sets: Sequence[OptionSet] | None = None,
    compute: float | str = 0.0,
    processes: int | None = None,
    timeout: float = 600.0,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> Plan:
    """Replay ``workload`` on ``cluster`` with each of ``sets``, in processes of their own.

    Args:
        sets: by default those of :func:`usual_sets`.
        compute: seconds of the computation of one micro-batch, forward and backward; ``"measure"``: computed here, on
            one thread of this machine's CPU, with the optimizer's step.
        processes: replays at once; by default as many as there are CPUs.
        timeout: seconds for all.
        progress: called with how many replays are done, and of how many.

    Raises:
        PlanError: a replay failed or ran into the timeout.
        ValueError: ``compute`` is neither.
    """
    if isinstance(compute, str) and compute != MEASURE:
        raise ValueError(f"compute takes seconds or {MEASURE!r}, got {compute!r}.")
    sets = list(usual_sets() if sets is None else sets)
    jobs = [*sets, OptionSet("compute", 0)] if compute == MEASURE else sets
    found = _replay(workload, jobs, cluster, processes or os.cpu_count() or 1, timeout, progress)
    if compute == MEASURE:
        measured = found.pop()
        seconds = workload.micro_batches * measured["micro_batch"] + measured["step"]
    else:
        seconds = workload.micro_batches * float(compute)
    outcomes = []
    for options, each in zip(sets, found, strict=True):
        collectives = {kind: (calls, nbytes) for kind, (calls, nbytes) in each["collectives"].items()}
        sent = crossing(collectives, cluster)
        options = dataclasses.replace(options, options=each["options"])
        outcomes.append(Outcome(options, collectives, each["peak"], each["resident"], sent, bounds(sent, seconds)))
    return Plan(workload, cluster, found[0]["parameters"], seconds, tuple(outcomes))


def _replay(
    workload: Workload,
    sets: list[OptionSet],
    cluster: Cluster,
    processes: int,
    timeout: float,
    progress: Callable[[int, int], None],
) -> list[dict[str, Any]]:
    environment = os.environ | {
        "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
        "WORLD_SIZE": str(cluster.ranks), "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    job = describe(workload, sets, cluster.ranks, cluster.backend, processes)
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "zerosync_strategy.planning.replay"], env=environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, start_new_session=True,
        )  # fmt: skip
        late = threading.Timer(timeout, _end, (process,))
        late.start()
        try:
            return list(_results(process, job, sets, timeout, log, progress))
        finally:
            late.cancel()
            _end(process)
            process.wait()


def _results(
    process: subprocess.Popen[str],
    job: str,
    sets: list[OptionSet],
    timeout: float,
    log: IO[str],
    progress: Callable[[int, int], None],
) -> Iterator[dict[str, Any]]:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(job)
    process.stdin.close()
    found: dict[int, dict[str, Any]] = {}
    progress(0, len(sets))
    for line in process.stdout:
        if line.startswith(PREFIX):
            result = json.loads(line.removeprefix(PREFIX))
            if "error" in result:
                raise PlanError(f"The replay of {sets[result['index']].name!r} failed: {result['error']}")
            found[result["index"]] = result
            progress(len(found), len(sets))
    if len(found) < len(sets):
        missing = ", ".join(repr(each.name) for index, each in enumerate(sets) if index not in found)
        log.seek(0)
        said = log.read().strip().splitlines()[-1:]
        raise PlanError(
            f"No result of {missing}: the replay ended, or was ended after {timeout:g} s. Give it more time or memory,"
            f" or fewer option sets. {' '.join(said)}"
        )
    for index in range(len(sets)):
        yield found[index]


def _end(process: subprocess.Popen[str]) -> None:
    """End the replay and its forks."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
