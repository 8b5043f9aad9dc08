"""Network namespaces to run ranks in, with byte counters that count those ranks alone. Linux, root and iproute2."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Host:
    """Where one rank runs.

    Attributes:
        namespace: its network namespace; on the loopback all ranks share one.
        interface: the interface in there over which the rank speaks.
        address: the interface's address.
    """

    namespace: str
    interface: str
    address: str


def require_namespaces() -> None:
    """End the program with a clear message where network namespaces cannot be made."""
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        raise SystemExit(f"Not found: {', '.join(missing)}. Install iproute2 (on Debian and Ubuntu: iproute2).")
    if os.geteuid() != 0:
        raise SystemExit("Network namespaces need root. Run this as root, for example with sudo.")


@contextmanager
def loopback(ranks: int) -> Iterator[list[Host]]:
    """All ranks in one private namespace: its ``lo`` carries their traffic and no other."""
    with _namespaces("lo") as (name,):
        _ip("-n", name, "link", "set", "lo", "up")
        yield [Host(name, "lo", "127.0.0.1")] * ranks


@contextmanager
def link(ranks: int, rate: str) -> Iterator[list[Host]]:
    """One namespace per rank, each on a link of this rate to a switch."""
    with _namespaces("switch", *(f"rank{rank}" for rank in range(ranks))) as (switch, *names):
        _ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", switch, "link", "set", "bridge", "up")
        hosts = []
        for rank, name in enumerate(names):
            host, port = Host(name, "eth0", f"10.77.0.{rank + 1}"), f"port{rank}"
            _ip("link", "add", host.interface, "netns", name, "type", "veth", "peer", "name", port, "netns", switch)
            _ip("-n", switch, "link", "set", port, "master", "bridge", "up")
            _ip("-n", name, "addr", "add", f"{host.address}/24", "dev", host.interface)
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "link", "set", host.interface, "up")
            shape = ["root", "tbf", "rate", rate, "burst", "256kb", "latency", "50ms"]
            _run("tc", "-n", name, "qdisc", "add", "dev", host.interface, *shape)
            hosts.append(host)
        yield hosts


def run_ranks(hosts: Sequence[Host], command: Sequence[str]) -> None:
    """Run ``command`` once per rank to its end. If one fails or this process is interrupted, all are killed.

    Raises:
        SystemExit: a rank failed.
    """
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        for rank, host in enumerate(hosts):
            environment = os.environ | {
                "RANK": str(rank),
                "LOCAL_RANK": "0" if host.interface != "lo" else str(rank),
                "WORLD_SIZE": str(len(hosts)),
                "MASTER_ADDR": hosts[0].address,
                "MASTER_PORT": "29500",
                "GLOO_SOCKET_IFNAME": host.interface,
                "OMP_NUM_THREADS": "1",
                "DS_ACCELERATOR": "cpu",
                "TORCH_CPP_LOG_LEVEL": "ERROR",  # no name server answers in there, and none is needed
            }
            # A session of its own: Ctrl-C reaches this process alone, which then ends the ranks.
            ranks.append(
                subprocess.Popen(
                    ["ip", "netns", "exec", host.namespace, *command],
                    env=environment,
                    stdout=None if rank == 0 else subprocess.DEVNULL,
                    start_new_session=True,
                )
            )
        while any(process.poll() is None for process in ranks) and not any(process.poll() for process in ranks):
            time.sleep(0.2)
        for rank, process in enumerate(ranks):
            if process.poll():
                raise SystemExit(f"Rank {rank} ended with exit status {process.returncode}; its error is above.")
    finally:
        for process in ranks:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


class ByteCounter:
    """Bytes that have left an interface, by its own counter."""

    def __init__(self, interface: str) -> None:
        self._path = Path("/sys/class/net", interface, "statistics", "tx_bytes")

    def read(self) -> int:
        return int(self._path.read_text())


@contextmanager
def _namespaces(*roles: str) -> Iterator[list[str]]:
    """New network namespaces with names of this process's own, removed at the end whatever happens."""
    names = [f"zerosync-{os.getpid()}-{role}" for role in roles]
    made: list[str] = []
    terminate = signal.signal(signal.SIGTERM, lambda *_: exit(143))  # as an exception, so that this cleans up
    try:
        for name in names:
            made.append(name)
            _ip("netns", "add", name)
        yield names
    finally:
        interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)
        for name in made:
            subprocess.run(["ip", "netns", "del", name], check=False)
        signal.signal(signal.SIGINT, interrupt)
        signal.signal(signal.SIGTERM, terminate)


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)!r} failed: {done.stderr.strip()}")
