"""Parameters of a unit lie in one storage, and nobody notices: against plain torch, held until the step or not."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import deepspeed
import pytest
import safetensors.torch
import torch
from torch import nn

from tests.harness.engines import make_engine, rank
from tests.harness.oracle import Oracle, distance, full_parameters
from tests.harness.ranks import run_ranks
from zerosync_strategy import attach
from zerosync_strategy.core.engine.transitions import ALIGNMENT

WIDTH = 12
SHARDED = {
    "stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 3 * WIDTH * WIDTH,
    "stage3_max_reuse_distance": 0,
}  # fmt: skip
BUDGETS = [0, "all", 4 * WIDTH * WIDTH * 4]  # nothing held, everything, something


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.norm, self.narrow = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.inside: Callable[[Block], Any] = lambda block: 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.narrow(torch.tanh(self.wide(self.norm(x)))) + self.inside(self)


class Net(nn.Module):
    """Blocks, of which two share a weight, and one has a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.blocks[2].wide.weight = self.blocks[0].wide.weight
        self.blocks[1].narrow.weight.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return (x - 1.0).square().mean()


def data(k: int, of_rank: int) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * k + of_rank))


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([param for param in net.parameters() if param.requires_grad], lr=0.1, momentum=0.9)


def trained(budget: Any, between: Callable[[Any, int], None], inside: Any = None, steps: int = 5) -> float:
    """Train beside plain torch, with ``between`` of both nets before each step, and return how far they are apart."""
    net, plain = Net(), Net()
    if inside is not None:
        net.blocks[0].inside = plain.blocks[0].inside = inside
    engine, oracle = make_engine(net, sgd(net), 3, SHARDED), Oracle(plain, sgd(plain))
    attach(engine, param_memory_budget=budget)
    for k in range(steps):
        net.to("cpu").float()
        for part in range(2):
            engine.backward(engine(data(2 * k + part, rank())) / 2)
            oracle.backward(lambda of, k=k, part=part: plain(data(2 * k + part, of)) / 2)
            between(net, k)
            between(plain, k)
        engine.step()
        oracle.step()
    return distance(full_parameters(net), full_parameters(plain))


def memory_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


@pytest.mark.extended
@pytest.mark.parametrize("budget", BUDGETS)
def test_what_is_gathered_together_shares_one_aligned_storage(budget: Any) -> None:
    """Without what several units have, and with bytes only where some of it is unsharded."""

    def run() -> float:
        found: list[tuple[set[int], bool, int]] = []
        storages: list[torch.UntypedStorage] = []

        def note(block: Block) -> float:
            own = [param for param in block.parameters() if param is not block.wide.weight]
            offsets = [each.data.storage_offset() * each.element_size() for each in (*own, block.wide.weight)]
            found.append(({memory_of(each.data) for each in own}, any(at % ALIGNMENT for at in offsets), len(offsets)))
            if type(block.wide.weight) is nn.Parameter and hasattr(block.wide.weight, "ds_id"):
                assert memory_of(block.wide.weight.data) not in found[-1][0]
                storages.append(block.wide.bias.data.untyped_storage())
            return 0.0

        def between(net: Net, k: int) -> None:
            if budget == 0 and hasattr(net.blocks[0].wide.bias, "ds_id"):
                assert all(each.nbytes() == 0 for each in storages)
            storages.clear()

        error = trained(budget, between, note)
        sharing = [len(memories) for memories, _, _ in found]
        assert min(sharing) == 1 and not any(unaligned for _, unaligned, _ in found[::2])
        return error

    assert run_ranks(run) == [0.0, 0.0]


@pytest.mark.extended
@pytest.mark.parametrize("budget", BUDGETS)
def test_edits_of_one_parameter_are_of_that_one_alone(budget: Any) -> None:
    """Also where values were exchanged within a unit, as by a program that swaps or merges weights."""

    def edit(net: Net, k: int) -> None:
        first, second = net.blocks[0], net.blocks[1]
        if k == 1:  # an adapter is merged
            first.wide.weight.data += torch.outer(first.wide.bias.data, second.wide.bias.data)
        if k == 2:
            first.narrow.weight.data = first.narrow.weight.data * 0.5 + 0.01
        if k == 3:
            with torch.no_grad():
                second.norm.weight.mul_(1.1)
                second.wide.weight[0] = second.wide.weight[1]
                second.narrow.bias.copy_(second.wide.bias)
        if k == 4:
            one, other = first.wide.bias.data.clone(), first.narrow.bias.data.clone()
            first.wide.bias.data, first.narrow.bias.data = other, one

    assert run_ranks(lambda: trained(budget, edit)) == [0.0, 0.0]


@pytest.mark.extended(but=("all",))
@pytest.mark.parametrize("budget", BUDGETS)
def test_contexts_of_one_parameter_of_a_unit(budget: Any) -> None:
    def context(net: Net, k: int) -> None:
        weight, bias = net.blocks[k % 2].wide.weight, net.blocks[1].norm.bias
        if hasattr(weight, "ds_id"):
            with deepspeed.zero.GatheredParameters([weight], modifier_rank=0), torch.no_grad():
                if rank() == 0:
                    weight.add_(0.125)
            with deepspeed.zero.GatheredParameters([bias]):
                float(bias.sum())
        else:
            weight.data += 0.125

    assert run_ranks(lambda: trained(budget, context)) == [0.0, 0.0]


