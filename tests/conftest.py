"""Import the heavy packages once, so that the ranks that tests fork from this process have them already.

This process must stay fit to be forked: no process group, no backward pass, no CUDA call here, only in ranks.
"""

import contextlib
import gc
import importlib
import os

# OpenMP reads this as torch loads. A pool of threads would not survive a fork.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# torch looks up the name of the peer of each connection to a store; a name server that is silent costs 5 s by default.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
# A check through the CUDA runtime would spoil CUDA in every fork; one through NVML does not.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
# DeepSpeed chooses its accelerator as it is imported.
if os.environ.get("ZEROSYNC_TEST_CUDA") != "1":
    os.environ.setdefault("DS_ACCELERATOR", "cpu")

import logging
import re
import warnings
from collections.abc import Generator
from typing import Any

import deepspeed
import lightning.pytorch
import pytest
import torch
import tqdm

# What would otherwise be imported anew on every rank: by deepspeed.initialize(), by frameworks, by a compilation.
LATE = """
    deepspeed.comm.mori deepspeed.compile.backend deepspeed.module_inject.auto_ep_layer
    deepspeed.runtime.superoffload.superoffload_stage3 deepspeed.runtime.zero.muon.muon_optimizer
    sympy.combinatorics sympy.tensor.tensor torch._dynamo.dce_extra_outputs torch._dynamo.repro.after_dynamo
    torch._functorch._aot_autograd.subclass_codegen torch._functorch._aot_autograd.subclass_parametrization
    torch._inductor.compile_fx torch._subclasses.schema_check_mode torch.distributed.tensor.experimental._attention
    torch.export._trace torch.fx.experimental.optimization torch.fx.experimental.validator torch.profiler._cupti_monitor
    lightning.pytorch fsspec.implementations.chained accelerate transformers.integrations
"""
for name in LATE.split():
    with contextlib.suppress(ImportError), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module(name)
torch._dynamo.list_backends()  # imports them
if os.environ.get("DS_ACCELERATOR") == "cpu":  # the probes of GPU operators call CUDA
    deepspeed.ops.__compatible_ops__  # noqa: B018  # probed once a process, with a compiler

torch.set_num_threads(1)
tqdm.tqdm.monitor_interval = 0  # else the first progress bar in this process starts a thread
logging.getLogger("DeepSpeed").setLevel(logging.ERROR)


# What it is about, older releases of Lightning do not have.
collect_ignore = [] if hasattr(lightning.pytorch.callbacks, "EMAWeightAveraging") else ["lightning/test_averaging.py"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--stock", action="store_true", help="run the Lightning tests on Lightning's own DeepSpeed strategy instead"
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--stock"):
        os.environ["ZEROSYNC_TEST_STOCK"] = "1"


def pytest_collection_finish() -> None:
    """What is here by now, no garbage collection of a rank looks through, which would copy the pages that it is in."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(call: pytest.CallInfo[Any]) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A test of a feature that the installed DeepSpeed cannot have is left out where the error says just that."""
    report = yield
    if report.failed and call.excinfo is not None:
        found = re.search(r"ContractError: (ZeroSync's .* needs DeepSpeed [\d.]+ or newer)", str(call.excinfo.value))
        if found is not None:
            report.outcome, report.longrepr = "skipped", (str(report.fspath), 0, f"Skipped: {found[1]}")
    return report
