"""`fabric.save` and `fabric.load`: a run that is resumed equals one that went on."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.fabric.runs import backward, losses, make_fabric, set_up, trained
from tests.harness.checkpoints import die_in_file
from tests.harness.extended import STAGES
from tests.harness.oracle import distance, full_parameters
from tests.harness.problem import WORLD, Data, adamw, network, oracle
from tests.harness.ranks import run_ranks
from tests.harness.rounding import bounded, excess
from zerosync_strategy import CheckpointError


class Spare(nn.Module):
    """A network with a buffer, a frozen layer, and a parameter that no optimizer has."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network()
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.untrained = nn.Parameter(torch.randn(4))
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.frozen(self.net(x)) + self.untrained.detach()


def step(fabric: Any, model: Any, optimizer: Any, batches: range) -> None:
    for loss in losses(fabric, model, batches, len(batches)):
        fabric.backward(loss, model=model)
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.extended(but=("3",))
@pytest.mark.parametrize("stage", STAGES)
def test_resuming(stage: int, tmp_path: Path) -> None:
    """Weights, optimizer, what else is in the state under any name, and what the state does not ask for."""

    def run() -> Any:
        def begin(seed: int) -> Any:
            torch.manual_seed(seed)
            net = Spare()
            with torch.no_grad():
                net.untrained += seed
                net.frozen.weight += seed
            optimizer = adamw(net.net.parameters())
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
            return set_up(fabric, net, optimizer, scheduler)

        fabric = make_fabric(stage)
        model, optimizer, scheduler = begin(1)
        for at in range(2):
            step(fabric, model, optimizer, range(2 * at, 2 * at + 2))
            scheduler.step()
        saved = {"model": model, "optimizer": optimizer, "lr_scheduler": scheduler, "module": "a name of DeepSpeed's"}
        fabric.save(tmp_path / "run", {**saved, "numbers": torch.arange(3) + fabric.global_rank, "more": 5})
        step(fabric, model, optimizer, range(4, 6))
        expected, calls = full_parameters(model.module), model.calls.clone()

        again = make_fabric(stage)
        fabric = again
        model, optimizer, scheduler = begin(2)
        step(fabric, model, optimizer, range(6, 8))  # of no use: all of it is restored
        state = {"model": model, "optimizer": optimizer, "lr_scheduler": scheduler, "module": "", "numbers": None}
        rest = fabric.load(tmp_path / "run", state)
        assert state["module"] == "a name of DeepSpeed's" and state["numbers"].tolist() == [0, 1, 2]
        assert rest == {"more": 5}
        with pytest.raises(KeyError, match=r"found no 'less' in .*, which has: lr_scheduler, module, more, numbers"):
            fabric.load(tmp_path / "run", {"model": model, "less": 1})
        step(fabric, model, optimizer, range(4, 6))
        rate = optimizer.param_groups[0]["lr"]
        return distance(full_parameters(model.module), expected), bool(calls == model.calls), rate

    # To the bit: what goes on from a checkpoint makes the same operations, from the same bits on the same layout.
    assert run_ranks(run, timeout=60) == [(0.0, True, 0.0025)] * 2


