"""A happens-before checker: finds stream races in DeepSpeed, ZeroSync and your own hooks, without a GPU."""

from zerosync_strategy.tools.racecheck.checker import Access, Finding, Kind, Operation
from zerosync_strategy.tools.racecheck.device import Event, Stream
from zerosync_strategy.tools.racecheck.in_place import RaceWarning
from zerosync_strategy.tools.racecheck.schedule import Span, schedule, write_trace
from zerosync_strategy.tools.racecheck.simulation import Simulation, simulate

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
