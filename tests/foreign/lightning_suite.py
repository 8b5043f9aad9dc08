"""A pytest plugin for Lightning's own tests: two CPU ranks each, and ZeroSync where a Trainer asks for nothing else.

In the folder ``tests`` of a checkout of Lightning, with this repository and its ``src`` on ``PYTHONPATH``::

    FOREIGN_STRATEGY=zerosync_stage_2 pytest -p tests.foreign.lightning_suite tests_pytorch/loops

``FOREIGN_STRATEGY=ddp`` shows what two ranks alone change.
"""

import functools
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import conftest as _imports_once  # noqa: F401  # and sets what must be set before torch loads
from tests.foreign.results import TIMEOUT, first_error, record
from tests.harness.ranks import RanksError, RanksTimedOut, run_ranks

STRATEGY = os.environ.get("FOREIGN_STRATEGY", "zerosync_stage_2")
WORLD = 2


def _train_with_it() -> list[str]:
    """Make it the strategy of every Trainer that leaves the choice open; return what was made."""
    from lightning.pytorch import Trainer

    import zerosync_strategy.lightning  # noqa: F401  # registers the names

    stock, made = Trainer.__init__, []

    @functools.wraps(stock)
    def init(trainer: Any, *args: Any, **options: Any) -> None:
        asked = {name: options.get(name, "auto") for name in ("strategy", "accelerator", "plugins")}
        if any(value not in ("auto", "cpu", None) for value in asked.values()):
            pytest.skip(f"asks for {asked}")
        options |= {"strategy": STRATEGY, "accelerator": "cpu", "devices": WORLD}
        made.append(STRATEGY)
        stock(trainer, *args, **options)

    Trainer.__init__ = init
    if STRATEGY.startswith("zerosync"):
        torch.load = _load_directories(torch.load)
    return made


def _load_directories(stock: Any) -> Any:
    """The tests look into checkpoints by ``torch.load``, and those of DeepSpeed are directories."""

    @functools.wraps(stock)
    def load(file: Any, *args: Any, **options: Any) -> Any:
        if not (isinstance(file, (str, Path)) and Path(file).is_dir()):
            return stock(file, *args, **options)
        saved = stock(next(Path(file).glob("checkpoint/*mp_rank_00_model_states.pt")), weights_only=False)
        return {**saved, "state_dict": saved["module"]}

    return load


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool:
    """Call the test on every rank. Its fixtures were set up before, and are shared: ``tmp_path`` is one folder."""
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}

    def rank() -> int:
        made = _train_with_it()
        pyfuncitem.obj(**arguments)
        return len(made)

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
    record(test, STRATEGY, "passed" if made[0] else "not concerned")
    return True