def kept(budget: Any) -> tuple[list[bool], list[int]]:
    """Whether views that a forward has kept stay as they were, and the bytes of their storages at the end."""
    net, views = Net(), []
    engine = make_engine(net, sgd(net), 3, SHARDED)
    attach(engine, param_memory_budget=budget)
    net.blocks[0].inside = lambda block: views.append((block.norm.bias.detach()[1:], block.norm.bias.detach().clone()))
    net.blocks[0].inside = lambda block, add=net.blocks[0].inside: add(block) or 0.0
    same = []
    for k in range(3):
        engine.backward(engine(data(k, rank())))
        if budget == "all":
            same.append(all(torch.equal(view, before[1:]) for view, before in views[-1:]))
        engine.step()
        if budget == "all":
            same.append(all(torch.equal(view, before[1:]) for view, before in views))
    return same, [view.untyped_storage().nbytes() for view, _ in views]


@pytest.mark.extended
def test_a_view_that_is_kept_keeps_the_storage_of_its_unit_and_no_more() -> None:
    """Held until the step, it stays what it was; else its bytes go with the unit's."""
    unit = sum(-(-4 * param.numel() // ALIGNMENT) * ALIGNMENT + ALIGNMENT for param in Block().parameters())
    for same, sizes in run_ranks(kept, "all"):
        assert all(same) and len(same) == 6 and max(sizes) <= unit
    for same, sizes in run_ranks(kept, 0):
        assert same == [] and sizes == [0] * len(sizes)


def saved(budget: Any, evaluate: bool) -> dict[str, Any]:
    """Save one parameter and all, in several ways, where the values are there; compare with plain torch."""
    net, plain = Net(), Net()
    engine = make_engine(net, sgd(net), 3, SHARDED | {"stage3_max_reuse_distance": 10**9})
    attach(engine, param_memory_budget=budget)
    if evaluate:
        with torch.no_grad():
            for _ in range(3):
                engine(data(0, rank()))
    else:
        engine.backward(engine(data(0, rank())))
    own, expected = net.state_dict(), plain.state_dict()
    if evaluate:  # the shared weight has gone with the last block
        for state in (own, expected):
            del state["blocks.0.wide.weight"], state["blocks.2.wide.weight"]
    name, found = "blocks.1.narrow.bias", {}

    def through(write: Callable[[Any, Any], None], read: Callable[[Any], Any], what: Any) -> tuple[Any, int]:
        file = io.BytesIO()
        write(what, file)
        return read(io.BytesIO(file.getvalue())), len(file.getvalue())

    def ties(state: dict[str, torch.Tensor]) -> bool:
        return memory_of(state["blocks.0.wide.weight"]) == memory_of(state["blocks.2.wide.weight"])

    for write, read in ((torch.save, torch.load), (pickle.dump, pickle.load)):
        one, size = through(write, read, own[name])
        every, of_all = through(write, read, own)
        stock, of_stock = through(write, read, expected)
        # Plain pickle writes the storage of a view with each view, torch.save once.
        more = 2 if evaluate or write is torch.save else len(list(Block().parameters()))
        found[write.__name__] = torch.equal(one, expected[name]), size < 8_000, of_all < more * of_stock
        found[f"all by {write.__name__}"] = [torch.equal(every[key], expected[key]) for key in expected]
        found[f"ties by {write.__name__}"] = [evaluate or write is pickle.dump or ties(every) == ties(stock)]
    every = safetensors.torch.load(safetensors.torch.save({key: own[key].clone() for key in own}))
    found["safetensors"] = [torch.equal(every[key], expected[key]) for key in expected]
    block = copy.deepcopy(net.blocks[1])
    found["copy"] = list(map(torch.equal, block.state_dict().values(), plain.blocks[1].state_dict().values()))
    found["storages"] = [len({memory_of(param) for param in block.parameters()}) == 6]
    engine.destroy()
    return found


@pytest.mark.parametrize(("budget", "evaluate"), [("all", False), (0, True)])
def test_what_is_saved_is_what_it_was(budget: Any, evaluate: bool) -> None:
    for found in run_ranks(saved, budget, evaluate):
        assert [name for name, same in found.items() if not all(same)] == []


def shared(budget: Any) -> float:
    """Train where a program gives a weight to other processes, which keeps its memory where it is."""

    def share(block: Block) -> float:
        block.wide.bias.data.share_memory_()
        return 0.0

    return trained(budget, lambda net, k: None, share)


@pytest.mark.extended(
    but=(
        "all",
        "2304",
    )
)
@pytest.mark.parametrize("budget", BUDGETS)
def test_memory_that_other_processes_share(budget: Any) -> None:
    assert run_ranks(shared, budget) == [0.0, 0.0]
