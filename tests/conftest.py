"""How pytest runs these tests."""

import gc
import importlib
import os
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from tests.harness.extended import left_out, unknown_ids
from tests.harness.huge_pages import use_huge_pages


@pytest.fixture(autouse=True)
def small_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let buckets of small models be as small as their sizes say where NCCL's rules are in force, too."""
    messages = "zerosync_strategy.core.comm.nodes"  # not imported here: torch comes by tests/harness/warm.py
    monkeypatch.setattr(f"{messages}.LEAST", 0)
    monkeypatch.setattr(f"{messages}.LEAST_OF_RANK", 0)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--stock", action="store_true", help="run the Lightning tests on Lightning's own DeepSpeed strategy instead"
    )
    parser.addoption(
        "--simulated", action="store_true", help="run the ranks on the simulated device, by NCCL's rules (make gpu-sim)"
    )
    parser.addoption(
        "--extended", choices=["none", "named", "all"], default="named",
        help="which extended cases to run: none, those named by a node id, all (make test-all)",
    )  # fmt: skip
    parser.addoption("--share", metavar="K/N", help="run the K-th of N parts of the extended cases, too")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--stock"):
        os.environ["ZEROSYNC_TEST_STOCK"] = "1"
    if config.getoption("--simulated"):
        os.environ["ZEROSYNC_TEST_SIMULATED"] = "1"
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        gc.disable()  # till all is collected: nothing that is imported goes again, and looking for it takes seconds
        importlib.import_module("tests.harness.warm")  # tests run here, not in workers that this process starts


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave out what is about a callback that older releases of Lightning do not have."""
    if collection_path.parts[-2:] != ("lightning", "test_averaging.py"):
        return None
    callbacks = importlib.import_module("lightning.pytorch.callbacks")
    return None if hasattr(callbacks, "EMAWeightAveraging") else True


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items if config.getoption("--simulated") else ():
        if (mark := item.get_closest_marker("off_device")) is not None:
            item.add_marker(pytest.mark.skip(reason=f"not on the simulated device: {mark.args[0]}"))
    if not any("[" in argument for argument in config.args) and (unknown := unknown_ids(items)):
        raise pytest.UsageError(f"the mark 'extended' names cases that are not there: {', '.join(sorted(unknown))}")
    out = left_out(items, config.args, config.getoption("--extended"), config.getoption("--share"))
    config.hook.pytest_deselected(items=[item for item in items if item in out])
    items[:] = [item for item in items if item not in out]


def pytest_collection_finish() -> None:
    """What is here by now, no garbage collection of a rank looks through, which would copy the pages that it is in."""
    gc.collect()
    gc.freeze()
    gc.enable()
    use_huge_pages()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(call: pytest.CallInfo[Any]) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Leave out a test of a feature for which the installed DeepSpeed is too old, as the error's release says."""
    report = yield
    if report.failed and call.excinfo is not None:
        from tests.harness.releases import lacking  # not imported above: torch comes by tests/harness/warm.py

        if release := lacking(call.excinfo.value):
            why = f"Skipped: before deepspeed {release}: {call.excinfo.exconly().splitlines()[0]}"
            report.outcome, report.longrepr = "skipped", (str(report.fspath), 0, why)
    return report
