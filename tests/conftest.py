"""Import the heavy packages once, so that the ranks that tests fork from this process have them already.

This process must stay fit to be forked: no process group, no backward pass, no CUDA call here, only in ranks.
"""

import contextlib
import os

# OpenMP reads this as torch loads. A pool of threads would not survive a fork.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A check through the CUDA runtime would spoil CUDA in every fork; one through NVML does not.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
# DeepSpeed chooses its accelerator as it is imported.
if os.environ.get("ZEROSYNC_TEST_CUDA") != "1":
    os.environ.setdefault("DS_ACCELERATOR", "cpu")

import logging

import deepspeed.compile.backend  # noqa: F401  # deepspeed.initialize() would import it anew on every rank
import pytest
import torch

with contextlib.suppress(ImportError):
    import lightning.pytorch  # noqa: F401
with contextlib.suppress(ImportError):
    import accelerate  # noqa: F401
with contextlib.suppress(ImportError):
    import transformers.integrations  # noqa: F401

torch.set_num_threads(1)
logging.getLogger("DeepSpeed").setLevel(logging.ERROR)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--stock", action="store_true", help="run the Lightning tests on Lightning's own DeepSpeed strategy instead"
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--stock"):
        os.environ["ZEROSYNC_TEST_STOCK"] = "1"
