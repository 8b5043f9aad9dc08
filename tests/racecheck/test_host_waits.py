"""H4: how often the host waits for the device in a step, on the simulated one, and that nothing is lost for it."""

import copy
from collections import Counter
from typing import Any

import deepspeed
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.harness.engines import make_engine, rank, start
from tests.harness.oracle import Oracle, distance, full_parameters
from tests.harness.racecheck import simulate
from tests.harness.ranks import run_ranks
from tests.harness.releases import since
from zerosync_strategy import attach
from zerosync_strategy.core.attached.budgets import DeviceGauge, gauge_of
from zerosync_strategy.core.comm.streams import Streams
from zerosync_strategy.core.optimizer import edits
from zerosync_strategy.core.optimizer.edits import MasterWeights
from zerosync_strategy.core.params.copies import pinned_blocks
from zerosync_strategy.core.params.values import WATCHED_STEPS

WIDTH, STEPS = 16, 5
OFFLOAD = {"offload_optimizer": {"device": "cpu", "pin_memory": True}}
OFFLOAD_ALL = {**OFFLOAD, "offload_param": {"device": "cpu", "pin_memory": True}}
BF16: dict[str, Any] = {"bf16": {"enabled": True}}
CLIPS: dict[str, Any] = {**BF16, "gradient_clipping": 0.5}
NO_NORM = {"bf16": {"enabled": True, "check_grad_overflow": False}}
ON_HOST = {"param_memory_budget": {"device": 0, "host": "all"}}
# Stage, our options, those of ZeRO, the rest of the configuration; and how often the host waits in a step.
SCENARIOS: dict[str, tuple[int, dict[str, Any], dict[str, Any], dict[str, Any], int]] = {
    "1, clipped": (1, {}, {}, CLIPS, 1),
    "2": (2, {}, {}, {}, 1),
    "2, clipped": (2, {}, {}, CLIPS, 1),
    "2, no norm": (2, {}, {"compute_grad_norm": False}, NO_NORM, 0),
    "2, offloaded": (2, {}, OFFLOAD, BF16, 1),
    "3": (3, {}, {}, {}, 1),
    "3, clipped": (3, {}, {}, CLIPS, 1),
    "3, held": (3, {"param_memory_budget": "all"}, {}, {}, 1),
    "3, kept on the host": (3, ON_HOST, {}, {}, 1),
    "3, offloaded": (3, {"coalesce": False}, OFFLOAD, BF16, 3),
    "3, offloaded with its parameters": (3, {"coalesce": False}, OFFLOAD_ALL, BF16, 4),
}


def data(k: int, of_rank: int, width: int = WIDTH) -> torch.Tensor:
    return torch.randn(4, width, generator=torch.Generator().manual_seed(10 * k + of_rank))


def engine_of(net: nn.Module, stage: int, ours: dict[str, Any], zero: dict[str, Any], **config: Any) -> Any:
    small = {"overlap_comm": True, "reduce_bucket_size": 2 * WIDTH * WIDTH, "stage3_param_persistence_threshold": 0}
    engine = make_engine(net, torch.optim.AdamW(net.parameters(), lr=0.01), stage, {**small, **zero}, **config)
    attach(engine, **ours)
    return engine


def trained_alike(stage: int, zero: dict[str, Any]) -> tuple[nn.Sequential, nn.Sequential, Any, Oracle]:
    """A network and its engine; the same in plain torch."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 4))
    plain = copy.deepcopy(net)
    engine = engine_of(net, stage, {}, zero)
    return net, plain, engine, Oracle(plain, torch.optim.AdamW(plain.parameters(), lr=0.01))


def waits(scenario: str, layers: int, backwards: int) -> tuple[list[Counter[str]], list[str]]:
    """By step, where the host has waited, DeepSpeed's own waits included; and what the checker found."""
    stage, ours, zero, config, _ = SCENARIOS[scenario]
    with simulate() as simulation:
        start()
        net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers)))
        engine, found = engine_of(net, stage, ours, zero, **config), []
        for _ in range(STEPS):
            simulation.host_waits.clear()
            for _ in range(backwards):
                x = torch.randn(2, WIDTH).to(next(net.parameters()).dtype)
                engine.backward(engine(x).float().square().mean())
            engine.step()
            found.append(Counter(simulation.host_waits))
        return found, list(map(str, simulation.findings))


