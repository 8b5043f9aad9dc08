"""Public names that are gone. For one release, whoever uses one is told what to do instead."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

F = TypeVar("F")
SINCE = "0.3.0"
"""The first release without them. The next one, in its first or second number, empties the table."""

REMOVED: dict[object, str] = {  # options, and what the handle, reports and the package had, each with the remedy
    "Links": "Leave it out: a plan says nothing of time.",
    "RunLog": "Log report.numbers() of each step, as ZeroSyncMonitor does.",
    "WeightPatch": "Take full_weights(), which yields them in full.",
    "WeightSnapshot": "Take full_weights(), which yields them in full.",
    "changes_since": "Leave it out: full_weights() yields them in full.",
    "end_racecheck": "Leave the call out: no training is checked in place.",
    "findings": "Leave it out: no training is checked in place.",
    "full_optimizer_state": "Take save_checkpoint(), or safe_get_full_optimizer_state() for each state.",
    "gather_changes": "Leave it out: parameters are gathered in full.",
    "gathered_bytes": "Take bytes_sent, which has all of them.",
    "gathered_bytes_in_full": "Take bytes_sent, which has all of them.",
    "load_full_optimizer_state": "Take load_checkpoint(), or safe_set_full_optimizer_state() for each state.",
    "racecheck": "Leave it out. To check streams, run the program as a test in a checkout, by pytest --simulated.",
    "run_log": "Log report.numbers() of each step, as ZeroSyncMonitor does.",
    "trace_gathers": "Leave it out: hooks end a compiled graph at each module.",
}

_RUN = "Put 'zerosync run' before the command that trains."
_TIME = "Leave it out: a plan says nothing of time. Measure where you train."
_JSON = "Take --json, which has what a picture needs, and the configuration."
_LINKS = "Measure links by nccl-tests."
_SPEEDS = ("within", "between", "latency-within", "latency-between")
_PLANS = """
    at_once batch compute dtype front has_levels links measured processes resident slow_links threads time timeout work
"""
PLANNING: dict[object, str] = {  # arguments and members
    **dict.fromkeys(_PLANS.split(), _TIME),
    "bytes_sent": "Take sent.bytes.",
    "calls": "Take sent.calls.",
}
_CLOCKS = ("check", "compute", "ranks-at-once", "threads", "links", "processes", "timeout")
_HOSTS = ("link", "save", "hosts", "shell", "per-host")
COMMANDS: dict[str, str] = {  # of `zerosync`, and their options
    "enable": _RUN,
    "disable": _RUN,
    **{f"plan --{name}": _JSON for name in ("png", "yaml")},
    **{f"plan --{name}": _TIME for name in (*_SPEEDS, *_CLOCKS)},
    "doctor --dump": "See where a process hangs by py-spy dump.",
    **{f"doctor --{name}": _LINKS for name in (*_SPEEDS, *_HOSTS)},
}


def removal(what: str, name: object, removed: Mapping[object, str] = REMOVED) -> str:
    """Return what to tell about ``name``, which is not there as ``what``; empty if it was not removed."""
    return f"{what} {name!r} was removed in {SINCE}. {removed[name]}" if name in removed else ""


def refuse_removed(
    names: Iterable[object], what: str = "ZeroSync option", removed: Mapping[object, str] = REMOVED
) -> None:
    """Raise a ``ValueError`` with the remedy where one of ``names`` was removed."""
    for name in names:
        if problem := removal(what, name, removed):
            raise ValueError(problem)


def refusing_removed(what: str, removed: Mapping[object, str] = REMOVED) -> Callable[[F], F]:
    """Let a function, or the constructor of a class, refuse keywords that were removed."""

    def decorate(function: Any) -> Any:
        if isinstance(function, type):
            function.__init__ = decorate(function.__init__)  # type: ignore[misc]
            return function

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            refuse_removed(kwargs, what, removed)
            return function(*args, **kwargs)

        return call

    return decorate


def missing_attribute(what: str, removed: Mapping[object, str] = REMOVED) -> Callable[[Any, str], Any]:
    """Return the ``__getattr__`` of a class some of whose attributes, ``what``, were removed."""

    def __getattr__(self: Any, name: str) -> Any:
        problem = removal(what, name, removed)
        raise AttributeError(problem or f"{type(self).__name__!r} object has no attribute {name!r}")

    return __getattr__


def removed_command(words: Sequence[str]) -> str:
    """Return what to tell about the ``words`` after ``zerosync``; empty if none of them was removed."""
    command, *rest = words or [""]
    for name in (command, *(f"{command} {word.partition('=')[0]}" for word in rest)):
        if name in COMMANDS:
            return f"'zerosync {name}' was removed in {SINCE}. {COMMANDS[name]}"
    return ""
