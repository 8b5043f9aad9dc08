"""Public names that are gone say what to do instead, for one release."""

import re
from collections.abc import Callable

import pytest

import zerosync_strategy
from zerosync_strategy import ZeroSync, ZeroSyncConfig, ZeroSyncFabricStrategy, ZeroSyncPlugin, ZeroSyncStrategy
from zerosync_strategy.core.options.removed import REMOVED, SINCE, removal

OPTIONS: dict[str, Callable[[str], object]] = {
    "block": lambda name: ZeroSyncConfig.resolve({name: 1}),
    "keyword": lambda name: ZeroSyncConfig.resolve(None, {name: 1}),
    "config": lambda name: ZeroSyncConfig(**{name: 1}),  # type: ignore[arg-type]
    "lightning": lambda name: ZeroSyncStrategy(**{name: 1}),  # type: ignore[arg-type]
    "fabric": lambda name: ZeroSyncFabricStrategy(**{name: 1}),  # type: ignore[arg-type]
    "accelerate": lambda name: ZeroSyncPlugin(**{name: 1}),
}


def remedy(name: str) -> str:
    return f"'{name}' was removed in {SINCE}\\. {re.escape(REMOVED[name])}$"


@pytest.mark.parametrize("name", REMOVED)
def test_using_it_says_what_to_do_instead(name: str) -> None:
    for use in OPTIONS.values():
        with pytest.raises(ValueError, match=f"^ZeroSync option {remedy(name)}"):
            use(name)
    with pytest.raises(AttributeError, match=remedy(name)):
        getattr(object.__new__(ZeroSync), name)
    with pytest.raises(ImportError, match=remedy(name)):
        exec(f"from zerosync_strategy import {name}")


def test_other_names_are_unknown_as_ever() -> None:
    assert removal("ZeroSync option", "nonsense") == removal("ZeroSync option", 1) == ""
    assert not hasattr(zerosync_strategy, "nonsense") and not hasattr(object.__new__(ZeroSync), "nonsense")
    with pytest.raises(ValueError, match=r"Unknown ZeroSync option 'coalesced'.* Did you mean 'coalesce'"):
        ZeroSyncConfig.resolve({"coalesced": True})


def test_the_table_is_of_one_release() -> None:
    """Once a later one is made, its rows go."""
    release, since = (tuple(map(int, text.split(".")[:2])) for text in (zerosync_strategy.__version__, SINCE))
    assert release <= since or not REMOVED
