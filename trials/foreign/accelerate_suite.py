"""A pytest plugin for Accelerate's own ``tests/deepspeed``: each ``DeepSpeedPlugin`` of theirs is a ``ZeroSyncPlugin``.

In the folder ``tests`` of a checkout of Accelerate, with this repository and its ``src`` on ``PYTHONPATH``, and
``parameterized`` installed::

    pytest -p trials.foreign.accelerate_suite deepspeed

They run in one process, and what they fetch from the Hub is a tiny model of random weights. ``FOREIGN_STOCK=1`` leaves
the plugin as it is.
"""

import os
import unittest
from typing import Any

import accelerate
import pytest
import torch
import transformers

import tests.harness.warm  # noqa: F401  # imports once
from trials.foreign.results import record
from zerosync_strategy import ZeroSyncPlugin, prepare_cpu

ARM = "stock" if os.environ.get("FOREIGN_STOCK") else "zerosync"
TINY = {"vocab_size": 1000, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64}


def _gpt2(cls: Any, bare: bool) -> Any:
    def from_pretrained(*_: Any, **__: Any) -> Any:
        config = transformers.GPT2Config(**TINY)
        return transformers.GPT2Model(config) if bare else cls.from_config(config)

    return from_pretrained


def _run_on_cpu(stock: Any) -> Any:
    """In place of ``unittest.skipUnless``: most of them ask for a GPU, and need none."""
    return lambda condition, reason: stock(condition or reason == "test requires a GPU", reason)


@pytest.hookimpl(tryfirst=True)
def pytest_configure() -> None:
    unittest.skipUnless = _run_on_cpu(unittest.skipUnless)
    prepare_cpu()
    torch.set_num_threads(1)
    for module in (accelerate, accelerate.utils, accelerate.utils.dataclasses):
        if ARM == "zerosync":
            module.DeepSpeedPlugin = ZeroSyncPlugin
    transformers.AutoModel.from_pretrained = _gpt2(transformers.AutoModel, bare=True)
    transformers.AutoModelForCausalLM.from_pretrained = _gpt2(transformers.AutoModelForCausalLM, bare=False)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or report.skipped:
        record(report.nodeid, ARM, report.outcome, str(report.longrepr or "")[-2500:])
