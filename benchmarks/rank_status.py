"""What it costs that ranks ask one another what they are doing: seconds, store operations, bytes of text.

    python benchmarks/rank_status.py --ranks 256 1024

The ranks are threads of a few processes, each with a ``RankStatus`` of its own on one TCPStore. "All" ask as after a
timeout, "one" as after an error of its own communication. An operation counts once for each key that it names.
"""

import argparse
import multiprocessing
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, ClassVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from zerosync_strategy.core.failures import inquiry
from zerosync_strategy.core.failures.rank_status import RankStatus

PROCESSES = 8


class CountingStore:
    """A store of one prefix, which counts operations by name."""

    operations: ClassVar[Counter[str]] = Counter()
    lock: ClassVar[Any] = threading.Lock()

    def __init__(self, prefix: str, store: dist.Store) -> None:
        self._store = PrefixStore(prefix, store)

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)

        def counted(first: Any, *args: Any) -> Any:
            with self.lock:
                self.operations[name] += len(first) if isinstance(first, list) else 1
            return method(first, *args)

        return counted


def participate(ports: Any, ranks: range, world_size: int, asking: set[int], barrier: Any, results: Any) -> None:
    """Be ``ranks``: those of ``asking`` ask at once. Put the seconds, operations and texts on ``results``."""
    inquiry.PrefixStore = CountingStore  # type: ignore[misc, assignment]
    store = dist.TCPStore("127.0.0.1", ports.get(), timeout=timedelta(seconds=300))
    statuses = {rank: RankStatus(store.clone(), rank, world_size) for rank in ranks}  # each with a process's own store
    mine = [statuses[rank] for rank in ranks if rank in asking]
    error = RuntimeError("Timed out waiting 5000ms for recv operation to complete")
    time.sleep(1)  # for the threads that begin to wait
    CountingStore.operations.clear()
    barrier.wait()
    began = time.monotonic()
    with ThreadPoolExecutor(max(len(mine), 1)) as pool:
        texts = list(pool.map(lambda status: status.describe("the reduction", error), mine))
    seconds = time.monotonic() - began
    barrier.wait()
    time.sleep(1)  # for the threads that answer
    results.put((seconds, CountingStore.operations.copy(), texts))
    barrier.wait()
    for status in statuses.values():
        status.end()


def measure(world_size: int, asking: set[int]) -> tuple[float, Counter[str], list[str]]:
    """Return the seconds until all of ``asking`` have described, the operations of all ranks, and the texts."""
    fork = multiprocessing.get_context("fork")
    barrier, ports, results = fork.Barrier(PROCESSES), fork.Queue(), fork.Queue()
    shares = [range(first, world_size, PROCESSES) for first in range(PROCESSES)]
    children = [
        fork.Process(target=participate, args=(ports, share, world_size, asking, barrier, results)) for share in shares
    ]
    for child in children:
        child.start()
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # no fork after it: it has threads
    for _ in children:
        ports.put(server.port)
    seconds, operations, texts = zip(*(results.get() for _ in children), strict=True)
    for child in children:
        child.join()
    return max(seconds), sum(operations, Counter()), [text for of_process in texts for text in of_process]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[256, 1024])
    for world_size in parser.parse_args().ranks:
        for who, asking in {"all": set(range(world_size)), "one": {0}}.items():
            seconds, operations, texts = measure(world_size, asking)
            size = sum(len(text.encode()) for text in texts)
            print(f"{world_size} ranks, {who} asking: {seconds:.1f} s, {sum(operations.values())} store operations")
            print(f"  ({dict(operations.most_common())}), {size} bytes of text, {size // len(texts)} each", flush=True)
