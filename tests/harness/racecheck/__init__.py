"""A happens-before checker of streams, and what it is told by: a simulated device, or CUDA's own streams."""

from tests.harness.racecheck.checker import Finding, Kind
from tests.harness.racecheck.device import Stream
from tests.harness.racecheck.simulation import Simulation, simulate

__all__ = ["Finding", "Kind", "Simulation", "Stream", "simulate"]
