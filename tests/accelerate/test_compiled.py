"""Accelerate's dynamo plugin under ZeRO-3."""

import os

import pytest
import torch
from accelerate.utils import TorchDynamoPlugin

from tests.accelerate.runs import start
from tests.harness import deepcompile
from tests.harness.oracle import distance, full_parameters
from tests.harness.problem import backward_of, loss_of, network, oracle
from tests.harness.ranks import SIMULATED, run_ranks


@pytest.mark.extended
def test_a_prepared_model_is_compiled_and_equals_plain_torch() -> None:
    def run() -> tuple[float, int]:
        run = start(3, dynamo_plugin=TorchDynamoPlugin(backend="aot_eager"))
        plain = oracle()
        for index in range(4):
            run.accelerator.backward(loss_of(run.model, run.batch(index)))
            run.optimizer.step()
            run.optimizer.zero_grad()
            backward_of(plain, index)
            plain.step()
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        return distance(run.parameters(), full_parameters(plain.module)), graphs

    for error, graphs in run_ranks(run, timeout=200):
        assert error == 0.0
        assert graphs > 0 or SIMULATED in os.environ  # there, what is compiled runs as it is written


class Own(torch.nn.Sequential):
    """Of torch's own modules, ``Module.compile()`` leaves the outermost frame as it is."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self:
            x = layer(x)
        return x


@pytest.mark.off_device("Python stands in for DeepCompile's native operators, and knows no streams")
def test_deepcompile_comes_after_attach() -> None:
    def run() -> tuple[float, int, int]:
        handle = deepcompile.install()
        config = {"compile": {"deepcompile": True}, "zero_optimization": {"stage": 3}}
        run = start(
            3, dynamo_plugin=TorchDynamoPlugin(backend="eager"), hf_ds_config=config, make=lambda: Own(*network())
        )
        plain = oracle()
        for index in range(4):
            run.accelerator.backward(loss_of(run.model, run.batch(index)))
            backward_of(plain, index)
            if index % 2:
                run.optimizer.step()
                run.optimizer.zero_grad()
                plain.step()
        return distance(run.parameters(), full_parameters(plain.module)), handle.gathers, handle.reductions

    for error, gathers, reductions in run_ranks(run, timeout=200):
        assert error == 0.0 and gathers > 0 and reductions == 0
