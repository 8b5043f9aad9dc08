"""What a test needs of a release, where neither ZeroSync nor an error of its own stands in for an older one."""

import os
from importlib.metadata import version
from typing import Any

import pytest
from packaging.version import Version

from tests.harness.ranks import SIMULATED, RanksError


def since(release: str, why: str, package: str = "deepspeed") -> pytest.MarkDecorator:
    """Leave the test out before this release of `package`, because `why`."""
    return pytest.mark.skipif(_installed(package) < Version(release), reason=f"before {package} {release}, {why}")


def except_from(first: str, mended: str, why: str) -> pytest.MarkDecorator:
    """Leave the test out from DeepSpeed `first` until it was `mended`, because `why`."""
    is_broken = Version(first) <= _installed("deepspeed") < Version(mended)
    return pytest.mark.skipif(is_broken, reason=f"from deepspeed {first} until {mended}, {why}")


def lacking(error: BaseException) -> str:
    """The release of DeepSpeed that a test which fails by `error` needs; empty if the installed one is new enough."""
    outcomes: list[Any] = error.outcomes if isinstance(error, RanksError) else [error]
    needed = [since for outcome in outcomes if (since := getattr(outcome, "since", ""))]
    return next((each for each in needed if _installed("deepspeed") < Version(each)), "")


def _installed(package: str) -> Version:
    return Version(Version(version(package)).base_version)


def needs_fp16() -> pytest.MarkDecorator:
    """Leave the test out where DeepSpeed refuses fp16 because the device has none."""
    return pytest.mark.skipif(not fp16_supported(), reason="DeepSpeed finds no fp16 on this device")


def fp16_supported() -> bool:
    """Whether DeepSpeed trains in fp16 on this device. Not every CPU has it; the simulated device always does."""
    if os.environ.get(SIMULATED):
        return True
    from deepspeed.accelerator import get_accelerator

    return bool(get_accelerator().is_fp16_supported())
