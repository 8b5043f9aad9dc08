"""Environments of rows: each has the releases that its program asks for, over the tested environment.

A row's environment sees the packages of the one that runs it, torch and DeepSpeed above all, and has beside them only
what differs: minutes instead of an hour, and one torch on disk.
"""

import os
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".matrix" / "ecosystem"

# What a package asks for on this machine, without the extras.
_REQUIRED = """
import importlib.metadata, sys
from packaging.requirements import Requirement
for line in importlib.metadata.requires(sys.argv[1]) or []:
    found = Requirement(line)
    if found.marker is None or found.marker.evaluate({"extra": ""}):
        found.marker = None
        print(found)
"""
_VERSIONS = """
import importlib.metadata, sys
for name in sys.argv[1:]:
    print(importlib.metadata.version(name).partition("+")[0])
"""


_DECLARED = """
import torch as _torch
for _name in ("nms", "qnms"):
    _torch.library.define(f"torchvision::{_name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""


class InstallError(RuntimeError):
    """An environment could not be made; the text is the end of pip's, or git's."""


class Environment:
    """Where the programs of a row run; what is there already and was made for the same packages is used again.

    Args:
        name: of the row.
        packages: requirements for pip. The first is the row's own, of which ``without`` are not installed.
        without: names of what it asks for and runs without on a CPU.
        repository: the address and tag of what is cloned into its folder ``repository``.

    Attributes:
        python: the interpreter.
        variables: the environment variables of what runs there.

    Raises:
        InstallError: a package could not be installed, or the repository not cloned.
    """

    def __init__(
        self, name: str, packages: Sequence[str], without: Sequence[str] = (), repository: tuple[str, str] | None = None
    ) -> None:
        self.folder = FOLDER / name
        self.python = str(self.folder / "bin" / "python")
        self.variables = {
            **os.environ,
            "PATH": os.pathsep.join([str(self.folder / "bin"), os.environ["PATH"]]),
            "PYTHONPATH": str(ROOT / "src"),
            "DS_BUILD_OPS": "0",
        }
        made_for = "\n".join([*packages, "without:", *without, *(repository or ()), sys.executable])
        stamp = self.folder / "made-for.txt"
        if not stamp.exists() or stamp.read_text() != made_for:
            self._make(list(packages), without)
            if repository is not None:
                address, tag = repository
                target = str(self.folder / "repository")
                _run(["git", "clone", "-q", "--depth", "1", "--branch", tag, address, target], os.environ)
            stamp.write_text(made_for)

    def versions(self, names: Sequence[str]) -> list[str]:
        """The versions of installed packages, without the suffixes of a build."""
        return self._ask(_VERSIONS, *names)

    def _make(self, packages: list[str], without: Sequence[str]) -> None:
        _run([sys.executable, "-m", "venv", "--clear", "--without-pip", str(self.folder)], os.environ)
        variables = {"base": str(self.folder), "platbase": str(self.folder)}
        below = Path(sysconfig.get_path("purelib", "venv", variables)) / "below.pth"
        below.write_text(sysconfig.get_path("purelib") + "\n")
        constraints = self.folder / "constraints.txt"
        constraints.write_text(f"torch=={self.versions(['torch'])[0]}\n")
        for package in [found for found in packages if found.startswith("deepspeed==")]:
            self._pip("--no-build-isolation", "--no-deps", package)
            packages.remove(package)
        if packages and without:
            own = packages.pop(0)
            self._pip("--no-deps", own)
            required = self._ask(_REQUIRED, own.partition("==")[0])
            packages += [found for found in required if not found.lower().startswith(tuple(without))]
        if packages:
            self._pip("--constraint", str(constraints), *packages)
        self._add_commands()
        self._without_cuda()

    def _without_cuda(self) -> None:
        """Let torchvision and torchaudio that were built for CUDA be imported over a torch for the CPU."""
        for package in self.folder.glob("lib/*/site-packages/torch[va]*/__init__.py"):
            name = package.parent.name
            if subprocess.run([self.python, "-c", f"import {name}"], capture_output=True).returncode:
                for library in package.parent.glob("**/*.so"):
                    library.unlink()
                if name == "torchvision":
                    package.write_text(_DECLARED + package.read_text())

    def _add_commands(self) -> None:
        """Commands such as torchrun name the interpreter that installed them: here they name that of the row."""
        for script in Path(sys.executable).parent.iterdir():
            here = self.folder / "bin" / script.name
            found = script.read_bytes() if script.is_file() else b""
            if found.startswith(f"#!{sys.executable}\n".encode()) and not here.exists():
                here.write_bytes(found.replace(sys.executable.encode(), self.python.encode(), 1))
                here.chmod(0o755)

    def _ask(self, program: str, *arguments: str) -> list[str]:
        return _run([self.python, "-c", program, *arguments], os.environ).splitlines()

    def _pip(self, *arguments: str) -> None:
        _run([self.python, "-m", "pip", "--disable-pip-version-check", "install", "-q", *arguments], self.variables)


def _run(command: list[str], variables: Mapping[str, str]) -> str:
    done = subprocess.run(command, env=variables, text=True, capture_output=True)
    if done.returncode:
        raise InstallError("\n".join(done.stderr.splitlines()[-4:]))
    return done.stdout
