"""The tables of DeepSpeed's internals against the installed release (rule C1), and errors for what a release lacks."""

from types import SimpleNamespace

import deepspeed
import pytest
import torch

from tests.harness.copying import make_engine
from tests.harness.ranks import run_ranks
from zerosync_strategy import ContractError, attach, shard_over
from zerosync_strategy.core.engine import contract
from zerosync_strategy.core.engine import deepspeed_internals as internals
from zerosync_strategy.core.engine.contract import Internal
from zerosync_strategy.core.engine.param_functions import gather_at_once
from zerosync_strategy.core.engine.zero import check_release

OFFLOADED = {"offload_optimizer": {"device": "cpu"}}
BY_STAGE = {
    2: (
        internals.CONFIGURATION, internals.ALL_STAGES, internals.ACCUMULATION, internals.STAGE_1_2,
        internals.ANY_MODEL, internals.DEEPCOMPILE,
    ),
    3: (
        internals.STAGE_3, internals.UNSHARD_ON_READ, internals.SEVERAL_ENGINES, internals.NESTED_ZERO_INIT,
    ),
}  # fmt: skip


@pytest.mark.parametrize("stage", [2, 3])
def test_every_internal_of_the_tables_is_there(stage: int) -> None:
    """Those of features that no test of this run may use, too, so that a new release is known at once."""

    def run() -> None:
        engine = make_engine(stage, OFFLOADED)
        for table in BY_STAGE[stage]:
            contract.require(table, engine)

    run_ranks(run)


def test_an_internal_is_not_asked_for_before_its_release() -> None:
    """What a table says to come with a release is not used on an older one: the code has another way, or an error."""

    def run() -> None:
        engine, has = make_engine(2), contract.has
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(contract, "has", lambda internal: False)
            with pytest.raises(ContractError, match=r"shard_over\(\) needs DeepSpeed 0\.19\.3 or newer.*leave shard_"):
                shard_over(torch.distributed.group.WORLD, torch.nn.Linear(2, 2))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(contract, "has", lambda internal: internal is not internals.COMPILE_BACKEND and has(internal))
            patch.setitem(engine._config._param_dict, "compile", {"deepcompile": True})
            with pytest.raises(ContractError, match=r"DeepCompile needs DeepSpeed 0\.18\.9 .*deepcompile") as found:
                attach(engine)
            assert found.value.since == "0.18.9"

    run_ranks(run)


def test_functions_of_parameters_are_wrapped_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """By every engine that evaluates a module with DeepSpeed before 0.19.8."""
    monkeypatch.setattr(contract, "has", lambda internal: False)
    calls: list[list[int]] = []
    param = SimpleNamespace(ds_id=0, device=torch.device("cpu"), all_gather=lambda params, *_: calls.append(params))
    for _ in range(3):
        gather_at_once([param])
    assert param.all_gather.args[1].__name__ == "<lambda>"
    param.all_gather()
    assert calls == [[param]]


@pytest.mark.parametrize(("release", "accepted"), [("0.17.6", False), ("0.18.3", False), ("0.18.4+unknown", True)])
def test_older_releases_are_refused_with_the_reason(
    release: str, accepted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deepspeed, "__version__", release)
    if accepted:
        check_release()
        return
    with pytest.raises(ContractError, match=rf"0\.18\.4 or newer, found {release}.*do not notice a loss\.backward"):
        check_release()


def test_tables_are_by_release() -> None:
    later = Internal("a feature", "engine", "name", since="0.19.8")
    earlier = Internal("a feature", "engine", "name", until="0.19.8")
    for release, is_later in (("0.18.4", False), ("0.19.8+unknown", True), ("0.19.8", True), ("0.20.0", True)):
        assert later.applies_to(release) is is_later and earlier.applies_to(release) is not is_later
