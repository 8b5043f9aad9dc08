"""The installed releases against those that were tested together."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata

from packaging.requirements import Requirement
from packaging.version import Version

from zerosync_strategy.tools.doctor.findings import Finding, error, note, ok, warning

TOPIC = "versions"


@dataclass(frozen=True)
class Tested:
    """The releases of a package with which the tests have passed: the oldest and the newest, and all between them.

    Attributes:
        oldest, newest: releases.
        required: the package must be there.
    """

    oldest: str
    newest: str
    required: bool = False


# The columns of the table in docs/compatibility.md; a test compares them.
TESTED = {
    "python": Tested("3.10", "3.13", required=True),
    "torch": Tested("2.10.0", "2.15.0", required=True),
    "deepspeed": Tested("0.18.4", "0.19.8", required=True),
    "lightning": Tested("2.5.0", "2.6.6"),
    "pytorch-lightning": Tested("2.5.0", "2.6.6"),
    "accelerate": Tested("1.11.0", "1.15.0"),
    "transformers": Tested("4.56.2", "5.23.0"),
}


def installed(package: str) -> str | None:
    """Return the release of ``package`` in this environment, ``None`` where it is not installed."""
    if package == "python":
        return platform.python_version()
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def check(version_of: Callable[[str], str | None] = installed) -> list[Finding]:
    """Compare what ``version_of`` says of each package with the tested releases, and look for two of one library."""
    return [finding for package in TESTED for finding in _check(package, version_of(package))] + list(
        _lightning(version_of)
    )


def _check(package: str, found: str | None) -> Iterator[Finding]:
    tested = TESTED[package]
    span = f"{tested.oldest} to {tested.newest}"
    if found is None:
        if tested.required:
            yield error(TOPIC, f"{package} is not installed", f"Install {package} {tested.newest}.")
        return
    release = Version(Version(found).base_version)
    if release < Version(tested.oldest):
        found = f"{package} {found} is older than the tested releases, {span}"
        yield (error if tested.required else warning)(TOPIC, found, f"Install {package} {tested.newest}.")
    elif release.release[: len(Version(tested.newest).release)] > Version(tested.newest).release:
        found = f"{package} {found} is newer than the tested releases, {span}"
        yield warning(
            TOPIC, found, f"Trust the contract and the self-test below, or install {package} {tested.newest}."
        )
    else:
        yield ok(TOPIC, f"{package} {found}; tested: {span}")


def _lightning(version_of: Callable[[str], str | None]) -> Iterator[Finding]:
    both = [package for package in ("lightning", "pytorch-lightning") if version_of(package)]
    if len(both) == 2:
        yield note(
            TOPIC,
            "both Lightning packages are installed; a Trainer of one refuses the other's strategies and callbacks",
            "Import all from one. zerosync_strategy.pytorch_lightning has the strategy for pytorch_lightning.",
        )
    for package in both:
        if wants := _wanted_deepspeed(package):
            yield note(
                TOPIC,
                f"{package}'s own extras ([strategies], [all], ...) want deepspeed{wants}, which ZeroSync does not run"
                " with",
                f"Install {package} without extras, and DeepSpeed by itself.",
            )


def _wanted_deepspeed(package: str) -> str:
    """Return the releases of DeepSpeed that extras of ``package`` want and ZeroSync cannot use; empty if none."""
    try:
        requirements = [Requirement(text) for text in metadata.requires(package) or ()]
    except metadata.PackageNotFoundError:
        return ""
    wanted = {str(each.specifier) for each in requirements if each.name == "deepspeed"}
    tested = (TESTED["deepspeed"].oldest, TESTED["deepspeed"].newest)
    bad = {text for text in wanted if not any(Requirement(f"deepspeed{text}").specifier.contains(v) for v in tested)}
    return " or ".join(sorted(bad))