@pytest.mark.extended(but=("2",))
@pytest.mark.parametrize("stage", STAGES)
def test_weights_alone(stage: int, tmp_path: Path) -> None:
    """Without the optimizer; for evaluation; from a file that Fabric saved without DeepSpeed; and into one's own."""

    def run() -> None:
        def weights_of(model: Any) -> Any:
            return full_parameters(model.module)

        fabric = make_fabric(stage)
        model, optimizer = trained(fabric, adamw)
        step(fabric, model, optimizer, range(2))
        fabric.save(tmp_path / "run", {"model": model, "optimizer": optimizer})
        fabric.save(tmp_path / "raw.pt", model.state_dict())
        expected = weights_of(model)
        assert distance(torch.load(tmp_path / "raw.pt"), expected) == 0.0
        if fabric.global_rank == 0:
            torch.save({"model": expected, "step": 3}, tmp_path / "file.ckpt")
        fabric.barrier()

        plain = oracle(adamw)  # a new optimizer on the weights
        plain.module.load_state_dict(expected)
        backward(plain, range(2, 4), 2)
        plain.step()
        for load in (
            lambda fabric, model: fabric.load(tmp_path / "run", {"model": model}),
            lambda fabric, model: fabric.load(tmp_path / "file.ckpt", {"model": model, "step": 0}),
            lambda fabric, model: fabric.load_raw(tmp_path / "raw.pt", model),
            lambda fabric, model: model.load_state_dict(expected),
        ):
            fabric = make_fabric(stage)
            net = network()
            nn.init.zeros_(net[0].weight)
            model, optimizer = fabric.setup(net, adamw(net.parameters()))
            load(fabric, model)
            assert distance(weights_of(model), expected) == 0.0  # to the bit: written and read
            step(fabric, model, optimizer, range(2, 4))
            assert distance(weights_of(model), full_parameters(plain.module)) == 0.0

        fabric = make_fabric(stage)
        net = network()
        nn.init.zeros_(net[0].weight)
        evaluated = fabric.setup_module(net)
        fabric.load(tmp_path / "run", {"model": evaluated})
        assert distance(weights_of(evaluated), expected) == 0.0
        with torch.no_grad():
            x = Data(1).batch(0, 0)[0]
            reference = network()
            reference.load_state_dict(expected)
            assert excess(evaluated(x), bounded(lambda: reference(x))) == 0.0
        with pytest.raises(ValueError, match="were set up without an optimizer: model"):
            fabric.save(tmp_path / "other", {"model": evaluated})

    run_ranks(run, timeout=60)


@pytest.mark.extended(but=("3",))
@pytest.mark.parametrize("stage", [2, 3])
def test_several_models(stage: int, tmp_path: Path) -> None:
    def run() -> Any:
        def begin(seed: int) -> Any:
            fabric = make_fabric(stage)
            torch.manual_seed(seed)
            nets = [nn.Linear(16, 4), nn.Linear(16, 4)]
            pairs = [fabric.setup(net, adamw(net.parameters())) for net in nets]
            names = ("first", "second")
            state: dict[str, Any] = dict(zip(names, (model for model, _ in pairs), strict=True))
            return fabric, pairs, state | {f"of_{name}": pair[1] for name, pair in zip(names, pairs, strict=True)}

        fabric, pairs, state = begin(1)
        for model, optimizer in pairs:
            step(fabric, model, optimizer, range(2))
        fabric.save(tmp_path / "run", {**state, "epoch": 7})
        for model, optimizer in pairs:
            step(fabric, model, optimizer, range(2, 4))
        expected = [full_parameters(model.module) for model, _ in pairs]

        fabric, pairs, state = begin(2)
        state["epoch"] = 0
        fabric.load(tmp_path / "run", state)
        for model, optimizer in pairs:
            step(fabric, model, optimizer, range(2, 4))
        got = [full_parameters(model.module) for model, _ in pairs]
        fabric.load(tmp_path / "run", {"second": state["second"], "of_second": state["of_second"]})  # one of them
        step(fabric, state["second"], state["of_second"], range(2, 4))
        one = distance(full_parameters(state["second"].module), expected[1])
        return max(*map(distance, got, expected), one), state["epoch"]

    assert run_ranks(run, timeout=60) == [(0.0, 7)] * WORLD  # to the bit, as above


def test_an_interrupted_save_of_several_models_is_refused(tmp_path: Path) -> None:
    """The first was saved again, the second was not: neither is loaded, in training or for evaluation."""

    def begin() -> tuple[Any, list[Any], dict[str, Any]]:
        fabric = make_fabric(2)
        pairs = [trained(fabric, adamw) for _ in range(2)]
        return fabric, pairs, {"first": pairs[0][0], "second": pairs[1][0]}

    def save() -> None:
        fabric, pairs, state = begin()
        fabric.save(tmp_path / "run", state)
        for model, optimizer in pairs:
            step(fabric, model, optimizer, range(2))
        die_in_file("second/checkpoint")()
        fabric.save(tmp_path / "run", state)

    def load() -> float:
        fabric, pairs, state = begin()
        before = [full_parameters(model.module) for model, _ in pairs]
        evaluated = fabric.setup_module(network())
        for asked in (state, {"first": evaluated}):
            with pytest.raises(CheckpointError, match=r"the save was interrupted: zerosync_rank_\d.json of step 1"):
                fabric.load(tmp_path / "run", asked)
        return max(distance(full_parameters(model.module), was) for (model, _), was in zip(pairs, before, strict=True))

    run_ranks(save, expect="any")
    assert run_ranks(load) == [0.0] * WORLD
