"""A pytest plugin for DeepSpeed's own tests: ranks are forked on CPU, and every engine of ZeRO that can be is attached.

In the folder ``tests`` of a checkout of DeepSpeed, with this repository and its ``src`` on ``PYTHONPATH``::

    pytest -p trials.foreign.deepspeed_suite unit/runtime/zero

``FOREIGN_STOCK=1`` attaches nothing, and shows what fails on these devices in any case.
"""

import functools
import os
from datetime import timedelta
from typing import Any

import deepspeed
import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import tests.harness.warm  # noqa: F401  # imports once
from tests.harness.engines import start
from tests.harness.ranks import RanksError, RanksTimedOut, run_ranks
from trials.foreign.results import TIMEOUT, first_error, record
from zerosync_strategy import attach, prepare_cpu

ARM = "stock" if os.environ.get("FOREIGN_STOCK") else "attached"


def _attach_engines() -> list[str]:
    """Attach to what ``deepspeed.initialize`` returns from now on; return what came of each."""
    stock, found = deepspeed.initialize, []

    @functools.wraps(stock)
    def initialize(*args: Any, **options: Any) -> Any:
        result = stock(*args, **options)
        engine = result[0]
        if not hasattr(engine, "zero_optimization_stage") or engine.zero_optimization_stage() == 0:
            found.append("without ZeRO")
        else:
            try:
                attach(engine)
                found.append("attached")
            except (TypeError, ValueError) as refusal:
                found.append(f"refused: {refusal}")
        return result

    deepspeed.initialize = initialize
    return found


def _use_cpu() -> None:
    """DeepSpeed's CPU accelerator has numbers for devices, which torch does not, and DDP takes none."""
    accelerator = type(deepspeed.accelerator.get_accelerator())
    accelerator.current_device = accelerator.current_device_name = lambda self: "cpu"
    stock = DistributedDataParallel.__init__
    DistributedDataParallel.__init__ = lambda ddp, module, device_ids=None, output_device=None, **options: stock(
        ddp, module, **options
    )


def _launch(test: Any, num_procs: int, init_method: str) -> None:
    """In place of ``DistributedExec._launch_procs``."""

    def rank() -> list[str]:
        prepare_cpu()
        _use_cpu()
        found = _attach_engines() if ARM == "attached" else ["stock"]
        if test.init_distributed:
            start(timedelta(seconds=TIMEOUT))
        test.run(**test._fixture_kwargs)
        return found

    name = os.environ["PYTEST_CURRENT_TEST"].rpartition(" ")[0]
    try:
        found = run_ranks(rank, world_size=num_procs, timeout=TIMEOUT, env={"LOCAL_SIZE": str(num_procs)})
    except RanksTimedOut as error:
        record(name, ARM, "timed out", str(error)[-4000:])
        pytest.fail(str(error), pytrace=False)
    except RanksError as error:
        kind, text = first_error(error)
        if kind == "Skipped":
            record(name, ARM, "skipped", text)
            pytest.skip(text)
        record(name, ARM, "failed", text)
        pytest.fail(str(error), pytrace=False)
    engines = found[0]
    record(name, ARM, "passed" if ARM in engines else "not concerned", engines=engines)


def _flags(flag: bool, op: Any = all) -> bool:
    """In place of ``common.reduce_boolean_flags``, which gathers a tensor without a dimension; gloo refuses that."""
    gathered: list[Any] = [None] * deepspeed.comm.get_world_size()
    torch.distributed.all_gather_object(gathered, flag)
    return op(gathered)


def pytest_collection_finish() -> None:
    from unit import common

    common.reduce_boolean_flags = _flags
    common.DistributedExec._launch_procs = _launch
    common.DistributedExec.requires_cuda_env = False
