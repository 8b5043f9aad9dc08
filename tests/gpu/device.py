"""Where tests of this folder run: on GPUs with NCCL, or on the simulated device (`pytest --simulated`)."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import deepspeed
import torch

from tests.harness import engines
from tests.harness.racecheck import simulate
from tests.harness.racecheck.cuda import Follower
from tests.harness.racecheck.recorder import Recorder, running
from tests.harness.ranks import run_ranks
from tests.harness.strict import strict

GPUS = torch.cuda.device_count() if os.environ.get("ZEROSYNC_TEST_CUDA") == "1" else 0
DEVICE = "cuda" if GPUS else "cpu"
COMMUNICATORS = ("NCCL", "two ranks on one GPU") if GPUS else ("two ranks on the simulated device",)


def run(job: Callable[..., Any], *args: Any, shared: bool = False, env: dict[str, str] | None = None) -> list[Any]:
    """`job(*args)` on one rank for each GPU; `shared`: on two ranks of one GPU, whose communicator has NCCL's rules.

    On the simulated device there are two ranks in either case, and that communicator. `env` adds to the environment.
    """
    env = {**({"LOCAL_RANK": "0"} if shared and GPUS else {}), **(env or {})}
    return run_ranks(_with_group, job, args, shared, world_size=2 if shared or not GPUS else GPUS, env=env)


def _with_group(job: Callable[..., Any], args: tuple[Any, ...], shared: bool) -> Any:
    with ExitStack() as stack:
        if GPUS:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
            deepspeed.init_distributed("gloo" if shared else "nccl")
            if shared:
                stack.enter_context(strict())
        else:
            engines.start()
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
