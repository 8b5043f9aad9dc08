"""A test is left out for a feature that the installed DeepSpeed is too old for, and for no other error."""

from importlib.metadata import version
from types import SimpleNamespace

import pytest

from tests.conftest import pytest_runtest_makereport
from tests.harness.ranks import RanksFailed, run_ranks
from zerosync_strategy import ContractError

WORDS = "ZeroSync's feature needs DeepSpeed 99.0 or newer"


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (ContractError(WORDS, "99.0"), "skipped"),
        (ContractError(WORDS, version("deepspeed")), "failed"),
        (ContractError(WORDS), "failed"),
        (AssertionError(f"ContractError: {WORDS}"), "failed"),
    ],
    ids=["later", "installed", "changed", "words"],
)
@pytest.mark.parametrize("on_rank", [False, True], ids=["here", "on a rank"])
def test_only_an_error_of_a_later_release_leaves_a_test_out(error: Exception, outcome: str, on_rank: bool) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(RanksFailed if on_rank else type(error)) as raised:
        run_ranks(fail, world_size=1) if on_rank else fail()
    report = SimpleNamespace(failed=True, outcome="failed", longrepr="", fspath=__file__)
    hook = pytest_runtest_makereport(SimpleNamespace(excinfo=raised))  # type: ignore[arg-type]
    next(hook)
    with pytest.raises(StopIteration) as returned:
        hook.send(report)  # type: ignore[arg-type]
    assert returned.value.value is report and report.outcome == outcome
    assert "99.0" in str(report.longrepr) or outcome == "failed"
