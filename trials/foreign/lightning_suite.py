"""A pytest plugin for Lightning's own tests: two CPU ranks each, and ZeroSync where a Trainer asks for nothing else.

In the folder ``tests`` of a checkout of Lightning, with this repository and its ``src`` on ``PYTHONPATH``::

    FOREIGN_STRATEGY=zerosync_stage_2 pytest -p trials.foreign.lightning_suite tests_pytorch/loops

``FOREIGN_STRATEGY=ddp`` shows what two ranks alone change, and ``stock_stage_2`` what DeepSpeed alone does. What each
fit leaves in the parameters is noted, and `results` compares it with that of ``ddp``.
"""

import functools
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import tests.harness.warm  # noqa: F401  # imports once
from tests.harness.oracle import full_parameters
from tests.harness.ranks import RanksError, RanksTimedOut, run_ranks
from trials.foreign.results import TIMEOUT, first_error, record

STRATEGY = os.environ.get("FOREIGN_STRATEGY", "zerosync_stage_2")
WORLD = 2
LAUNCH = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "NODE_RANK",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
)


def _strategy() -> Any:
    from zerosync_strategy.lightning import DeepSpeedAnyDeviceStrategy  # registers the names of ours, too

    name, _, stage = STRATEGY.rpartition("_stage_")
    return DeepSpeedAnyDeviceStrategy(stage=int(stage)) if name == "stock" else STRATEGY


def _train_with_it() -> list[list[list[float]]]:
    """Make it the strategy of every Trainer that leaves the choice open; return for each what its fits left."""
    from lightning.pytorch import Trainer
    from lightning.pytorch.loops.fit_loop import _FitLoop

    stock, ended, made = Trainer.__init__, _FitLoop.on_run_end, []
    launched = {name: os.environ[name] for name in LAUNCH}
    fits: dict[Any, list[list[float]]] = {}

    @functools.wraps(stock)
    def init(trainer: Any, *args: Any, **options: Any) -> None:
        asked = {name: options.get(name, "auto") for name in ("strategy", "accelerator", "plugins")}
        if any(value not in ("auto", "cpu", None) for value in asked.values()):
            pytest.skip(f"asks for {asked}")
        os.environ.update(launched)  # some tests bring back the environment that they were collected in
        options |= {"strategy": _strategy(), "accelerator": "cpu", "devices": WORLD}
        made.append([])
        fits[trainer] = made[-1]
        stock(trainer, *args, **options)

    @functools.wraps(ended)
    def on_run_end(loop: Any) -> Any:
        result = ended(loop)
        if loop.trainer in fits:
            fits[loop.trainer].append(_digest(loop.trainer.lightning_module))
        return result

    Trainer.__init__ = init
    _FitLoop.on_run_end = on_run_end
    _FitLoop.setup_data = _seeded(_FitLoop.setup_data)
    _FitLoop.advance = _seeded(_FitLoop.advance)
    if STRATEGY != "ddp":
        torch.load = _load_directories(torch.load)
    return made


def _seeded(stock: Any) -> Any:
    """Each strategy draws other random numbers before the data is made, and before an epoch."""

    @functools.wraps(stock)
    def method(loop: Any) -> Any:
        torch.manual_seed(1 + loop.trainer.current_epoch)
        return stock(loop)

    return method


def _digest(module: torch.nn.Module) -> list[float]:
    """The norm of all parameters, and what they are in a direction that is the same in every arm."""
    found = [param.flatten().double() for param in full_parameters(module).values()]
    whole = torch.cat(found) if found else torch.zeros(0, dtype=torch.double)
    direction = torch.randn(len(whole), generator=torch.Generator().manual_seed(0), dtype=torch.double)
    return [whole.norm().item(), (whole @ direction).item()]


def _load_directories(stock: Any) -> Any:
    """The tests look into checkpoints by ``torch.load``, and those of DeepSpeed are directories."""

    @functools.wraps(stock)
    def load(file: Any, *args: Any, **options: Any) -> Any:
        if not (isinstance(file, (str, Path)) and Path(file).is_dir()):
            return stock(file, *args, **options)
        saved = stock(next(Path(file).glob("checkpoint/*mp_rank_00_model_states.pt")), weights_only=False)
        return {**saved, "state_dict": saved["module"]}

    return load


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "flaky: of a plugin that Lightning's tests may run without")
    # Lightning's own settings make errors of them.
    config.addinivalue_line("filterwarnings", r"ignore:.torch\.distributed\.:FutureWarning")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool:
    """Call the test on every rank. Its fixtures were set up before, and are shared: ``tmp_path`` is one folder."""
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}

    def rank() -> list[list[list[float]]]:
        made = _train_with_it()
        torch.manual_seed(0)
        pyfuncitem.obj(**arguments)
        return made

    test = pyfuncitem.nodeid
    try:
        made = run_ranks(rank, world_size=WORLD, timeout=TIMEOUT)
    except RanksTimedOut as error:
        record(test, STRATEGY, "timed out", str(error)[-4000:])
        pytest.fail(str(error), pytrace=False)
    except RanksError as error:
        kind, text = first_error(error)
        if kind in ("Skipped", "XFailed"):
            record(test, STRATEGY, "skipped", text)
            pytest.skip(text)
        record(test, STRATEGY, "failed", text)
        pytest.fail(str(error), pytrace=False)
    record(test, STRATEGY, "passed" if made[0] else "not concerned", weights=made[0])
    return True
