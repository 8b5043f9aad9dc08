"""``plan()``: replay option sets, and say which are worth their memory."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from zerosync_strategy.core.options.config import BLOCK
from zerosync_strategy.tools.plan import jobs
from zerosync_strategy.tools.plan.jobs import REPLAY, STOCK, TIMED, Cluster, Job, OptionSet, UsageError, Workload
from zerosync_strategy.tools.plan.timing import Bounds, Crossing, Floor, Span, bounds, crossing, floor, own_work
from zerosync_strategy.version import __version__

MEASURE = "measure"
KERNELS = "kernels"
"""What resident memory has beside tensors: workspaces of kernels, Python's objects. Where it is measured."""


class PlanError(RuntimeError):
    """A replay failed; the message says which, and why."""


@dataclass(frozen=True)
class Outcome:
    """One option set, replayed.

    Attributes:
        options: which; budgets in bytes.
        collectives: by kind, calls and bytes that one rank sends in a step.
        peak: bytes of live tensors by kind at the moment of the step when they are most.
        resident: the same of those that something was written to, which is what a CPU's memory is given to; with
            ``compute="measure"`` also what a training has beside them (:data:`KERNELS`).
        sent: over which links, and how long they take.
        work: seconds of the rank's own work in a step.
        time: bounds of the step's seconds.
    """

    options: OptionSet
    collectives: dict[str, tuple[int, int]]
    peak: dict[str, int]
    resident: dict[str, int]
    sent: Crossing
    work: Span
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

    @property
    def configuration(self) -> dict[str, Any]:
        """What a DeepSpeed configuration needs for it: the stage, and the block of options."""
        return {"zero_optimization": {"stage": self.options.stage}, BLOCK: dict(self.options.options)}


@dataclass(frozen=True)
class Plan:
    """All option sets of one workload on one cluster.

    Attributes:
        parameters: number of elements of the model.
        batch: shape of a micro-batch of one rank: the model's own, or as the workload says.
        floor: what a rank must send in a step: each gradient once, and each parameter that is trained.
        compute: as it was given: seconds of a micro-batch's computation, 0 where it is not known, or ``"measure"``.
        measured: how the time of a rank's own work was measured, in words; ``None`` where it was given.
        left_out: names of option sets that do not train under the optimizer, because it needs whole parameters.
    """

    workload: Workload
    cluster: Cluster
    parameters: int
    batch: tuple[int, ...]
    floor: Floor
    compute: float | str
    outcomes: tuple[Outcome, ...]
    measured: str | None = None
    left_out: tuple[str, ...] = ()

    def fits(self, outcome: Outcome) -> int | None:
        """Return the bytes that ``outcome`` leaves of the device's memory, negative if it does not fit."""
        return None if self.cluster.memory is None else self.cluster.memory - outcome.memory

    def over_floor(self, outcome: Outcome) -> float:
        """Return what ``outcome`` sends over the floor: to other nodes, and where there is one node, at all."""
        sent, floor = (
            (outcome.sent.between, self.floor.between) if self.floor.between else (outcome.bytes_sent, self.floor.sent)
        )
        return sent / floor if floor else 1.0

    @property
    def front(self) -> tuple[Outcome, ...]:
        """Those of ZeroSync that no other of its beats in memory and in the links' time, by rising memory.

        That time is of the bytes alone (:attr:`Crossing.in_turn`): where all go the same way, the order is theirs.
        """
        ours = [each for each in self.outcomes if each.options.system != STOCK]
        ours.sort(key=lambda each: (each.memory, each.sent.in_turn))
        front: list[Outcome] = []
        for each in ours:
            if not front or each.sent.in_turn < front[-1].sent.in_turn:
                front.append(each)
        return tuple(front)

    @property
    def recommended(self) -> Outcome | None:
        """The one on the front that fits and keeps the links busy for the least time; ``None`` where none fits."""
        fitting = [each for each in self.front if (self.fits(each) or 0) >= 0]
        return min(fitting, key=lambda each: each.sent.in_turn, default=None)

    def to_json(self) -> str:
        """Return all of it as a JSON object."""
        outcomes = [
            {
                "name": each.options.name, **dataclasses.asdict(each), "bytes_sent": each.bytes_sent,
                "calls": each.calls, "memory": each.memory, "left": self.fits(each), "on_front": each in self.front,
                "over_floor": self.over_floor(each), "recommended": each is self.recommended,
            }
            for each in self.outcomes
        ]  # fmt: skip
        of_plan = {name: dataclasses.asdict(getattr(self, name)) for name in ("workload", "cluster", "floor")}
        fields = {name: getattr(self, name) for name in ("parameters", "batch", "compute", "measured", "left_out")}
        found = {"version": __version__, **of_plan, **fields}
        return json.dumps({**found, "outcomes": outcomes}, indent=1)


