"""Installed releases compared with the tested ones, and conditions of this machine that make a run hang."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

from packaging.version import Version

from zerosync_strategy.core.engine.contract import LIBRARIES
from zerosync_strategy.tools.doctor.findings import Finding, of_topic

ok, _, warning, error = of_topic("versions")
_, _, machine_warning, _ = of_topic("machine")
# The oldest and the newest release with which the tests have passed. A test compares them with the table in
# docs/compatibility.md. lightning_fabric is installed with pytorch_lightning.
TESTED = {"python": ("3.10", "3.13")} | {
    package.replace("_", "-"): (library.oldest, library.newest)
    for package, library in LIBRARIES.items()
    if package != "lightning_fabric"
}
_REQUIRED = ("python", "torch", "deepspeed")


def installed(package: str) -> str | None:
    """Return the installed release of ``package``; ``None`` if it is not installed."""
    if package == "python":
        return platform.python_version()
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def check_releases(version_of: Callable[[str], str | None] = installed) -> Iterator[Finding]:
    """Compare the release of each package, by ``version_of``, with the tested releases."""
    for package, (oldest, newest) in TESTED.items():
        found = version_of(package)
        bad = error if package in _REQUIRED else warning
        if found is None:
            if package in _REQUIRED:
                yield bad(f"{package} is not installed", f"Install {package} {newest}.")
            continue
        release, last = Version(found).release, Version(newest).release
        said = f"than the tested releases, {oldest} to {newest}"
        if release < Version(oldest).release:
            yield bad(f"{package} {found} is older {said}", f"Install {package} {newest}.")
        elif release[: len(last)] > last:
            remedy = f"Trust the self-test below, or install {package} {newest}."
            yield warning(f"{package} {found} is newer {said}", remedy)
        else:
            yield ok(f"{package} {found}; tested: {oldest} to {newest}")


def check_machine(shared_memory: Path = Path("/dev/shm"), extensions: Path | None = None) -> Iterator[Finding]:
    """Check shared memory, and the locks of compilations in the folder of torch's ``extensions``."""
    free = shutil.disk_usage(shared_memory).free if shared_memory.is_dir() else 0
    if free < 1 << 30:  # the default of containers is 64 MiB
        yield machine_warning(
            f"{shared_memory} has {free >> 20} MiB left; data loaders with workers, and NCCL within a node, fail with a"
            " bus error when it is full",
            "Give the container more (docker run --shm-size=8g, or --ipc=host), or remove what earlier runs left.",
        )
    if extensions is None:
        extensions = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or Path.home() / ".cache" / "torch_extensions")
    for lock in sorted(extensions.glob("**/lock")):
        yield machine_warning(
            f"{lock} is held: a run that compiles the same operator waits for it, for ever if the run that made it was"
            " killed",
            f"If no run is compiling now: rm {lock}",
        )
