"""Network namespaces to run ranks in, with byte counters that count those ranks alone. Linux, root and iproute2."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_CLONE_NEWNET = 0x40000000
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of <malloc.h>
_TX_BYTES = 8  # its column in /proc/net/dev, after the interface's name


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

    def enter(self) -> None:
        """Move this process into the namespace. Before it starts a thread, because threads move one by one."""
        libc = ctypes.CDLL(None, use_errno=True)
        with open(f"/var/run/netns/{self.namespace}") as namespace:
            if libc.setns(namespace.fileno(), _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"Cannot enter the network namespace {self.namespace}")

    def sent(self, process: int) -> int:
        """Bytes that have left the interface, by its own counter, which a process in there makes visible."""
        lines = Path(f"/proc/{process}/net/dev").read_text().splitlines()
        counters = {name.strip(): values for name, _, values in (line.partition(":") for line in lines)}
        return int(counters[self.interface].split()[_TX_BYTES])


LOCAL = Host("", "lo", "127.0.0.1")
"""This machine itself, in no namespace of ours."""


def tune() -> None:
    """Let threads that wake take the processor from none, and glibc keep what is freed, before the first thread starts.

    Each message wakes gloo's thread on another rank. With fewer cores than threads, it may preempt the thread that
    sends, which holds the connection's lock, and the sender's own thread of gloo polls until the lock is free: on two
    cores, a tenth of a step's time, and two fifths of its kernel time. glibc returns large blocks to the system until
    it has seen one as large freed: 72,000 page faults in a step of four backwards at 35 M parameters. It also returns
    the end of the heap where more is free than it keeps, 64 MiB at most by itself, and the order of allocations decides
    which system that meets: 20,000 to 38,000 faults, or none.
    """
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_MMAP_THRESHOLD, 2**25)  # the most that it takes
        libc.mallopt(_M_TRIM_THRESHOLD, 2**30)  # more than a step frees


def free_port() -> int:
    """A port on which nothing listens."""
    with socket.socket() as probe:
        probe.bind((LOCAL.address, 0))
        return int(probe.getsockname()[1])


def variables_of_rank(hosts: Sequence[Host], rank: int, port: int) -> dict[str, str]:
    """The environment as torchrun would set it, with one node per namespace; the ranks meet on ``port``."""
    of_node = [index for index, host in enumerate(hosts) if host == hosts[rank]]
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(len(hosts)),
        "LOCAL_RANK": str(of_node.index(rank)),
        "LOCAL_WORLD_SIZE": str(len(of_node)),
        "NODE_RANK": str(list(dict.fromkeys(hosts)).index(hosts[rank])),
        "MASTER_ADDR": hosts[0].address,
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": hosts[rank].interface,
    }


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
def link(ranks: int, rate: str, per_host: int = 1) -> Iterator[list[Host]]:
    """The host of each rank: a namespace for every ``per_host`` ranks, on a link of this rate to a switch."""
    with _namespaces("switch", *(f"host{host}" for host in range(ranks // per_host))) as (switch, *names):
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
            hosts += [host] * per_host
        yield hosts


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
