"""Options that are gone say what to do instead, for one release."""

import ast
import re
from collections.abc import Callable
from typing import Any

import pytest

import zerosync_strategy
from zerosync_strategy import ZeroSyncConfig, ZeroSyncFabricStrategy, ZeroSyncPlugin, ZeroSyncStrategy
from zerosync_strategy.core.options import REMOVED, SINCE

OPTIONS: dict[str, Callable[[dict[str, Any]], object]] = {
    "block": lambda given: ZeroSyncConfig.resolve(given),
    "keyword": lambda given: ZeroSyncConfig.resolve(None, given),
    "config": lambda given: ZeroSyncConfig(**given),
    "lightning": lambda given: ZeroSyncStrategy(**given),
    "fabric": lambda given: ZeroSyncFabricStrategy(**given),
    "accelerate": lambda given: ZeroSyncPlugin(**given),
}


@pytest.mark.parametrize("said", REMOVED)
def test_using_it_says_what_to_do_instead(said: str) -> None:
    name, _, value = said.partition("=")
    expected = f"ZeroSync option {said!r} was removed in {SINCE}. {REMOVED[said]}"
    for use in OPTIONS.values():
        with pytest.raises(ValueError, match=f"^{re.escape(expected)}$"):
            use({name: ast.literal_eval(value or "1")})


def test_other_names_are_unknown_as_ever() -> None:
    with pytest.raises(ValueError, match=r"Unknown ZeroSync option 'coalesced'.* Did you mean 'coalesce'"):
        ZeroSyncConfig.resolve({"coalesced": True})
    with pytest.raises(TypeError, match="coalesced"):
        ZeroSyncConfig(coalesced=True)  # type: ignore[call-arg]


def test_the_table_is_of_one_release() -> None:
    """Once a later one is made, its rows go."""
    release, since = (tuple(map(int, text.split(".")[:2])) for text in (zerosync_strategy.__version__, SINCE))
    assert release <= since or not REMOVED
