"""The tables of what ZeroSync uses of other libraries beyond their interfaces, one kind for all, and their check (C1).

A row names a private attribute that is read, set or called, or a method that is overridden because the library calls
it. Without the check, a renamed one would not be missed: the library would go on without what ZeroSync does there.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import re
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any


class ContractError(RuntimeError):
    """A library lacks an internal that a ZeroSync feature needs, or has changed it."""


@dataclass(frozen=True)
class Library:
    """A library with internals in a table: its name for people, and the oldest and newest releases that were tested."""

    name: str
    oldest: str
    newest: str


DEEPSPEED = Library("DeepSpeed", "0.18.4", "0.19.8")
LIBRARIES = {  # by the package that is imported
    "deepspeed": DEEPSPEED,
    "torch": Library("torch", "2.10.0", "2.15.0"),
    "lightning": Library("Lightning", "2.5.0", "2.6.6"),
    "pytorch_lightning": Library("Lightning (pytorch_lightning)", "2.5.0", "2.6.6"),
    "lightning_fabric": Library("Lightning (lightning_fabric)", "2.5.0", "2.6.6"),
    "accelerate": Library("Accelerate", "1.11.0", "1.15.0"),
    "transformers": Library("transformers", "4.56.2", "5.23.0"),
}


@dataclass(frozen=True)
class Internal:
    """An attribute of a library that a feature of ZeroSync uses.

    Attributes:
        feature: the feature, for the error.
        owner: what has the attribute: the path of a module or class, or a key of ``contract.py`` for what belongs to a
            live engine of DeepSpeed.
        name: of the attribute.
        parameters: of a method that is called or overridden: the names that must lead its own parameters, without
            ``self``, so that a call by position keeps its meaning.
        named_in: the module whose source must name an attribute that objects have only at times or from their
            constructors on, and that a look at ``owner`` would not find.
        public: the library documents the attribute, or torch has one of the same name; other files may use it too.
        optional: the attribute may be absent; code asks for it with a default.
        since: the first release that has it, or has it as it is needed; empty: the oldest that is supported.
        until: the first release that no longer has it; empty: none.
    """

    feature: str
    owner: str
    name: str
    parameters: tuple[str, ...] | None = None
    named_in: str = ""
    public: bool = False
    optional: bool = False
    since: str = ""
    until: str = ""

    @property
    def package(self) -> str:
        """The package of its library."""
        top = self.owner.partition(".")[0]
        return top if top in LIBRARIES else "deepspeed"

    def applies_to(self, release: str) -> bool:
        """Whether ``release`` of the library is one that should have it."""
        return not (self.since and is_before(release, self.since)) and not (
            self.until and not is_before(release, self.until)
        )


@functools.cache
def is_before(release: str, other: str) -> bool:
    """Return whether ``release`` is older than ``other``; its own suffixes (``+unknown``, ``.dev0``) do not count."""
    from packaging.version import Version

    return Version(Version(release).base_version) < Version(other)


def release_of(package: str) -> str:
    """Return the installed release of a library."""
    found: str = importlib.import_module(package).__version__
    return found


def verify(table: Iterable[Internal]) -> None:
    """Check that the installed libraries have what ``table`` names, all of it in their modules and classes.

    Raises:
        ContractError: one is missing or has changed.
    """
    for internal in table:
        check(internal, internal.owner)


def check(internal: Internal, owner: Any) -> None:
    """Check that ``owner``, an object or the path of one, has ``internal``.

    Raises:
        ContractError: it is missing or has changed.
    """
    if internal.optional or not internal.applies_to(release_of(internal.package)):
        return
    where = internal.owner if isinstance(owner, str) else type(owner).__name__
    if internal.named_in:
        found = "" if internal.name in names_in(internal.named_in) else f"is not in {internal.named_in} any more"
    else:
        try:
            target = resolve(owner) if isinstance(owner, str) else owner
            found = problem(target, internal) or ""
        except (ImportError, AttributeError) as error:
            found = f"is missing ({error})"
    if found:
        raise changed(internal.feature, f"{where}.{internal.name} {found}", internal.package)


def fetch(internal: Internal) -> Any:
    """Return what ``internal`` names in a module or class.

    Raises:
        ContractError: it is missing or has changed.
    """
    check(internal, internal.owner)
    return getattr(resolve(internal.owner), internal.name)


def resolve(path: str) -> Any:
    """Return the module or class at ``path``.

    Raises:
        ImportError, AttributeError: there is none.
    """
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError:
        parent, _, name = path.rpartition(".")
        if not parent:
            raise
        return getattr(resolve(parent), name)


@functools.cache
def names_in(module: str) -> frozenset[str]:
    """Return the words of the source of ``module``, which is not imported for that."""
    source = find_spec(module)
    assert source is not None and source.origin is not None, module
    return frozenset(re.findall(r"[A-Za-z_]\w*", Path(source.origin).read_text(encoding="utf-8")))


def problem(owner: Any, internal: Internal) -> str | None:
    """Return what is wrong with ``internal`` on ``owner``, an object, class or module; ``None`` if nothing."""
    is_class = inspect.isclass(owner)
    if not hasattr(owner if is_class else type(owner), internal.name) and internal.name not in vars(owner):
        return "is missing"  # computes no property
    if internal.parameters is None:
        return None
    method = getattr(owner, internal.name)
    parameters = tuple(inspect.signature(method).parameters)
    if is_class and not inspect.ismethod(method) and parameters[:1] == ("self",):
        parameters = parameters[1:]
    if parameters == ("args", "kwargs"):  # behind a decorator that hides the names
        return None
    if parameters[: len(internal.parameters)] != internal.parameters:
        return f"takes {parameters}, expected {internal.parameters}"
    return None


def changed(feature: str, found: str, package: str) -> ContractError:
    """Return the error that says what ``feature`` found instead of the internal that it uses."""
    library = LIBRARIES[package]
    return ContractError(
        f"ZeroSync's {feature} relies on an internal of {library.name} that has changed: {found}. Found {library.name}"
        f" {release_of(package)}; tested with {library.oldest} to {library.newest}. Install a tested version, or train"
        " without ZeroSync."
    )