@since("0.19.8", "DeepSpeed waits elsewhere, too")
@pytest.mark.extended(
    but=(
        "2, clipped",
        "3, clipped",
        "3, offloaded",
    )
)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_the_host_waits_once_whatever_the_model_and_the_window(scenario: str) -> None:
    """For the norm, by which a step is skipped; where it is on the host, for copies, too.

    The first step looks at all master weights that are on the host, and one asks what modules have written to.
    """

    def run() -> Any:
        return [waits(scenario, layers, backwards) for layers, backwards in ((2, 1), (4, 1), (2, 3))]

    for found in run_ranks(run):
        for of_steps, _ in found:
            counts = [count.total() for count in of_steps[1:]]
            assert set(counts[WATCHED_STEPS - 1 :]) == {SCENARIOS[scenario][-1]}, found
            assert max(counts) <= SCENARIOS[scenario][-1] + 2, found
        assert not any(races for _, races in found), found


def test_a_rank_alone_waits_no_more() -> None:
    """DeepSpeed's own gather of a group of one rank lets the host wait for everything."""
    ((steps, races),) = run_ranks(waits, "3, clipped", 2, 3, world_size=1)
    assert {count.total() for count in steps[WATCHED_STEPS:]} == {1} and not races, (steps, races)


@pytest.mark.extended(but=("2-zero0", "3-zero2"))
@pytest.mark.parametrize(("stage", "zero"), [(2, OFFLOAD), (3, OFFLOAD), (3, OFFLOAD_ALL)])
def test_edits_under_an_offloaded_optimizer_last(stage: int, zero: dict[str, Any]) -> None:
    """By digests: of all of a parameter, of two elements that change places, and none."""

    def run() -> tuple[float, list[str]]:
        with simulate() as simulation:
            start()
            net, plain, engine, oracle = trained_alike(stage, zero)
            for k in range(5):
                engine.backward(engine(data(k, rank())).square().mean())
                oracle.backward(lambda r, k=k: plain(data(k, r)).square().mean())
                for module in (net, plain) if k in (2, 3) else ():
                    weight = module[0].weight.data
                    weight.mul_(0.5) if k == 2 else weight.copy_(weight.flip(0))
                engine.step()
                oracle.step()
            return distance(full_parameters(net), full_parameters(plain)), list(map(str, simulation.findings))

    for error, found in run_ranks(run):
        assert error < 1e-6 and not found, (error, found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_master_weights_on_the_host_are_read_where_their_shard_has_changed(dtype: torch.dtype) -> None:
    with simulate() as simulation, pytest.MonkeyPatch.context() as patch:
        patch.setattr(edits, "PIECE_NUMEL", 64)
        shards = [torch.randn(300, device=torch.device("cpu")).to(dtype) for _ in range(3)]
        masters = [simulation.to_host_memory(shard.float()) for shard in shards]
        weights = list(zip(shards, masters, strict=True))
        adopting = MasterWeights(Streams())
        for master in masters:
            master[0] = 7.0
        adopting.adopt(weights)  # nothing is known of them
        assert [master[0].item() for master in masters] == [shard[0].item() for shard in shards]
        adopting.stepped(weights)
        for master in masters:
            master[0] = 7.0
        shards[1][[100, 200]] = shards[1][[200, 100]]
        simulation.host_waits.clear()
        adopting.adopt(weights)
        assert [master[0].item() == 7.0 for master in masters] == [True, False, True]
        assert torch.equal(masters[1], shards[1].float())
        of_answer = [each for each in simulation.host_waits if "Event" in each]
        assert len(of_answer) == 1


def test_adopting_edits_takes_memory_for_a_piece() -> None:
    class Largest(TorchDispatchMode):
        numel = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out._base is None and not out._is_view():
                inputs = {each.untyped_storage()._cdata for each in args if isinstance(each, torch.Tensor)}
                if out.untyped_storage()._cdata not in inputs:
                    self.numel = max(self.numel, out.numel())
            return out

    with simulate(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(edits, "PIECE_NUMEL", 64)
        shard = torch.randn(1000).bfloat16()
        master = shard.float() * 1.0001
        expected = master.clone()
        shard[500] = expected[500] = 3.0
        with Largest() as largest:
            MasterWeights(Streams()).adopt([(shard, master)])
        assert torch.equal(master, expected) and largest.numel <= 64


@pytest.mark.parametrize("megabytes", [1, 33, 64, 86, 100, 112])
def test_pinned_memory_is_taken_in_powers_of_two(megabytes: int) -> None:
    for nbytes in (megabytes * 2**20, megabytes * 1000, megabytes * 10_007):
        blocks = pinned_blocks(nbytes)
        assert all(block & (block - 1) == 0 for block in blocks)
        assert nbytes <= sum(blocks) <= nbytes + max(nbytes // 16, 4096) and len(blocks) <= 5


@pytest.mark.extended
def test_copies_on_the_host_stay_within_the_budget_as_they_are_taken() -> None:
    """A parameter of 3 pages takes 2 blocks; in one, rounded up, it would take a page more than the budget has."""

    def run() -> tuple[Any, float, list[str]]:
        with simulate() as simulation:
            start()
            torch.manual_seed(0)
            net = nn.Sequential(*(nn.Linear(48, 64, bias=False) if k % 2 == 0 else nn.Linear(64, 48) for k in range(2)))
            plain = copy.deepcopy(net)
            ours: dict[str, Any] = {"param_memory_budget": {"device": 0, "host": 26_000}}
            zero = {"stage3_param_persistence_threshold": 100, "stage3_max_reuse_distance": 0}
            engine = engine_of(net, 3, ours, zero)
            oracle = Oracle(plain, torch.optim.AdamW(plain.parameters(), lr=0.01))
            for k in range(6):
                engine.backward(engine(data(k, rank(), 48)).square().mean())
                oracle.backward(lambda r, k=k: plain(data(k, r, 48)).square().mean())
                if k % 2:
                    engine.step()
                    oracle.step()
            report = engine._zerosync.report
            error = distance(full_parameters(net), full_parameters(plain))
            return (report.peak_host_bytes, report.loaded_bytes), error, list(map(str, simulation.findings))

    for (peak, loaded), error, found in run_ranks(run):
        assert peak == 2 * 3 * 4096 and loaded > 0 and error < 1e-6 and not found, (peak, loaded, error, found)


def test_the_gauge_of_a_gpu_counts_what_its_allocator_cannot_give_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two segments of 100, of which one is free, and the other has 30 bytes in use between free parts."""
    stats = {
        "active_bytes.all.current": 30, "inactive_split_bytes.all.current": 70, "allocated_bytes.all.current": 25,
        "active_bytes.all.peak": 150, "inactive_split_bytes.all.peak": 90, "reserved_bytes.all.peak": 200,
    }  # fmt: skip
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: stats)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 200)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (50, 1000))  # other processes have the rest
    gauge = gauge_of(torch.device("cuda", 0))
    assert isinstance(gauge, DeviceGauge) and gauge.limit() == 250
    assert (gauge.used(), gauge.peak()) == (100, 200)
    stats["inactive_split_bytes.all.peak"] = 40
    assert gauge.peak() == 190


def test_what_one_rank_writes_in_a_context_reaches_all() -> None:
    """Also to a parameter that stays for the next micro-batch, whose gather the host does not know to be complete."""

    def run() -> tuple[float, list[str]]:
        with simulate() as simulation:
            start()
            net, plain, engine, oracle = trained_alike(3, {})
            for k in range(8):
                engine.backward(engine(data(k, rank())).square().mean())
                oracle.backward(lambda r, k=k: plain(data(k, r)).square().mean())
                if k % 2:
                    engine.step()
                    oracle.step()
                    continue
                with deepspeed.zero.GatheredParameters([net[0].weight], modifier_rank=0), torch.no_grad():
                    if rank() == 0:
                        net[0].weight.fill_(0.01 * k)
                plain[0].weight.data.fill_(0.01 * k)
            return distance(full_parameters(net), full_parameters(plain)), list(map(str, simulation.findings))

    for error, found in run_ranks(run):
        assert error < 1e-6 and not found, (error, found)
