"""Where tests of this folder run: on GPUs with NCCL, or on the simulated device (`pytest --simulated`)."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from datetime import timedelta
from typing import Any

import deepspeed
import pytest
import torch
from torch.distributed.constants import default_pg_timeout

from tests.harness import engines
from tests.harness.racecheck import simulate
from tests.harness.racecheck.cuda import Follower
from tests.harness.racecheck.recorder import Recorder, running
from tests.harness.ranks import run_ranks
from tests.harness.strict import strict

GPUS = torch.cuda.device_count() if os.environ.get("ZEROSYNC_TEST_CUDA") == "1" else 0
DEVICE = "cuda" if GPUS else "cpu"
COMMUNICATORS = ("NCCL", "two ranks on one GPU") if GPUS else ("two ranks on the simulated device",)


def needs(gpus: int) -> pytest.MarkDecorator:
    """The mark of a test that one GPU cannot run; on the simulated device it has as many ranks."""
    return pytest.mark.skipif(
        0 < GPUS < gpus, reason=f"needs {gpus} GPUs, and here {'is' if GPUS == 1 else 'are'} {GPUS}"
    )


def run(
    job: Callable[..., Any], *args: Any, shared: bool = False, simulated: int = 2, bound: bool = False,
    timeout: timedelta = default_pg_timeout, env: dict[str, str] | None = None, **how: Any,
) -> list[Any]:  # fmt: skip
    """`job(*args)` on one rank for each GPU; `shared`: on two ranks of one GPU, whose communicator has NCCL's rules.

    On the simulated device there are `simulated` ranks in either case, and that communicator. `bound`: each rank's
    device is that of its process group, whose `timeout` is given. `env` adds to the environment; `how` is for
    `run_ranks`.
    """
    env = {**({"LOCAL_RANK": "0"} if shared and GPUS else {}), **(env or {})}
    ranks = simulated if not GPUS else 2 if shared else GPUS
    return run_ranks(_with_group, job, args, shared, bound, timeout, world_size=ranks, env=env, **how)


def _with_group(job: Callable[..., Any], args: tuple[Any, ...], shared: bool, bound: bool, timeout: timedelta) -> Any:
    with ExitStack() as stack:
        if GPUS:
            torch.cuda.set_device(device := torch.device("cuda", int(os.environ["LOCAL_RANK"])))
            if bound:
                torch.distributed.init_process_group("nccl", timeout=timeout, device_id=device)
            deepspeed.init_distributed("gloo" if shared else "nccl", timeout=timeout)
            if shared:
                stack.enter_context(strict())
        else:
            engines.start(timeout)
        return job(*args)


def followed() -> AbstractContextManager[Recorder]:
    """The race checker, which follows CUDA's streams, or simulated ones. Build the engine inside."""
    return Follower().recording() if GPUS else simulate()


@contextmanager
def waits() -> Iterator[list[str]]:
    """A list that is filled with the lines at which the host has waited for the device, as ``"path:line"`` on CUDA."""
    found: list[str] = []
    if GPUS:
        from torch.cuda import _gpu_trace

        torch._C._activate_gpu_trace()

        def waited(*_: Any) -> None:
            found.append(_line())

        registries = [getattr(_gpu_trace, f"{of}SynchronizationCallbacks") for of in ("Event", "Stream", "Device")]
        for registry in registries:
            registry.add_callback(waited)
        yield found
        for registry in registries:
            registry.callback_list.remove(waited)
    else:
        device = running()
        assert device is not None, "tests that count host waits run on a GPU or with --simulated"
        before = len(device.host_waits)
        yield found
        found += device.host_waits[before:]


def _line() -> str:
    """The innermost one outside of torch and of what calls this."""
    frame = sys._getframe(2)
    while frame.f_back is not None and "/torch/" in frame.f_code.co_filename:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
