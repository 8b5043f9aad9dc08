"""Plans in a program, as ``zerosync plan`` makes them: :func:`plan`, and what it takes and returns."""

from typing import TYPE_CHECKING

from zerosync_strategy.core.options.removed import removal
from zerosync_strategy.tools.plan.jobs import Cluster, OptionSet, Workload, usual_sets
from zerosync_strategy.tools.plan.plan import Outcome, Plan, PlanError, plan

__all__ = ["Cluster", "OptionSet", "Outcome", "Plan", "PlanError", "Workload", "plan", "usual_sets"]

if not TYPE_CHECKING:  # a type checker would take any name

    def __getattr__(name):
        if problem := removal(f"{__name__} attribute", name):
            raise ImportError(problem)  # `from ... import` replaces the text of an AttributeError
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
