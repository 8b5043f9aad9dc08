"""The test of the links between hosts, started on each of them from here: by ssh, or by what runs a command there."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from zerosync_strategy.tools.doctor.findings import Finding, Level, error
from zerosync_strategy.tools.doctor.link import TOPIC

PORT = 29_517
_REMEDY = (
    "Check that `{start} true` works from here, that the hosts have the same Python with ZeroSync, and that they reach"
    " {address}:{port}; on several networks, set GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME there."
)


@dataclass(frozen=True)
class Host:
    """A host, and the address at which the others reach it.

    Attributes:
        name: for the command that starts a process there.
        address: its name again, unless it is given as ``NAME=ADDRESS``.
    """

    name: str
    address: str

    @staticmethod
    def parse_all(text: str) -> list[Host]:
        """Return the hosts of a text such as ``"node-1,node-2"``.

        Raises:
            ValueError: they are fewer than two, one has no name, or one comes twice.
        """
        pairs = [each.strip().partition("=") for each in text.split(",")]
        hosts = [Host(name, address or name) for name, _, address in pairs]
        names = {host.name for host in hosts}
        if len(hosts) < 2 or len(names) < len(hosts) or "" in names:
            raise ValueError(f"takes two or more different hosts such as 'node-1,node-2', got {text!r}")
        return hosts


def check(
    hosts: Sequence[Host],
    arguments: Sequence[str],
    shell: str = "ssh {host}",
    per_host: int = 1,
    timeout: float = 180.0,
    port: int = PORT,
    progress: Callable[[str], None] = lambda _: None,
) -> list[Finding]:
    """Start ``zerosync doctor --link`` on all ``hosts`` and return what its rank 0, on the first, has found.

    Args:
        hosts: that have the same installation at the same path.
        arguments: more of them for the command: the speeds to compare with.
        shell: the command that runs another on ``{host}``.
        per_host: ranks on each.
        timeout: seconds for all of it.
        port: of the first host, by which they meet.
        progress: called with what is waited for.
    """
    with tempfile.TemporaryDirectory(prefix="zerosync-") as folder:
        outputs = [Path(folder) / f"host{index}" for index in range(len(hosts))]
        processes = []
        for index, (host, output) in enumerate(zip(hosts, outputs, strict=True)):
            command = [
                *_start(shell, host),
                *_torchrun(hosts, index, per_host, port),
                "doctor",
                "--link",
                "--json",
                *arguments,
            ]
            with output.open("w") as out, output.with_suffix(".err").open("w") as err:
                processes.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=err))
        progress(", ".join(host.name for host in hosts))
        try:
            deadline = time.monotonic() + timeout
            while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
                if any(process.poll() for process in processes):
                    deadline = min(deadline, time.monotonic() + 10.0)  # for the others, which miss it
                time.sleep(0.1)
            statuses = [process.poll() for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
        found = _findings(outputs[0].read_text())
        if found:
            return found
        return [
            error(
                TOPIC,
                f"{host.name}: {'not ended' if status is None else f'ended with status {status}'} after at most"
                f" {timeout:g} s: {_last_line(output.with_suffix('.err'))}",
                _REMEDY.format(start=shlex.join(_start(shell, host)), address=hosts[0].address, port=port),
            )
            for host, status, output in zip(hosts, statuses, outputs, strict=True)
            if status != 0
        ]


def _start(shell: str, host: Host) -> list[str]:
    return [part.replace("{host}", host.name) for part in shlex.split(shell)]


def _torchrun(hosts: Sequence[Host], index: int, per_host: int, port: int) -> list[str]:
    return [
        sys.executable, "-m", "torch.distributed.run", "--nnodes", str(len(hosts)), "--node_rank", str(index),
        "--nproc_per_node", str(per_host), "--master_addr", hosts[0].address, "--master_port", str(port),
        "-m", "zerosync_strategy",
    ]  # fmt: skip


def _findings(output: str) -> list[Finding]:
    """Return the findings in what rank 0 has printed; none if it has not come so far."""
    try:
        found = json.loads(output[output.index("{") :])["findings"]
    except (ValueError, KeyError):
        return []
    return [Finding(each["topic"], Level(each["level"]), each["found"], each["remedy"]) for each in found]


def _last_line(path: Path) -> str:
    lines = [line for line in path.read_text(errors="replace").splitlines() if line.strip(" =-")]
    named = [line for line in lines if "Error" in line and "ChildFailedError" not in line]
    return (named or lines or ["no output"])[-1].strip()[:300]
