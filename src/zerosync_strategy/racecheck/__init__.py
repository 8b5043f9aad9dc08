"""A checker of streams: what DeepSpeed, ZeroSync and your own hooks leave unordered, found without a GPU."""

from zerosync_strategy.racecheck.checker import Access, Finding, Kind, Operation
from zerosync_strategy.racecheck.in_place import RaceWarning
from zerosync_strategy.racecheck.schedule import Span, schedule
from zerosync_strategy.racecheck.simulation import Event, Simulation, Stream, simulate
from zerosync_strategy.racecheck.trace import write_trace

__all__ = [
    "Access",
    "Event",
    "Finding",
    "Kind",
    "Operation",
    "RaceWarning",
    "Simulation",
    "Span",
    "Stream",
    "schedule",
    "simulate",
    "write_trace",
]
