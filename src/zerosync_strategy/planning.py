"""Plans in a program, as ``zerosync plan`` makes them: :func:`plan`, and what it takes and returns."""

from zerosync_strategy.tools.plan.jobs import Cluster, OptionSet, Workload, usual_sets
from zerosync_strategy.tools.plan.plan import Outcome, Plan, PlanError, plan

__all__ = ["Cluster", "OptionSet", "Outcome", "Plan", "PlanError", "Workload", "plan", "usual_sets"]
