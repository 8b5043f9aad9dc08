"""The test of the links between hosts, started on each of them from here: by ssh, or by what runs a command there."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from zerosync_strategy.tools.doctor.findings import Finding, Level
from zerosync_strategy.tools.doctor.link import TOPIC
from zerosync_strategy.tools.doctor.processes import run_together

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
) -> list[Finding]:
    """Start ``zerosync doctor --link`` on all ``hosts`` and return what its rank 0, on the first, has found.

    Args:
        hosts: that have the same installation at the same path, and meet at ``port`` of the first.
        arguments: more of them for the command: the speeds to compare with.
        shell: the command that runs another on ``{host}``.
        timeout: seconds for all of it.
    """
    starts = [[part.replace("{host}", host.name) for part in shlex.split(shell)] for host in hosts]
    address = hosts[0].address
    commands = [
        [
            *start, sys.executable, "-m", "torch.distributed.run", "--nnodes", str(len(hosts)), "--node_rank",
            str(index), "--nproc_per_node", str(per_host), "--master_addr", address, "--master_port", str(port),
            "-m", "zerosync_strategy", "doctor", "--link", "--json", *arguments,
        ]
        for index, start in enumerate(starts)
    ]  # fmt: skip
    ended = run_together(commands, timeout, [None] * len(hosts))
    return _findings(ended[0].output) or [
        TOPIC.error(
            f"{host.name}: {process.how} after at most {timeout:g} s: {process.last_line}",
            _REMEDY.format(start=shlex.join(start), address=address, port=port),
        )
        for host, process, start in zip(hosts, ended, starts, strict=True)
        if process.status != 0
    ]


def _findings(output: str) -> list[Finding]:
    """Return the findings in what rank 0 has printed; none if it has not come so far."""
    try:
        found = json.loads(output[output.index("{") :])["findings"]
    except (ValueError, KeyError):
        return []
    return [Finding(each["topic"], Level(each["level"]), each["found"], each["remedy"]) for each in found]
