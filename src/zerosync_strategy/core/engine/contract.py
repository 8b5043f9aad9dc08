"""The tables of internals of other libraries that ZeroSync uses, in one format, and their check (C1).

A row names a private attribute that is read, set or called, or a method that is overridden because the library calls
it. Without the check, a renamed override would go unnoticed: the library would run without what ZeroSync adds.
DeepSpeed's tables are in ``deepspeed_internals.py``, torch's in ``torch_internals.py``, each framework's in the
``contract.py`` of its folder.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from zerosync_strategy.core.engine.types import DeepSpeedEngine


class ContractError(RuntimeError):
    """A library lacks an internal that a ZeroSync feature needs, or has changed it.

    Attributes:
        since: the first release of DeepSpeed that has it, if the installed one is older; else empty.
    """

    def __init__(self, message: str, since: str = "") -> None:
        super().__init__(message)
        self.since = since


@dataclass(frozen=True)
class Library:
    """A library with internals in a table: its display name, and the oldest and newest tested releases."""

    name: str
    oldest: str
    newest: str


DEEPSPEED = Library("DeepSpeed", "0.18.4", "0.19.8")
LIBRARIES = {  # by imported package
    "torch": Library("torch", "2.10.0", "2.15.0"),
    "deepspeed": DEEPSPEED,
    "lightning": Library("Lightning", "2.5.0", "2.6.6"),
    "pytorch_lightning": Library("Lightning (pytorch_lightning)", "2.5.0", "2.6.6"),
    "lightning_fabric": Library("Lightning (lightning_fabric)", "2.5.0", "2.6.6"),
    "accelerate": Library("Accelerate", "1.11.0", "1.15.0"),
    "transformers": Library("transformers", "4.56.2", "5.24.0"),
}


@dataclass(frozen=True)
class Internal:
    """An attribute of a library that a feature of ZeroSync uses.

    Attributes:
        feature: the feature, for the error.
        owner: what has the attribute: the path of a module or class, or a key of ``_LIVE`` for an object of a live
            DeepSpeed engine.
        parameters: for a method that is called or overridden: the names of its first parameters, without ``self``, so
            that calls by position keep their meaning.
        named_in: the module whose source must name the attribute, if objects have it only at times or set it in their
            constructor, so that ``owner`` does not show it.
        public: the library documents the attribute, or torch has one of the same name; other files may use it too.
        optional: the attribute may be absent; code asks for it with a default.
        since: the first release that has it in the form needed; empty: the oldest supported one.
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
        top = self.owner.partition(".")[0]
        return top if top in LIBRARIES else "deepspeed"

    def applies_to(self, release: str) -> bool:
        return not (self.since and is_before(release, self.since)) and not (
            self.until and not is_before(release, self.until)
        )


def rows(
    feature: str, owner: str, names: str, *,
    named_in: str = "", optional: bool = False, since: str = "", until: str = "",
) -> tuple[Internal, ...]:  # fmt: skip
    """Return a row for each of ``names``, as in ``"attribute method(first, second) +documented"``."""
    found = []
    for plus, name, listed in re.findall(r"(\+?)(\w+)(\([^)]*\))?", names):
        parameters = tuple(re.findall(r"\w+", listed)) if listed else None
        found.append(Internal(feature, owner, name, parameters, named_in, bool(plus), optional, since, until))
    return tuple(found)


# ---- releases --------------------------------------------------------------------------------------------------------


@functools.cache
def is_before(release: str, other: str) -> bool:
    """Return whether ``release``, without its suffix (``+unknown``, ``.dev0``), is older than ``other``."""
    from packaging.version import Version

    return Version(Version(release).base_version) < Version(other)


def release_of(package: str) -> str:
    return importlib.import_module(package).__version__


@functools.cache
def has(internal: Internal) -> bool:
    """Return whether the installed release of the library has ``internal``. Some steps ask."""
    return internal.applies_to(release_of(internal.package))


