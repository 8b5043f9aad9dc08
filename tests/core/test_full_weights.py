"""Full weights, bucket by bucket: an iterator of named tensors, and safetensors files that load elsewhere."""

import errno
import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from tests.harness import groups, llama
from tests.harness.data import noise
from tests.harness.engines import attached_of, expect_timeout, make_engine, rank
from tests.harness.oracle import Oracle, distance, full_parameters, state_of
from tests.harness.ranks import run_ranks
from zerosync_strategy import CheckpointError, RankError, attach
from zerosync_strategy.core.checkpoints.weight_files import WeightFiles
from zerosync_strategy.core.comm import nodes

WIDTH = 8
SHARDED = {"stage3_param_persistence_threshold": 0}


class Network(nn.Module):
    """With a tied weight, a frozen layer, buffers that are saved and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor(0.5))
        self.register_buffer("temporary", torch.ones(3), persistent=False)
        self.register_buffer("count", torch.arange(3))
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.layers[1].requires_grad_(False)
        self.head = nn.Linear(WIDTH, WIDTH)
        self.head.weight = self.layers[0].weight
        self.odd = nn.Parameter(torch.randn(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x) * self.scale + self.odd.sum()


def network() -> Network:
    torch.manual_seed(0)
    return Network()


data = noise(4, WIDTH)


def same(ours: dict[str, torch.Tensor], plain: dict[str, torch.Tensor]) -> bool:
    """Whether both have the same names, and tensors of the same dtypes, shapes and values.

    To the bit, where no oracle has trained them: what is only gathered, converted and written is not computed with.
    """
    assert ours.keys() == plain.keys(), ours.keys() ^ plain.keys()
    are_alike = all(ours[name].dtype is plain[name].dtype and ours[name].shape == plain[name].shape for name in plain)
    return are_alike and distance(ours, plain) == 0.0


CASES: list[tuple[int, dict[str, Any], dict[str, Any]]] = [
    (1, {}, {}),
    (2, {}, {}),
    (3, {}, {}),  # all persistent
    (3, SHARDED, {}),
    (3, SHARDED | {"stage3_prefetch_bucket_size": 1000}, {"param_memory_budget": 2 * 4 * WIDTH * WIDTH}),
    (3, SHARDED, {"param_memory_budget": "all"}),
    (3, SHARDED, {"param_memory_budget": {"device": 0, "host": "all"}}),
    (3, SHARDED | {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}, {}),
]


@pytest.mark.extended
@pytest.mark.parametrize(("stage", "zero", "options"), CASES, ids=lambda value: str(value))
def test_training_goes_on_as_without_it(stage: int, zero: Any, options: Any, tmp_path: Path) -> None:
    """Between steps, in mid-window and in a forward, of a model that plain torch trains beside it."""

    def run() -> float:
        net, plain = network(), network()

        def adam(module: nn.Module) -> torch.optim.Optimizer:
            return torch.optim.AdamW((p for p in module.parameters() if p.requires_grad), lr=0.03)

        engine = make_engine(net, adam(net), stage, zero)
        zerosync, oracle = attach(engine, **options), Oracle(plain, adam(plain))

        def export(*_: Any) -> None:
            there = [param.numel() for param in net.parameters()]
            weights = dict(zerosync.full_weights())
            assert same(weights, state_of(plain))
            for tensor in weights.values():
                tensor.zero_()  # it is the caller's
            assert [param.numel() for param in net.parameters()] == there
            zerosync.export(tmp_path / str(step))
            if rank() == 0:
                loaded = network()
                safetensors.torch.load_model(loaded, tmp_path / str(step) / "model.safetensors")
                assert same(loaded.state_dict(), state_of(plain))

        for step in range(5):
            hook = net.layers[1].register_forward_pre_hook(export) if step == 3 else None
            for micro in (0, 1):
                k = 2 * step + micro
                engine.backward(engine(data(k, rank())).square().mean())
                oracle.backward(lambda r, k=k: plain(data(k, r)).square().mean())
                if step in (1, 2) and micro == 0:
                    export()
            if hook is not None:
                hook.remove()
            engine.step()
            oracle.step()
            if step != 1:
                export()
        return distance(full_parameters(net), full_parameters(plain))

    assert run_ranks(run) == [0.0, 0.0]


def engine_of(net: nn.Module, stage: int = 3, **config: Any) -> Any:
    return make_engine(net, torch.optim.SGD(net.parameters(), lr=0.5), stage, SHARDED if stage == 3 else {}, **config)


def train(engine: Any, k: int) -> None:
    engine.backward(engine(data(k, rank())).square().mean())
    engine.step()


@pytest.mark.extended(but=("one by one",))
@pytest.mark.parametrize("consumed", ["one by one", "kept"])
def test_memory_is_bounded_by_buckets(consumed: str) -> None:
    """Of many layers, no more than one bucket is there at once, unless the consumer keeps what it is given."""

    def run() -> tuple[int, int, int]:
        net = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(20)))
        nodes.WITHIN_HOST = nodes.NATIVE = nodes.MessageSizes(2 * 4 * 256 * 256, 2)
        zerosync = attach(engine_of(net))
        counted = attached_of(zerosync).stage.scheduler.issuing.unsharded
        before = counted.now
        kept = [tensor for _, tensor in zerosync.full_weights() if consumed == "kept"]
        peak, after = counted.peak - before, counted.now - before
        return peak, after, len(kept)

    layer = 4 * 256 * 256
    for peak, after, kept in run_ranks(run):
        assert (after, kept) == ((20 * layer, 20) if consumed == "kept" else (0, 0))
        assert peak == 20 * layer if consumed == "kept" else peak <= 3 * layer  # a bucket of two, and the last tensor


def test_in_other_dtypes_and_of_a_part() -> None:
    def run() -> None:
        net, plain = network(), network()
        zerosync = attach(engine_of(net, bf16={"enabled": True}))
        half = plain.bfloat16().state_dict()
        half["scale"] = half["scale"].to(net.scale.dtype)
        assert same(dict(zerosync.full_weights()), half)
        for dtype in (torch.float32, torch.float16):
            weights = dict(zerosync.full_weights(dtype=dtype))
            assert same(weights, {name: t.to(dtype) if t.is_floating_point() else t for name, t in half.items()})
        assert same(dict(zerosync.full_weights(net.layers)), plain.layers.state_dict())
        with zerosync.gathered_for_inference():  # without a collective
            if rank() == 0:
                assert same(dict(zerosync.full_weights()), half)
        with pytest.raises(ValueError, match="take a module= of the engine's Network, found a Linear that is none"):
            zerosync.full_weights(nn.Linear(1, 1))
        with pytest.raises(ValueError, match=r"take a dtype= for floating-point weights, got torch\.int8"):
            zerosync.full_weights(dtype=torch.int8)

    run_ranks(run)


def test_autocast_rounds_what_layers_use_and_not_what_is_exported() -> None:
    def run() -> None:
        net, plain = network(), network()
        engine = engine_of(net, torch_autocast={"enabled": True, "dtype": "bfloat16"})
        zerosync = attach(engine)
        with torch.autocast("cpu", torch.bfloat16):
            engine(data(0, rank()))
        assert same(dict(zerosync.full_weights()), plain.state_dict())

    run_ranks(run)


@pytest.mark.off_device("it is about waits of gloo")
def test_ranks_stop_at_the_same_tensor_or_say_so() -> None:
    def run() -> None:
        nodes.WITHIN_HOST = nodes.MessageSizes(4 * WIDTH * WIDTH, 2)
        net, plain = network(), network()
        engine = engine_of(net)
        zerosync, oracle = attach(engine), Oracle(plain, torch.optim.SGD(plain.parameters(), lr=0.5))
        for k in (0, 1):
            for number, _ in enumerate(zerosync.full_weights()):
                if number == 1:
                    break
            train(engine, k)
            oracle.backward(lambda r, k=k: plain(data(k, r)).square().mean())
            oracle.step()
        assert same(dict(zerosync.full_weights()), state_of(plain))
        weights = zerosync.full_weights()
        next(weights)
        train(engine, 2)
        with pytest.raises(RuntimeError, match="an optimizer step or a checkpoint has changed the weights"):
            next(weights)
        expect_timeout()
        weights = zerosync.full_weights()
        if rank() == 0:
            next(weights)
            weights.close()
            with pytest.raises(RankError, match=r"rank 1: in the gather of .* for full_weights\(\)"):
                engine(data(0, 0))
        else:
            with pytest.raises(RankError, match=r"Rank 1 lost the other ranks in the gather of"):
                list(weights)

    run_ranks(run)


def test_extra_state_is_refused() -> None:
    class Counts(nn.Linear):
        def get_extra_state(self) -> Any:
            return {"calls": 3}

        def set_extra_state(self, state: Any) -> None:
            pass

    def run() -> None:
        zerosync = attach(engine_of(nn.Sequential(nn.Linear(2, 2), Counts(2, 2))))
        with pytest.raises(ValueError, match=r"'1\._extra_state' of the state_dict\(\) is no tensor but a dict"):
            zerosync.full_weights()

    run_ranks(run)


def test_groups_of_ranks_have_their_own() -> None:
    """``shard_over``: under one name each group has another parameter, so that one file cannot hold all."""

    def run() -> None:
        engine = groups.make_engine(groups.LAYOUTS["grid"], lambda params: torch.optim.SGD(params, lr=0.1))
        zerosync = attach(engine)
        weights, own = dict(zerosync.full_weights()), full_parameters(engine.module)
        assert torch.equal(weights.pop("fourth.borrowed"), weights["second.weight"])  # tied
        assert distance(weights, own) == 0.0
        with pytest.raises(ValueError, match=r"export\(\) found parameters that shard_over\(\) gives to groups"):
            zerosync.export("unused")

    run_ranks(run, world_size=groups.WORLD)


# ---- files -------------------------------------------------------------------------------------------------------


@pytest.mark.extended(but=("3-2000",))
@pytest.mark.parametrize(("stage", "max_shard_size"), [(2, "5GB"), (3, "5GB"), (3, 2000)])
def test_from_pretrained_loads_it(stage: int, max_shard_size: Any, tmp_path: Path) -> None:
    """A model of transformers with tied embeddings, trained, in one file and in several."""

    def run() -> dict[str, torch.Tensor]:
        net = LlamaForCausalLM(llama.CONFIG)
        engine = make_engine(net, llama.sgd(net), stage, SHARDED if stage == 3 else {})
        zerosync = attach(engine)
        engine.backward(llama.loss_of(engine, 0, rank()))
        engine.step()
        zerosync.export(tmp_path / "of another size", max_shard_size=10 * 2000)
        zerosync.export(tmp_path / "of another size", max_shard_size=max_shard_size)
        zerosync.export(tmp_path / "decoder", net.model, dtype=torch.bfloat16)
        return full_parameters(net)

    full = run_ranks(run)[0]
    folder = tmp_path / "of another size"
    files = sorted(path.name for path in folder.iterdir())
    if max_shard_size == 2000:
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        names = sorted(set(index["weight_map"].values()))
        assert len(names) > 3 and names == [name for name in files if name.endswith(".safetensors")]
        one_layer = 4 * 16 * 8
        assert all((folder / name).stat().st_size < 2000 + one_layer + 2000 for name in names)
        assert index["metadata"]["total_size"] == sum(4 * tensor.numel() for tensor in full.values())
    else:
        assert [name for name in files if "model" in name] == ["model.safetensors"]
    loaded, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()) and type(loaded) is LlamaForCausalLM
    assert distance(full_parameters(loaded), full) == 0.0  # to the bit: written and read
    decoder = safetensors.torch.load_file(tmp_path / "decoder" / "model.safetensors")
    assert torch.equal(decoder["norm.weight"], full["model.norm.weight"].bfloat16())
    assert json.loads((tmp_path / "decoder" / "config.json").read_text())["architectures"] == ["LlamaModel"]


def test_what_cannot_be_written(tmp_path: Path) -> None:
    """A rank that fails takes part to the end, all ranks hear of it, and an earlier export is as it was."""

    def run() -> bytes:
        net = network()
        engine = engine_of(net)
        zerosync = attach(engine)
        zerosync.export(tmp_path)
        before = (tmp_path / "model.safetensors").read_bytes()
        train(engine, 0)
        write, written = WeightFiles.write, []

        def full(files: WeightFiles, name: str, tensor: torch.Tensor) -> int:
            written.append(name)
            if len(written) == 2:
                raise OSError(errno.ENOSPC, "No space left on device")
            return write(files, name, tensor)

        WeightFiles.write = full  # type: ignore[method-assign]
        for _ in range(2):  # the engine goes on
            written.clear()
            with pytest.raises(CheckpointError, match=r"Cannot export the weights to .*No space left on device"):
                zerosync.export(tmp_path)
            assert len(written) == (2 if rank() == 0 else 0)
            assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
            assert (tmp_path / "model.safetensors").read_bytes() == before
            train(engine, 1)
        WeightFiles.write = write  # type: ignore[method-assign]
        with pytest.raises(CheckpointError, match=r"NotADirectoryError|FileExistsError"):
            zerosync.export(tmp_path / "model.safetensors")
        zerosync.export(tmp_path)
        assert (tmp_path / "model.safetensors").read_bytes() != before
        return before

    run_ranks(run)
