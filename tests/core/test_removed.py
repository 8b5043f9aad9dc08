"""Options that are gone say what to do instead, for one release."""

import re
from collections.abc import Callable

import pytest

import zerosync_strategy
from zerosync_strategy import ZeroSyncConfig, ZeroSyncFabricStrategy, ZeroSyncPlugin, ZeroSyncStrategy
from zerosync_strategy.core.options.removed import REMOVED, SINCE

OPTIONS: dict[str, Callable[[str], object]] = {
    "block": lambda name: ZeroSyncConfig.resolve({name: 1}),
    "keyword": lambda name: ZeroSyncConfig.resolve(None, {name: 1}),
    "config": lambda name: ZeroSyncConfig(**{name: 1}),  # type: ignore[arg-type]
    "lightning": lambda name: ZeroSyncStrategy(**{name: 1}),  # type: ignore[arg-type]
    "fabric": lambda name: ZeroSyncFabricStrategy(**{name: 1}),  # type: ignore[arg-type]
    "accelerate": lambda name: ZeroSyncPlugin(**{name: 1}),
}


@pytest.mark.parametrize("name", REMOVED)
def test_using_it_says_what_to_do_instead(name: str) -> None:
    for use in OPTIONS.values():
        with pytest.raises(
            ValueError, match=f"^ZeroSync option '{name}' was removed in {SINCE}\\. {re.escape(REMOVED[name])}$"
        ):
            use(name)


def test_other_names_are_unknown_as_ever() -> None:
    with pytest.raises(ValueError, match=r"Unknown ZeroSync option 'coalesced'.* Did you mean 'coalesce'"):
        ZeroSyncConfig.resolve({"coalesced": True})
    with pytest.raises(TypeError, match="coalesced"):
        ZeroSyncConfig(coalesced=True)  # type: ignore[call-arg]


def test_the_table_is_of_one_release() -> None:
    """Once a later one is made, its rows go."""
    release, since = (tuple(map(int, text.split(".")[:2])) for text in (zerosync_strategy.__version__, SINCE))
    assert release <= since or not REMOVED