def need(internal: Internal, remedy: str) -> None:
    """Raise a ``ContractError`` with the ``remedy`` if the installed DeepSpeed is older than ``internal.since``."""
    if not has(internal):
        raise ContractError(
            f"ZeroSync's {internal.feature} needs DeepSpeed {internal.since} or newer, the first with"
            f" {internal.name!r}; found {release_of('deepspeed')}. Install a newer DeepSpeed, or {remedy}.",
            internal.since,
        )


# ---- the check -------------------------------------------------------------------------------------------------------

_LIVE: dict[str, Callable[[Any], Any]] = {  # owners of a live engine
    "engine": lambda engine: engine,
    "engine config": lambda engine: engine._config,
    "zero config": lambda engine: engine._config.zero_config,
    "module": lambda engine: engine.module,
    "checkpoint engine": lambda engine: engine.checkpoint_engine,
    "parameter": lambda engine: next(engine.module.parameters(), None),
    "optimizer": lambda engine: engine.optimizer,
    "offload": lambda engine: engine.optimizer.parameter_offload,
}


def require(table: Iterable[Internal], engine: DeepSpeedEngine | None = None) -> None:
    """Check that the installed libraries have what ``table`` names, in modules and classes or on ``engine``.

    Raise ``ContractError`` if an internal is missing or has changed.
    """
    for internal in table:
        if internal.optional or not has(internal):
            continue
        owner = None
        if internal.owner in _LIVE and not internal.named_in:
            owner = _LIVE[internal.owner](engine)
            if owner is None:
                continue  # a module without parameters
        if found := problem(internal, owner):
            where = internal.owner if owner is None else type(owner).__name__
            raise changed(internal.feature, f"{where}.{internal.name} {found}", internal.package)


def problem(internal: Internal, owner: object = None) -> str:
    """Return what is wrong with ``internal`` on ``owner``, by default its module or class; empty if nothing."""
    if internal.named_in:
        return "" if internal.name in names_in(internal.named_in) else f"is not in {internal.named_in} any more"
    if owner is None:
        try:
            owner = resolve(internal.owner)
        except (ImportError, AttributeError) as error:
            return f"is missing ({error})"
    is_class = inspect.isclass(owner)
    if not hasattr(owner if is_class else type(owner), internal.name) and internal.name not in vars(owner):
        return "is missing"  # without computing properties
    if internal.parameters is None:
        return ""
    method = getattr(owner, internal.name)
    parameters = tuple(inspect.signature(method).parameters)
    if is_class and not inspect.ismethod(method) and parameters[:1] == ("self",):
        parameters = parameters[1:]
    hides_names = parameters == ("args", "kwargs")  # behind a decorator
    if hides_names or parameters[: len(internal.parameters)] == internal.parameters:
        return ""
    return f"takes {parameters}, expected {internal.parameters}"


def fetch(internal: Internal) -> Any:
    """Return what ``internal`` names in a module or class; raise ``ContractError`` if missing or changed."""
    require((internal,))
    return getattr(resolve(internal.owner), internal.name)


def resolve(path: str) -> Any:
    """Return the module or class at ``path``; raise ``ImportError`` or ``AttributeError`` if it does not exist."""
    if path in sys.modules:
        return sys.modules[path]  # a garbage collection may call this during an import
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError:
        parent, _, name = path.rpartition(".")
        if not parent:
            raise
        return getattr(resolve(parent), name)


@functools.cache
def names_in(module: str) -> frozenset[str]:
    """Return the words of the source of ``module``, without importing it."""
    source = find_spec(module)
    assert source is not None and source.origin is not None, module
    return frozenset(re.findall(r"[A-Za-z_]\w*", Path(source.origin).read_text(encoding="utf-8")))


def changed(feature: str, found: str, package: str = "deepspeed") -> ContractError:
    """Return the error for an internal of ``feature`` that has changed, with what was ``found``."""
    library = LIBRARIES[package]
    return ContractError(
        f"ZeroSync's {feature} relies on an internal of {library.name} that has changed: {found}. Found {library.name}"
        f" {release_of(package)}; tested with {library.oldest} to {library.newest}. Install a tested version, or train"
        " without ZeroSync."
    )
