"""What is installed against what was tested together, and what on this machine lets a run hang at its start."""

from __future__ import annotations

import os
import platform
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

from zerosync_strategy.core.engine.contract import LIBRARIES
from zerosync_strategy.tools.doctor.findings import Finding, Topic

VERSIONS, MACHINE = Topic("versions"), Topic("machine")
LEAST_SHARED_MEMORY = 1 << 30
"""Bytes of /dev/shm below which data loaders and NCCL run out of it; containers have 64 MiB unless told otherwise."""


@dataclass(frozen=True)
class Tested:
    """The oldest and the newest release of a package with which the tests have passed, and all between them.

    Attributes:
        required: the package must be there.
    """

    oldest: str
    newest: str
    required: bool = False


# The columns of the table in docs/compatibility.md; a test compares them.
TESTED = {"python": Tested("3.10", "3.13", required=True)} | {
    package.replace("_", "-"): Tested(library.oldest, library.newest, required=package in ("torch", "deepspeed"))
    for package, library in LIBRARIES.items()
    if package != "lightning_fabric"  # it comes with pytorch_lightning
}


def installed(package: str) -> str | None:
    """Return the release of ``package`` in this environment, ``None`` where it is not installed."""
    if package == "python":
        return platform.python_version()
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def check_releases(version_of: Callable[[str], str | None] = installed) -> list[Finding]:
    """Compare what ``version_of`` says of each package with the tested releases, and look for two of one library."""
    return [
        *(finding for package in TESTED for finding in _release(package, version_of(package))), *_lightning(version_of),
    ]  # fmt: skip


def _release(package: str, found: str | None) -> Iterator[Finding]:
    tested = TESTED[package]
    span = f"{tested.oldest} to {tested.newest}"
    if found is None:
        if tested.required:
            yield VERSIONS.error(f"{package} is not installed", f"Install {package} {tested.newest}.")
        return
    release, newest = Version(Version(found).base_version), Version(tested.newest).release
    if release < Version(tested.oldest):
        old = f"{package} {found} is older than the tested releases, {span}"
        yield (VERSIONS.error if tested.required else VERSIONS.warning)(old, f"Install {package} {tested.newest}.")
    elif release.release[: len(newest)] > newest:
        yield VERSIONS.warning(
            f"{package} {found} is newer than the tested releases, {span}",
            f"Trust the contract and the self-test below, or install {package} {tested.newest}.",
        )
    else:
        yield VERSIONS.ok(f"{package} {found}; tested: {span}")


def _lightning(version_of: Callable[[str], str | None]) -> Iterator[Finding]:
    both = [package for package in ("lightning", "pytorch-lightning") if version_of(package)]
    if len(both) == 2:
        yield VERSIONS.note(
            "both Lightning packages are installed; a Trainer of one refuses the other's strategies and callbacks",
            "Import all from one. zerosync_strategy.pytorch_lightning has the strategy for pytorch_lightning.",
        )
    for package in both:
        if wants := _wanted_deepspeed(package):
            yield VERSIONS.note(
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
    wanted = {str(each.specifier): each.specifier for each in requirements if each.name == "deepspeed"}
    tested = (TESTED["deepspeed"].oldest, TESTED["deepspeed"].newest)
    return " or ".join(sorted(text for text, span in wanted.items() if not any(map(span.contains, tested))))


def check_machine(shared_memory: Path = Path("/dev/shm"), extensions: Path | None = None) -> list[Finding]:
    """Look at shared memory, at locks of compilations that have ended, and at what compiles DeepSpeed's operators.

    Args:
        shared_memory: where it is mounted.
        extensions: where torch compiles; by default ``TORCH_EXTENSIONS_DIR`` or torch's own default.
    """
    if extensions is None:
        extensions = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or Path.home() / ".cache" / "torch_extensions")
    found = [*_shared_memory(shared_memory), *_locks(extensions), *_compiler()]
    return MACHINE.or_ok(found, "shared memory, ninja and a C++ compiler are there, and no compilation holds a lock")


def _shared_memory(path: Path) -> Iterator[Finding]:
    if not path.is_dir():
        yield MACHINE.warning(f"{path} is not there", f"Mount a tmpfs at {path}; data loaders with workers need it.")
        return
    usage = shutil.disk_usage(path)
    if usage.free < LEAST_SHARED_MEMORY:
        yield MACHINE.warning(
            f"{path} has {usage.free >> 20} MiB left of {usage.total >> 20}; data loaders with workers, and NCCL within"
            " a node, fail with a bus error when it is full",
            "Give the container more (docker run --shm-size=8g, or --ipc=host), or remove what earlier runs left.",
        )


def _locks(extensions: Path) -> Iterator[Finding]:
    for lock in sorted(extensions.glob("**/lock")):
        minutes = (time.time() - lock.stat().st_mtime) / 60
        yield MACHINE.warning(
            f"{lock} has been held for {minutes:.0f} min: a run that compiles the same operator waits for it, and for"
            " ever if the run that made it was killed",
            f"If no run is compiling now: rm {lock}",
        )


def _compiler() -> Iterator[Finding]:
    compiler = os.environ.get("CXX", "c++")
    for tool, install in (("ninja", "pip install ninja"), (compiler, "install g++, or set CXX")):
        if shutil.which(tool) is None:
            yield MACHINE.note(
                f"{tool} is not on PATH; DeepSpeed's own operators (FusedAdam, CPUAdam, NVMe) cannot be compiled."
                " Torch's optimizers need none of them",
                f"To use them: {install}. In a virtual environment, activate it, so that its bin is on PATH.",
            )
