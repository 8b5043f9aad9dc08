"""Public names that are gone. For one release, whoever uses one is told what to do instead."""

from __future__ import annotations

from collections.abc import Sequence

SINCE = "0.3.0"
"""The first release without them. The next one, in its first or second number, empties the table."""

REMOVED: dict[object, str] = {  # options, and what the handle, reports and the package had, each with the remedy
    "Links": "Leave it out: a plan says nothing of time.",
    "RunLog": "Log report.numbers() of each step, as ZeroSyncMonitor does.",
    "WeightPatch": "Take full_weights(), which yields them in full.",
    "WeightSnapshot": "Take full_weights(), which yields them in full.",
    "end_racecheck": "Leave the call out: no training is checked in place.",
    "findings": "Leave it out: no training is checked in place.",
    "full_optimizer_state": "Take save_checkpoint(), or safe_get_full_optimizer_state() for each state.",
    "gather_changes": "Leave it out: parameters are gathered in full.",
    "gathered_bytes": "Take bytes_sent, which has all of them.",
    "gathered_bytes_in_full": "Take bytes_sent, which has all of them.",
    "load_full_optimizer_state": "Take load_checkpoint(), or safe_set_full_optimizer_state() for each state.",
    "racecheck": "Leave it out. To check streams, run the program as a test in a checkout, by pytest --simulated.",
    "trace_gathers": "Leave it out: hooks end a compiled graph at each module.",
}

_RUN = "Put 'zerosync run' before the command that trains."
_TIME = "Leave it out: a plan says nothing of time. Measure where you train."
_JSON = "Take --json, which has what a picture needs, and the configuration."
_LINKS = "Measure links by nccl-tests."
_SPEEDS = ("within", "between", "latency-within", "latency-between")
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


def removal(what: str, name: object) -> str:
    """Return what to tell about ``name``, which is not there as ``what``; empty if it was not removed."""
    return f"{what} {name!r} was removed in {SINCE}. {REMOVED[name]}" if name in REMOVED else ""


def removed_command(words: Sequence[str]) -> str:
    """Return what to tell about the ``words`` after ``zerosync``; empty if none of them was removed."""
    command, *rest = words or [""]
    for name in (command, *(f"{command} {word.partition('=')[0]}" for word in rest)):
        if name in COMMANDS:
            return f"'zerosync {name}' was removed in {SINCE}. {COMMANDS[name]}"
    return ""
