"""``plan()``: replays option sets, and recommends one."""

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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from zerosync_strategy.core.comm.journal import Traffic
from zerosync_strategy.core.options import BLOCK
from zerosync_strategy.tools.plan.jobs import STOCK, Cluster, OptionSet, Workload, usual_sets
from zerosync_strategy.version import __version__


class PlanError(RuntimeError):
    """A replay failed; the message names the option set and the reason."""


@dataclass(frozen=True)
class Outcome:
    """The result of the replay of one option set.

    Attributes:
        options: the option set, with budgets in bytes.
        collectives: by kind, what one rank sends in a step.
        peak: bytes of live tensors by kind, at the moment of the step when their sum is largest.
        copied_bytes: host memory with copies for checkpoints, with ``checkpoint_background``. The first rank, which is
            replayed, also copies the buffers.
    """

    options: OptionSet
    collectives: dict[str, Traffic]
    peak: dict[str, int]
    copied_bytes: int = 0

    @property
    def sent(self) -> Traffic:
        """What one rank sends in a step, by all collectives together."""
        return sum(self.collectives.values(), Traffic())

    @property
    def memory(self) -> int:
        """Bytes at the peak."""
        return sum(self.peak.values())

    @property
    def configuration(self) -> dict[str, Any]:
        """The part of a DeepSpeed configuration that selects this option set: stage and ``"zerosync"`` block."""
        return {"zero_optimization": {"stage": self.options.stage}, BLOCK: dict(self.options.options)}


@dataclass(frozen=True)
class Plan:
    """All option sets of one workload on one cluster.

    Attributes:
        parameters: number of elements of the model.
        floor: the minimum that a rank sends in a step, on average, in bytes: each gradient and each trained parameter
            once.
        floor_between: the part of ``floor`` that is sent to other nodes, each byte once per node.
        left_out: names of stock's option sets, if the optimizer needs whole parameters.
        units: by class, the number of modules that ZeRO-3 gathers as a whole.
        unit_bytes: of the largest such module.
    """

    workload: Workload
    cluster: Cluster
    parameters: int
    floor: float
    floor_between: float
    outcomes: tuple[Outcome, ...]
    left_out: tuple[str, ...] = ()
    units: Mapping[str, int] = field(default_factory=dict)
    unit_bytes: int = 0

    def fits(self, outcome: Outcome) -> int | None:
        """Return the bytes that ``outcome`` leaves of the device's memory, if known; negative if it does not fit."""
        return None if self.cluster.memory is None else self.cluster.memory - outcome.memory

    def over_floor(self, outcome: Outcome) -> float:
        """Return what ``outcome`` sends divided by the minimum: to other nodes, or with a single node, in all."""
        if self.floor_between:
            return outcome.sent.between / self.floor_between
        return outcome.sent.bytes / self.floor if self.floor else 1.0

    @property
    def recommended(self) -> Outcome | None:
        """The outcome of ZeroSync that fits and sends least between nodes, then in all; ``None``: none fits."""
        ours = [each for each in self.outcomes if each.options.system != STOCK and (self.fits(each) or 0) >= 0]
        # Differences of less than 1 % of the minimum are due to padding, and are ignored.
        return min(ours, key=lambda it: (round(self.over_floor(it), 2), it.sent.bytes, it.memory), default=None)

    def to_json(self) -> str:
        """Return the plan as a JSON object."""
        found = {"version": __version__, **dataclasses.asdict(self)}
        for each, fields in zip(self.outcomes, found["outcomes"], strict=True):
            fields |= {
                "name": each.options.name, "sent": vars(each.sent), "over_floor": self.over_floor(each),
                "memory": each.memory, "left": self.fits(each), "recommended": each is self.recommended,
                "configuration": each.configuration,
            }  # fmt: skip
        return json.dumps(found, indent=1)


def plan(
    workload: Workload,
    cluster: Cluster,
    sets: Sequence[OptionSet] | None = None,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> Plan:
    """Replay ``workload`` on ``cluster`` with each of ``sets``, in separate processes, one per CPU at a time.

    The default of ``sets`` is :func:`usual_sets`. ``progress`` is called with the number of completed replays and of
    all. Raises a :class:`PlanError` if a replay fails, or if none of the sets can train with the optimizer.
    """
    sets = tuple(usual_sets(cluster=cluster) if sets is None else sets)
    found = _replay(workload, cluster, sets, progress)
    replayed = [(options, each) for options, each in zip(sets, found, strict=True) if each is not None]
    left_out = tuple(options.name for options, each in zip(sets, found, strict=True) if each is None)
    if not replayed:
        raise PlanError(f"{workload.optimizer} needs whole parameters, which {', '.join(left_out)} has not.")
    outcomes = []
    for options, each in replayed:
        collectives = {kind: Traffic(*traffic) for kind, traffic in each["collectives"].items()}
        in_force = dataclasses.replace(options, options=each["options"])
        outcomes.append(Outcome(in_force, collectives, each["peak"], each["copied_bytes"]))
    first, nodes = replayed[0][1], cluster.ranks // cluster.per_node
    once = first["nbytes_once"] / cluster.ranks
    floor, floor_between = once * (cluster.ranks - 1), once * (nodes - 1)
    whole: dict[str, Any] = next((each for _, each in replayed if each.get("units")), {"units": {}, "unit_bytes": 0})
    return Plan(
        workload, cluster, first["parameters"], floor, floor_between, tuple(outcomes), left_out, whole["units"],
        whole["unit_bytes"],
    )  # fmt: skip


def _replay(
    workload: Workload, cluster: Cluster, sets: tuple[OptionSet, ...], progress: Callable[[int, int], None]
) -> list[dict[str, Any] | None]:
    """Return the results of :func:`replay.replay`, in the order of ``sets``; ``None`` for a set that is left out."""
    environment = os.environ | {
        "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
        "WORLD_SIZE": str(cluster.ranks), "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    found: dict[int, dict[str, Any]] = {}
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "zerosync_strategy.tools.plan.replay"], env=environment,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, start_new_session=True,
        )  # fmt: skip
        assert process.stdin is not None and process.stdout is not None
        progress(0, len(sets))
        try:
            process.stdin.write(pickle.dumps((workload, cluster, sets)))
            process.stdin.close()
            for line in process.stdout:
                result = json.loads(line)
                if "error" in result:
                    raise PlanError(f"The replay of {sets[result['index']].name!r} failed: {result['error']}")
                found[result["index"]] = result
                progress(len(found), len(sets))
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with its forks
            process.wait()
        if len(found) < len(sets):
            log.seek(0)
            raise PlanError(f"A replay was killed, for its memory perhaps. {log.read()[-300:].strip()}")
    return [found[index] if "collectives" in found[index] else None for index in range(len(sets))]
