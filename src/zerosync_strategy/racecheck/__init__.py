"""A happens-before checker: finds stream races in DeepSpeed, ZeroSync and your own hooks, without a GPU."""

from zerosync_strategy.racecheck.checker import Access, Finding, Kind, Operation
from zerosync_strategy.racecheck.device import Event, Stream
from zerosync_strategy.racecheck.in_place import RaceWarning
from zerosync_strategy.racecheck.schedule import Span, schedule
from zerosync_strategy.racecheck.simulation import Simulation, simulate
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
