"""Gives the systems their turns and measures them. Each system's ranks are processes forked from this one.

What they import is imported here, once, and shared. No thread may exist here when they are forked: a fork has only the
thread that forked it, and the locks as they were.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import rank
import torch
from hosts import Host
from systems import make_model

WARM_UP = 2  # steps of each system that are not counted: ZeRO-3 records its trace in them
RESERVE = 1.5 * 2**30  # bytes of memory that must stay available
QUIET = 0.02  # seconds after which all that was sent has been counted
PORT = 29500  # of the first system; the next one has the next


class Team:
    """The ranks of one system. Between its turns they are stopped while they wait in a read.

    Stopped, because a waiting gloo looks for work a hundred times per second and group, at the expense of the others.
    """

    def __init__(self, job: rank.Job) -> None:
        self.name = job.system
        self._job = job
        self._processes: list[BaseProcess] = []
        self._connections: list[Connection] = []
        self._steps = 0

    def start(self) -> None:
        """Fork the ranks, and wait until the first step can begin."""
        if len(os.listdir("/proc/self/task")) > 1:
            raise RuntimeError("The conductor has threads, and cannot fork ranks. Import nothing that starts one.")
        context = multiprocessing.get_context("fork")
        for index in range(len(self._job.hosts)):
            ours, theirs = context.Pipe()
            process = context.Process(target=rank.main, args=(theirs, self._job, index), daemon=True)
            process.start()
            theirs.close()  # now the rank alone has it, and its death is seen as the end of what it sends
            self._processes.append(process)
            self._connections.append(ours)
        self._wait_ready()
        self._signal(signal.SIGSTOP)

    def take_turn(self, in_a_row: int) -> tuple[float, list[int]]:
        """Make optimizer steps, and return for one: the seconds until all ranks wait again, and the bytes by host."""
        self._signal(signal.SIGCONT)
        before = self._sent()
        began = time.perf_counter()
        for _ in range(in_a_row):
            self._tell(rank.Turn.STEP)
            self._steps += 1
            self._wait_ready()
        seconds = (time.perf_counter() - began) / in_a_row
        time.sleep(QUIET)
        after = self._sent()
        self._signal(signal.SIGSTOP)
        return seconds, [(new - old) // in_a_row for old, new in zip(before, after, strict=True)]

    def finish(self) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
        """End the training: the ranks' results, and the final parameters. The ranks are gone then."""
        self._signal(signal.SIGCONT)
        self._tell(rank.Turn.END)
        results = self._messages()
        self.kill()
        parameters = torch.load(self._job.parameters)
        self._job.parameters.unlink()
        return results, parameters

    def kill(self) -> None:
        """End the ranks, whatever they do."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()

    def _sent(self) -> list[int]:
        """Bytes sent so far by each host."""
        # Where ranks share a host, any of them shows its counter.
        processes = dict(zip(self._job.hosts, self._processes, strict=True))
        return [host.sent(process.pid) for host, process in processes.items() if process.pid is not None]

    def _signal(self, number: signal.Signals) -> None:
        for index, process in enumerate(self._processes):
            if process.exitcode is not None:
                raise self._death(index)
            assert process.pid is not None
            os.kill(process.pid, number)

    def _tell(self, turn: rank.Turn) -> None:
        for connection in self._connections:
            connection.send(turn)

    def _wait_ready(self) -> None:
        steps = self._messages()
        if steps != [self._steps] * len(steps):
            raise SystemExit(
                f"{self.name} made {steps} optimizer steps (by rank) in {self._steps} turns. A turn must be one step,"
                " or nothing measured in it means anything."
            )

    def _messages(self) -> list[Any]:
        """The next message of every rank, by rank. If one fails, the program ends with its error."""
        messages: dict[Any, Any] = {}
        while pending := [connection for connection in self._connections if connection not in messages]:
            for connection in wait(pending):
                index = self._connections.index(connection)
                try:
                    message = connection.recv()
                except (EOFError, ConnectionResetError):
                    raise self._death(index) from None
                if isinstance(message, rank.Failure):
                    raise SystemExit(f"{self.name}, rank {index} failed:\n{message.error}")
                messages[connection] = message
        return [messages[connection] for connection in self._connections]

    def _death(self, index: int) -> SystemExit:
        self._processes[index].join()
        status = self._processes[index].exitcode  # negative: the signal that ended it
        return SystemExit(f"{self.name}, rank {index} died with exit status {status}; above is what it has said.")


def measure(
    hosts: Sequence[Host], names: Sequence[str], model: str, accumulate: int, batch: int, rounds: int, in_a_row: int,
    counts_tensors: bool, scratch: Path,
) -> dict[str, Any]:  # fmt: skip
    """Build all systems, let each make ``in_a_row`` steps per round, and compare the parameters at the end."""
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # what is here now lives on: a collection in a rank neither looks at it nor unshares its memory
    teams = [
        Team(rank.Job(name, model, accumulate, batch, hosts, PORT + index, scratch / f"{name}.pt", counts_tensors))
        for index, name in enumerate(names)
    ]
    try:
        for team in teams:
            team.start()
            _check_memory(team.name)
            print(f"  built {team.name}", flush=True)
        seconds, sent = _take_turns(teams, rounds, in_a_row)
        ends, moved, reference = _compare(teams, model)
    finally:
        for team in teams:
            team.kill()

    # On a link, bytes are those of a host.
    senders = len(hosts) if len(set(hosts)) == 1 else len(set(hosts))
    with torch.device("meta"):
        size = sum(param.numel() * param.element_size() for param in make_model(model).parameters())
    shared = len(set(hosts)) == 1
    return {
        "accumulate": accumulate,
        "parameter_bytes": size,
        "floor_bytes": 2 * size * (senders - 1) // senders,
        "moved": moved,
        "reference": reference,
        "systems": {
            name: {
                "seconds": seconds[name],
                "bytes_sent": [sum(of_step) / senders for of_step in sent[name]],
                "bytes_sent_by_rank": None if shared else [list(of_rank) for of_rank in zip(*sent[name], strict=True)],
                **ends[name],
            }
            for name in names
        },
    }


def _take_turns(
    teams: Sequence[Team], rounds: int, in_a_row: int
) -> tuple[dict[str, list[float]], dict[str, list[list[int]]]]:
    """The seconds and the bytes by host of a step in every measured turn of each system."""
    seconds: dict[str, list[float]] = {team.name: [] for team in teams}
    sent: dict[str, list[list[int]]] = {team.name: [] for team in teams}
    for round_ in range(1 - WARM_UP, rounds + 1):
        times = []
        for team in teams:
            elapsed, of_hosts = team.take_turn(in_a_row)
            times.append(f"{team.name} {1000 * elapsed:.0f}")
            if round_ > 0:
                seconds[team.name].append(elapsed)
                sent[team.name].append(of_hosts)
            _check_memory(team.name)
        print(f"  {f'round {round_}/{rounds}' if round_ > 0 else 'warm-up'}: {', '.join(times)} ms", flush=True)
    return seconds, sent


def _compare(teams: Sequence[Team], model: str) -> tuple[dict[str, dict[str, Any]], float, str]:
    """What each system says of itself and where it ended; how far training has moved a parameter of the reference."""
    initial = {name: param.detach() for name, param in make_model(model).named_parameters()}
    # Lightning's stock DeepSpeed is no reference: under accumulation it computes something else.
    ordered = sorted(teams, key=lambda team: (not team.name.startswith("ddp"), team.name.startswith("lightning-stock")))
    ends: dict[str, dict[str, Any]] = {}
    reference: dict[str, torch.Tensor] = {}
    for team in ordered:
        results, parameters = team.finish()
        reference = reference or parameters
        ends[team.name] = {
            "report": results[0]["report"],
            "phases": results[0]["phases"],
            "peak_unreduced_bytes": max(result["report"].get("peak_unreduced_bytes", 0) for result in results),
            "peak_memory_bytes": max(result["memory"] for result in results),
            "difference": _distance(parameters, reference),
            "difference_between_ranks": max(result["apart"] for result in results),
        }
    return ends, _distance(reference, initial), ordered[0].name


def _distance(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """The largest difference of any element; infinite where one is not a number."""
    assert ours.keys() == theirs.keys()
    return max((ours[name] - theirs[name]).nan_to_num(torch.inf).abs().max().item() for name in ours)


def _check_memory(name: str) -> None:
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(fields["MemAvailable"].split()[0]) * 1024
    if available < RESERVE:
        raise SystemExit(
            f"--systems: with {name}, {available / 2**30:.1f} GiB of memory are left, less than the reserve of"
            f" {RESERVE / 2**30:.1f} GiB. Compare fewer systems at once, for example --systems ddp,stock-2,zerosync-2"
        )