def plan(
    workload: Workload,
    cluster: Cluster,
    sets: Sequence[OptionSet] | None = None,
    compute: float | str = 0.0,
    processes: int | None = None,
    timeout: float = 600.0,
    progress: Callable[[int, int], None] = lambda done, of: None,
    at_once: int | None = None,
    threads: int = 1,
) -> Plan:
    """Replay ``workload`` on ``cluster`` with each of ``sets``, in processes of their own.

    Args:
        sets: by default those of :func:`usual_sets` on ``cluster``.
        compute: seconds of the computation of one micro-batch, forward and backward; ``"measure"``: each option set is
            trained here, on this machine's CPU, with all that a rank does itself, and its steps are timed.
        processes: replays at once; by default as many as there are CPUs.
        timeout: seconds for all.
        progress: called with how many replays are done, and of how many.
        at_once: ranks that share a machine's cores, and are measured at once; by default those of a node.
        threads: of torch, of each rank that is measured.

    Raises:
        PlanError: a replay failed or ran into the timeout, or none of the sets trains under the optimizer.
        ValueError: ``compute`` is neither, or the workload names a model or an optimizer that is not there.
    """
    if isinstance(compute, str) and compute != MEASURE:
        raise ValueError(f"compute takes seconds or {MEASURE!r}, got {compute!r}.")
    sets = tuple(jobs.usual_sets(cluster=cluster, dtype=workload.dtype) if sets is None else sets)
    at_once = min(at_once or cluster.per_node, cluster.ranks) if compute == MEASURE else 0
    job = Job(workload, cluster, sets, processes or os.cpu_count() or 1, at_once, threads)
    found = _replay(job, timeout, progress)
    left_out = tuple(options.name for index, options in enumerate(sets) if found[REPLAY, index].get("left_out"))
    if len(left_out) == len(sets):
        raise PlanError(
            f"The optimizer {workload.optimizer} needs whole parameters, and has none in {', '.join(left_out)}. Plan"
            " ZeroSync's stages without gather_changes."
        )
    first: dict[str, Any] = {}
    outcomes = []
    for index, options in enumerate(sets):
        each = found[REPLAY, index]
        if options.name in left_out:
            continue
        first = first or each
        collectives = {kind: (calls, nbytes) for kind, (calls, nbytes) in each["collectives"].items()}
        if options.options.get(jobs.CHANGES):
            _gather_changes(collectives, each["by_changes"], cluster)
        sent, resident = crossing(collectives, cluster), dict(each["resident"])
        if at_once:
            timed = found[TIMED, index]
            work = own_work(timed["seconds"])
            resident[KERNELS] = max(0, timed["resident"] - sum(resident.values()))
        else:
            seconds = workload.micro_batches * float(compute)
            work = Span(seconds, seconds)
        changes = {name: value for name, value in options.options.items() if name == jobs.CHANGES}
        options = dataclasses.replace(options, options={**each["options"], **changes})
        time = bounds(sent, work)
        outcomes.append(Outcome(options, collectives, each["peak"], resident, sent, work, time))
    measured = f"{at_once} rank(s) at once, {threads} thread(s) each, on {jobs.cores()} core(s)" if at_once else None
    least = floor(first["nbytes_once"], cluster)
    batch = tuple(first["batch"])
    return Plan(workload, cluster, first["parameters"], batch, least, compute, tuple(outcomes), measured, left_out)


def _gather_changes(collectives: dict[str, tuple[int, int]], parameters: int, cluster: Cluster) -> None:
    """Let ``collectives`` have the assumed share of the gather of so many ``parameters`` of 16 bits."""
    kind = "isend" if cluster.backend == "gloo" else "all_gather_into_tensor"
    in_full = floor(2 * parameters, cluster)
    of_kind = {kind: in_full.sent, kind + jobs.WITHIN: in_full.within, kind + jobs.BETWEEN: in_full.between}
    for name in collectives.keys() & of_kind.keys():
        calls, sent = collectives[name]
        collectives[name] = calls, sent - int((1 - jobs.ASSUMED_SHARE) * of_kind[name])


def _replay(job: Job, timeout: float, progress: Callable[[int, int], None]) -> dict[tuple[str, int], dict[str, Any]]:
    """Return what the replays of a job found, by their kind and the index of the option set."""
    environment = os.environ | {
        "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
        "WORLD_SIZE": str(job.cluster.ranks), "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    kinds = (REPLAY, TIMED) if job.at_once else (REPLAY,)
    awaited = [(kind, index) for kind in kinds for index in range(len(job.sets))]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "zerosync_strategy.tools.plan.replay"], env=environment,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, start_new_session=True,
        )  # fmt: skip
        late = threading.Timer(timeout, _end, (process,))
        late.start()
        found: dict[tuple[str, int], dict[str, Any]] = {}
        progress(0, len(awaited))
        try:
            for result in _results(process, job):
                key = result["kind"], result["index"]
                if result.get("usage"):
                    raise UsageError(result["error"])
                if "error" in result:
                    raise PlanError(f"The replay of {job.sets[key[1]].name!r} failed: {result['error']}")
                found[key] = result
                progress(len(found), len(awaited))
        finally:
            late.cancel()
            _end(process)
            process.wait()
        if missing := ", ".join(repr(job.sets[index].name) for kind, index in awaited if (kind, index) not in found):
            log.seek(0)
            said = log.read().strip().splitlines()[-1:]
            raise PlanError(
                f"No result of {missing}: the replay ended, or was ended after {timeout:g} s. Give it more time or"
                f" memory, or fewer option sets. {' '.join(said)}"
            )
    return found


def _results(process: subprocess.Popen[bytes], job: Job) -> Iterator[dict[str, Any]]:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(pickle.dumps(job))
    process.stdin.close()
    for line in process.stdout:
        if line.startswith(jobs.PREFIX.encode()):
            yield json.loads(line.removeprefix(jobs.PREFIX.encode()))


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the replay and its forks."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
