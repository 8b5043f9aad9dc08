"""Plans in a program, as ``zerosync plan`` makes them: :func:`plan`, and what it takes and returns."""

import sys

from zerosync_strategy.core.runlog import RunLog
from zerosync_strategy.tools.links import Links
from zerosync_strategy.tools.plan.jobs import Cluster, OptionSet, Workload, usual_sets
from zerosync_strategy.tools.plan.plan import Outcome, Plan, PlanError, plan

__all__ = ["Cluster", "Links", "OptionSet", "Outcome", "Plan", "PlanError", "RunLog", "Workload", "plan", "usual_sets"]

# Former modules of this name, so that `from zerosync_strategy.planning.jobs import Workload` still works.
sys.modules |= dict.fromkeys((f"{__name__}.{name}" for name in ("jobs", "plan", "runlog")), sys.modules[__name__])
