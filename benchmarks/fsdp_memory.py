"""How many units FSDP2 has in memory at once, counted in storages: rank 0 of 64 on torch's fake process group, on CPU.

    python benchmarks/fsdp_memory.py

A unit is one of eight linear layers; activations are small. Counted are storages of at least half a unit, after each
operation. Ours are counted by ``tests/racecheck/test_memory.py``, in the simulated device's allocator.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

LAYERS, WIDTH, WORLD_SIZE = 8, 512, 64
UNIT = 4 * WIDTH * WIDTH  # bytes


class Storages(TorchDispatchMode):
    """Counts the bytes of the large storages that operations have used and that are still there."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._known: dict[int, Any] = {}

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operation(*args, **(kwargs or {}))
        for tensor in tree_leaves((args, kwargs, result)):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self._known.setdefault(storage._cdata, storage._weak_ref())
        there = (torch.UntypedStorage._new_with_weak_ptr(reference) for reference in self._known.values())
        sizes = [storage.nbytes() for storage in there if storage is not None]
        self.peak = max(self.peak, sum(size for size in sizes if size >= UNIT / 2))
        return result


def main() -> None:
    """Print the peaks of the second step's forward and backward."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD_SIZE)
    mesh = init_device_mesh("cpu", (WORLD_SIZE,))
    net = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])
    for module in (*net, net):
        fully_shard(module, mesh=mesh, reshard_after_forward=True)
    optimizer = torch.optim.AdamW(net.parameters())
    for _ in range(2):
        with Storages() as forward:
            loss = net(torch.ones(4, WIDTH)).square().mean()
        with Storages() as backward:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(
        f"units in memory at once: forward {forward.peak / UNIT:g}, backward {backward.peak / UNIT:g}, with gradients"
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
