"""Public names that are gone. For one release, whoever uses one is told what to do instead."""

from __future__ import annotations

SINCE = "0.3.0"
"""The first release without them. The next one, in its first or second number, empties the table."""

REMOVED: dict[object, str] = {  # options, what the handle had, and what the package had, each with the remedy
    "RunLog": "Log report.numbers() of each step, as ZeroSyncMonitor does.",
    "WeightPatch": "Take full_weights(), which yields them in full.",
    "WeightSnapshot": "Take full_weights(), which yields them in full.",
    "end_racecheck": "Leave the call out: no training is checked in place.",
    "findings": "Leave it out: no training is checked in place.",
    "full_optimizer_state": "Take save_checkpoint(), or safe_get_full_optimizer_state() for each state.",
    "gather_changes": "Leave it out: parameters are gathered in full.",
    "load_full_optimizer_state": "Take load_checkpoint(), or safe_set_full_optimizer_state() for each state.",
    "racecheck": "Leave it out. To check streams, run the program as a test in a checkout, by pytest --simulated.",
    "trace_gathers": "Leave it out: hooks end a compiled graph at each module.",
}


def removal(what: str, name: object) -> str:
    """Return what to tell about ``name``, which is not there as ``what``; empty if it was not removed."""
    return f"{what} {name!r} was removed in {SINCE}. {REMOVED[name]}" if name in REMOVED else ""
