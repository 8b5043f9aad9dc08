"""Generation and evaluation as a phase: parameters are gathered once, and training goes on as without it."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM
from transformers.integrations.deepspeed import HfDeepSpeedConfig, is_deepspeed_zero3_enabled

from tests.harness import llama
from tests.harness.data import noise
from tests.harness.engines import make_engine, rank
from tests.harness.oracle import Oracle, distance, full_parameters, of_trained
from tests.harness.ranks import run_ranks
from tests.harness.rounding import excess
from zerosync_strategy import attach
from zerosync_strategy.tools.plan.measures import ProcessCounter

WIDTH = 8


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.tied = nn.Linear(WIDTH, WIDTH)
        self.tied.weight = self.layers[0].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.tied(x)


def network() -> Network:
    torch.manual_seed(0)
    return Network()


data = noise(4, WIDTH)


@pytest.mark.extended(but=("2-options0-0",))
@pytest.mark.parametrize("threshold", [0, 20])
@pytest.mark.parametrize(
    ("stage", "options"),
    [
        (2, {}),
        (3, {}),
        (3, {"param_memory_budget": "all"}),
        (3, {"param_memory_budget": 3 * 4 * WIDTH * WIDTH}),
    ],
)
def test_training_goes_on_as_without_it(stage: int, options: dict[str, Any], threshold: int) -> None:
    """Between steps and in mid-window, with forwards that differ by rank; nothing is sent inside."""

    def run() -> float:
        net, plain = network(), network()
        zero = {"stage3_param_persistence_threshold": threshold}
        engine = make_engine(net, torch.optim.AdamW(net.parameters(), lr=0.03), stage, zero)
        zerosync = attach(engine, **options)
        oracle = Oracle(plain, torch.optim.AdamW(plain.parameters(), lr=0.03))

        def generate(k: int) -> None:
            with torch.no_grad(), zerosync.gathered_for_inference(), ProcessCounter() as counter:
                for length in range(1 + 2 * rank()):
                    x = data(100 + k + length, rank())
                    assert excess(engine(x), of_trained(plain, lambda x=x: plain(x))) == 0.0
                    layer = 3 * rank()  # by itself, and another one on each rank
                    expected = of_trained(plain, lambda x=x, layer=plain.layers[layer]: layer(x))
                    assert excess(net.layers[layer](x), expected) == 0.0
                assert counter.traffic == {}

        def generate_and_check() -> None:
            there = sum(param.numel() for param in net.parameters())
            generate(step)
            if "param_memory_budget" not in options:
                assert sum(param.numel() for param in net.parameters()) == there

        for step in range(5):
            if step == 3:
                generate_and_check()  # before a forward
            for micro in (0, 1):
                k = 2 * step + micro
                engine.backward(engine(data(k, rank())).square().mean())
                oracle.backward(lambda r, k=k: plain(data(k, r)).square().mean())
                if step in (1, 2) and micro == 0:
                    generate_and_check()
            engine.step()
            oracle.step()
        return distance(full_parameters(net), full_parameters(plain))

    assert run_ranks(run) == [0.0, 0.0]


def test_in_a_forward() -> None:
    """Where parameters are on their way for the modules to come."""

    def run() -> float:
        net, plain = network(), network()
        zero = {"stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 1}
        engine = make_engine(net, torch.optim.SGD(net.parameters(), lr=0.5), 3, zero)
        zerosync = attach(engine)
        oracle = Oracle(plain, torch.optim.SGD(plain.parameters(), lr=0.5))
        on_their_way = []

        def generate(_: Any, args: Any) -> None:
            on_their_way.append(sum(param.ds_status.name == "INFLIGHT" for param in net.parameters()))
            with torch.no_grad(), zerosync.gathered_for_inference():
                expected = of_trained(plain, lambda: plain.layers[3](args[0]))
                assert excess(net.layers[3](args[0]), expected) == 0.0

        for k in range(4):
            if k == 3:
                net.layers[1].register_forward_pre_hook(generate)
            engine.backward(engine(data(k, rank())).square().mean())
            oracle.backward(lambda r, k=k: plain(data(k, r)).square().mean())
            engine.step()
            oracle.step()
        assert on_their_way[0] > 0
        return distance(full_parameters(net), full_parameters(plain))

    assert run_ranks(run) == [0.0, 0.0]


@pytest.mark.parametrize("budget", [0, "all"])
def test_ranks_generate_as_often_as_they_like(budget: Any) -> None:
    """transformers' ``generate()`` exchanges after every token, under ZeRO-3, whether all ranks have ended."""

    def run() -> None:
        torch.manual_seed(0)
        net, plain = LlamaForCausalLM(llama.CONFIG), LlamaForCausalLM(llama.CONFIG)
        plain.load_state_dict(net.state_dict())
        zero = {"stage3_param_persistence_threshold": 0}
        told = HfDeepSpeedConfig({"zero_optimization": {"stage": 3}})
        zerosync = attach(make_engine(net, llama.sgd(net), 3, zero), param_memory_budget=budget)
        prompt = torch.arange(3)[None]
        with torch.no_grad(), zerosync.gathered_for_inference():
            for tokens in range(1, 1 + 2 * rank()):
                generated = net.generate(prompt, max_new_tokens=tokens, do_sample=False)
                # Tokens: where the largest of the logits leads by far more than their rounding.
                assert torch.equal(generated, plain.generate(prompt, max_new_tokens=tokens, do_sample=False))
        assert is_deepspeed_zero3_enabled() and told.is_zero3()

    run_ranks(run)


@pytest.mark.parametrize("budget", [0, "all"])
def test_backwards_and_steps_are_refused(budget: Any) -> None:
    def run() -> float:
        net, plain = network(), network()
        engine = make_engine(net, torch.optim.SGD(net.parameters(), lr=0.5), 3)
        zerosync = attach(engine, param_memory_budget=budget)
        oracle = Oracle(plain, torch.optim.SGD(plain.parameters(), lr=0.5))
        with zerosync.gathered_for_inference():
            loss = engine(data(0, rank())).square().mean()
            with pytest.raises(RuntimeError, match=r"backward\(\) was called inside of gathered_for_inference\(\)"):
                engine.backward(loss)
            with pytest.raises(RuntimeError, match=r"engine.step\(\) was called inside of gathered_for_inference\(\)"):
                engine.step()
        with pytest.raises(ArithmeticError), zerosync.gathered_for_inference():
            raise ArithmeticError
        engine.backward(engine(data(0, rank())).square().mean())
        oracle.backward(lambda r: plain(data(0, r)).square().mean())
        engine.step()
        oracle.step()
        return distance(full_parameters(net), full_parameters(plain))

    assert run_ranks(run) == [0.0, 0.0]
