"""The environment of a row, one at a time on disk: a layer of packages over the present one, or one of its own."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from trials.matrix.rows import Row

ROOT = Path(__file__).parents[2]
PACKAGES = ("torch", "deepspeed", "lightning", "accelerate", "transformers")
_VERSIONS = f"""
import platform
from importlib.metadata import version
print(platform.python_version(), *map(version, {PACKAGES!r}))
"""


class InstallError(RuntimeError):
    """An environment could not be made; the text is that of pip, or of the interpreter."""


class Environment:
    """Where a row runs.

    Attributes:
        python: the interpreter.
        variables: the environment variables of what runs there.
    """

    def __init__(self, row: Row, folder: Path) -> None:
        self._folder = folder
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        self.variables = dict(os.environ)
        path = [str(ROOT / "src")]
        try:
            if row.is_layer:
                self.python = sys.executable
                self._add_layer(row)
                path.insert(0, str(folder))
            else:
                self.python = str(folder / "bin" / "python")
                self._make(row)
        except BaseException:
            self.remove()
            raise
        self.variables["PYTHONPATH"] = os.pathsep.join(path)
        # torch looks for ninja on PATH when DeepSpeed builds an op.
        self.variables["PATH"] = os.pathsep.join([str(Path(self.python).parent), self.variables["PATH"]])

    def versions(self) -> list[str]:
        """The versions of Python and of the packages of the table, without the suffixes of a build."""
        found = subprocess.check_output([self.python, "-c", _VERSIONS], env=self.variables, text=True).split()
        return [version.partition("+")[0] for version in found]

    def remove(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def _add_layer(self, row: Row) -> None:
        pins = [f"{package}=={version}" for package, version in row.pins.items()]
        if pins:  # DeepSpeed is built in the present environment, which has torch
            self._pip("install", "--no-build-isolation", "--no-deps", "--target", str(self._folder), *pins)

    def _make(self, row: Row) -> None:
        base = interpreter(row.python)
        _run([base, "-m", "venv", str(self._folder)])
        pins = {"torch": "", "deepspeed": "", **row.pins}
        self._pip("install", "--upgrade", "pip>=23.2", "setuptools", "wheel")
        wanted = {package: f"{package}=={version}" if version else package for package, version in pins.items()}
        # By itself, and first: DeepSpeed asks for it while it is built. A source of CPU builds is pip's to know.
        self._pip("install", wanted["torch"])
        self._pip("install", "--no-build-isolation", wanted["deepspeed"], wanted["torch"])
        self._pip("install", *wanted.values(), f"{ROOT}[lightning,accelerate,test]")

    def _pip(self, *arguments: str) -> None:
        _run([self.python, "-m", "pip", "--disable-pip-version-check", "-q", *arguments])


def _run(command: list[str]) -> None:
    done = subprocess.run(command, env={**os.environ, "DS_BUILD_OPS": "0"}, text=True, capture_output=True)
    if done.returncode:
        raise InstallError("\n".join(done.stderr.splitlines()[-4:]))


def interpreter(version: str) -> str:
    """The path of an interpreter of this version, such as 3.12; of the running one where it is empty."""
    if not version or version == f"{sys.version_info.major}.{sys.version_info.minor}":
        return sys.executable
    if found := shutil.which(f"python{version}"):
        return found
    raise InstallError(f"no python{version} is on PATH")
