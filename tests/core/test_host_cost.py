"""Host work of a step, counted with real DeepSpeed as rank 0 of W on torch's fake process group (H1)."""

from typing import Any

import pytest

from benchmarks.host_cost import measure
from tests.harness.ranks import run_ranks
from tests.harness.releases import since
from zerosync_strategy.core.comm import nodes

pytestmark = pytest.mark.off_device("the simulation is work of the host itself")

LAYERS, WIDTH = 8, 256
PARAMETERS = LAYERS * WIDTH * (WIDTH + 1)


@pytest.fixture(autouse=True)
def small_pieces() -> None:
    """The pieces of a step are as large as in use."""


def measured(system: str, world_size: int, **options: Any) -> dict[str, Any]:
    arguments = {"layers": LAYERS, "width": WIDTH, "backwards": 1, "bucket": None, **options}
    (found,) = run_ranks(lambda: measure(system, world_size, **arguments), world_size=1)
    return found


@pytest.mark.extended(but=("2",))
@pytest.mark.parametrize("stage", [1, 2])
def test_half_as_many_python_calls_again_as_torch(stage: int) -> None:
    torch, ours = (
        measured(system, 8, layers=50, width=8, backwards=4)["python_calls"]
        for system in ("torch", f"zerosync-{stage}")
    )
    assert ours <= 1.5 * torch


@since("0.19.8", "stock costs something else")
def test_python_calls_beside_stock() -> None:
    """As one of two ranks, of whom stock costs least: stage 3 in all, stage 2 above what torch itself calls."""
    torch, held, sharded, stock_3, ours, stock_2 = (
        measured(system, 2, layers=50, width=8, backwards=4)["python_calls"]
        for system in ("torch", "zerosync-3-held", "zerosync-3", "stock-3", "zerosync-2", "stock-2")
    )
    assert held <= 0.035 * stock_3 and sharded <= 0.095 * stock_3
    assert ours - torch <= 0.05 * (stock_2 - torch)


@pytest.mark.extended(but=("1-1.3", "3-1.3"))
@pytest.mark.parametrize(("system", "most"), [("1", 1.3), ("2", 1.3), ("3", 1.3), ("3-held", 2.0)])
def test_a_step_costs_the_same_on_a_thousand_ranks(system: str, most: float) -> None:
    on_8, on_1024 = (measured(f"zerosync-{system}", world_size) for world_size in (8, 1024))
    stock = measured(f"stock-{system[0]}", 1024)
    step = on_1024["aten_calls"]["step"]
    assert step <= 1.2 * on_8["aten_calls"]["step"]
    assert step <= most * stock["aten_calls"]["step"]
    if system in ("1", "2"):  # DeepSpeed's own unpacking of gathered parameters goes rank by rank
        assert on_1024["aten_calls"]["forward and backward"] <= on_8["aten_calls"]["forward and backward"]
        assert on_1024["python_calls"] <= 1.2 * on_8["python_calls"]


@pytest.mark.extended(but=("131584",))
@pytest.mark.parametrize("bucket", [None, 2 * WIDTH * (WIDTH + 1)])
def test_streaming_costs_the_same_on_a_thousand_ranks(bucket: int | None) -> None:
    """With small buckets each is of few ranks: of ours on 8, of hundreds on 1,024."""
    on_8, on_1024 = (measured("zerosync-2-streamed", world_size, bucket=bucket) for world_size in (8, 1024))
    for part in ("forward and backward", "step"):
        assert on_1024["aten_calls"][part] <= 1.2 * on_8["aten_calls"][part]
    assert on_1024["python_calls"] <= 1.2 * on_8["python_calls"]


@pytest.mark.extended
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("world_size", [8, 1024])
def test_collectives_are_as_many_as_buckets(stage: int, world_size: int) -> None:
    """DeepSpeed's `reduce_bucket_size` is honoured; besides there are gathers and the gradient norm."""
    bucket = 2 * WIDTH * (WIDTH + 1)
    found = measured(f"zerosync-{stage}", world_size, bucket=bucket)
    reductions, _ = found["collectives"]["reduce_scatter_tensor"]
    buckets = -(-PARAMETERS // bucket)
    assert buckets <= reductions <= buckets + 1
    assert sum(count for count, _ in found["collectives"].values()) <= buckets + (8 if stage < 3 else 8 + 3 * LAYERS)


@pytest.mark.parametrize("system", ["2", "3-held"])
def test_small_buckets_are_made_as_large_as_links_need(system: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever size the Trainer's "auto" has given them: the square of the width."""
    monkeypatch.setattr(nodes, "LEAST", 2**20)
    found = measured(f"zerosync-{system}", 64, bucket=WIDTH**2)["collectives"]
    assert found["reduce_scatter_tensor"][0] == -(-4 * PARAMETERS // 2**20)
    assert sum(calls for kind, (calls, _) in found.items() if "all_gather" in kind) <= -(-4 * PARAMETERS // 2**20) + 1


@pytest.mark.extended(but=("2",))
@pytest.mark.parametrize("stage", [2, 3])
def test_node_shards_cost_the_same_on_any_number_of_nodes_of_any_size(stage: int) -> None:
    """With far more parameters than buckets; calls and collectives."""
    shapes = [(64, 2), (256, 8), (1024, 8), (1024, 32)]
    first, *others = (
        measured(f"zerosync-{stage}-node", world_size, layers=24, width=128, backwards=3, node_size=node_size)
        for world_size, node_size in shapes
    )
    for each in others:
        calls, of_first = (
            {kind: calls for kind, (calls, _) in found["collectives"].items()} for found in (each, first)
        )
        assert calls == of_first, each["world_size"]
        assert each["python_calls"] <= 1.02 * first["python_calls"]
        assert sum(each["aten_calls"].values()) <= 1.02 * sum(first["aten_calls"].values())


@pytest.mark.extended(but=("3",))
@pytest.mark.parametrize("stage", [2, 3])
def test_a_parameter_larger_than_the_bucket_is_not_cut_to_its_size(stage: int) -> None:
    found = measured(f"zerosync-{stage}", 8, bucket=20)
    reductions, _ = found["collectives"]["reduce_scatter_tensor"]
    assert reductions == 2 * LAYERS  # one for each parameter
