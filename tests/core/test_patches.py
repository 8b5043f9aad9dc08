"""Patches of weights: a receiver that applies them has the bits of those that are trained."""

from typing import Any

import pytest
import torch

from tests.harness.engines import make_engine, rank
from tests.harness.networks import stack
from tests.harness.ranks import run_ranks
from zerosync_strategy import WeightPatch, WeightSnapshot, attach

WIDTH = 64
BF16 = {"bf16": {"enabled": True}}


@pytest.mark.parametrize(
    ("stage", "zero"), [(2, {}), (3, {"stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 5000})]
)
def test_a_receiver_has_the_weights_that_are_trained(stage: int, zero: dict[str, Any]) -> None:
    """In bytes, and as an engine takes indices and values; on one rank alone, too."""

    def run() -> list[float]:
        net = stack(WIDTH, 4)
        net.register_buffer("count", torch.tensor(0))
        engine = make_engine(net, torch.optim.AdamW(net.parameters(), lr=1e-6), stage, zero, **BF16)
        zerosync = attach(engine)
        snapshot, received, indexed, sizes = WeightSnapshot(), {}, {}, []
        for k in range(4):
            x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * k + rank())).bfloat16()
            engine.backward((engine(x) - 0.2).float().square().mean())
            engine.step()
            net.count += 1
            full = dict(zerosync.full_weights())
            if rank() == 1 and k == 2:
                for _ in zerosync.full_weights():
                    pass
                continue
            sizes.append(0)
            for patch in zerosync.full_weights(changes_since=snapshot):
                data = patch.to_bytes()
                sizes[-1] += len(data)
                for weights in (received, indexed):
                    weights.setdefault(patch.name, torch.zeros(patch.shape, dtype=patch.dtype))
                WeightPatch.from_bytes(data).apply(received[patch.name])
                if patch.indices is None:
                    indexed[patch.name].view(-1).copy_(patch.values)
                else:
                    indexed[patch.name].view(-1)[patch.indices] = patch.values
            for weights in (received, indexed):
                assert weights.keys() == full.keys()
                assert all(torch.equal(_bits(weights[name]), _bits(full[name])) for name in full)
        size = sum(tensor.nbytes for tensor in full.values())
        assert snapshot.nbytes == size
        return [nbytes / size for nbytes in sizes]

    for first, *others in run_ranks(run):
        assert first > 1
        assert max(others) < 0.15  # of so few elements each; benchmarks/results has larger ones


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int16) if tensor.dtype is torch.bfloat16 else tensor


def between(old: torch.Tensor, new: torch.Tensor) -> WeightPatch:
    snapshot = WeightSnapshot()
    list(snapshot.patches([("w", old)]))
    (patch,) = snapshot.patches([("w", new)])
    return patch


@pytest.mark.parametrize("numel", [1, 100, 70_000])
@pytest.mark.parametrize("changed", [1e-4, 0.01, 0.6])
def test_bytes_and_back(numel: int, changed: float) -> None:
    """Few changes far apart, and most: whatever is smaller is packed."""
    draw = torch.Generator().manual_seed(numel)
    old = torch.randint(-(2**15), 2**15, (numel,), generator=draw).to(torch.int16)
    new = old.clone()
    places = torch.rand(numel, generator=draw) < changed
    places[-1] = True
    new[places] += torch.randint(1, 300, (int(places.sum()),), generator=draw).to(torch.int16)
    old, new = old.view(torch.bfloat16), new.view(torch.bfloat16)
    patch = between(old, new)
    data = patch.to_bytes()
    assert len(data) < 600 + 3.5 * int(places.sum())
    back = WeightPatch.from_bytes(data)
    assert torch.equal(back.indices, patch.indices)
    back.apply(old)
    assert torch.equal(_bits(old), _bits(new))


def test_what_is_refused() -> None:
    old = torch.arange(100.0).bfloat16()
    new = torch.where(torch.arange(100) % 9 == 0, old + 1, old)
    patch = between(old, new)
    twice = old.clone()
    patch.apply(twice)
    with pytest.raises(ValueError, match="was made from other values than the tensor has"):
        patch.apply(twice)
    assert torch.equal(twice, new)
    with pytest.raises(ValueError, match=r"is for torch\.bfloat16 of shape \(100,\), found torch\.float32"):
        patch.apply(old.float())
    data = patch.to_bytes()
    with pytest.raises(ValueError, match=r"got \d+ bytes that are no whole patch"):
        WeightPatch.from_bytes(data[:-1])
    assert list(WeightSnapshot().patches([])) == []


def test_no_damage_gives_other_weights() -> None:
    """Each byte is changed in turn: an error, or the right weights, where the byte says nothing."""
    old = torch.arange(1000.0).bfloat16()
    patch = between(old, torch.where(torch.arange(1000) % 90 == 0, old + 64, old))
    refused = 0
    for at in range(len(data := bytearray(patch.to_bytes()))):
        data[at] ^= 0x15
        into = old.clone()
        try:
            WeightPatch.from_bytes(bytes(data)).apply(into)
        except ValueError:
            refused += 1
        else:
            right = old.clone()
            patch.apply(right)
            assert torch.equal(_bits(into), _bits(right)), at
        data[at] ^= 0x15
    assert refused > 60
