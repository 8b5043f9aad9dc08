"""Every fault in every framework and stage, as the table of docs/results.md. Takes half an hour; some need root.

python -m tests.faults 2 4
"""

import re
import sys

import deepspeed.compile.backend  # noqa: F401  (each rank would import it)

from tests.faults.jobs import JOBS
from tests.faults.trials import DAMAGES, FAULTS, Trial, try_damaged, try_fault

VICTIM = 1


def main(world_sizes: list[int]) -> None:
    print("| | fault | on the rank itself | on the others, about that rank | seconds | resumes |")
    print("|---|---|---|---|---:|---|")
    for framework in JOBS:
        for kind, place in FAULTS:
            trials = [try_fault(framework, stage, kind, place, w, VICTIM) for stage in (1, 2, 3) for w in world_sizes]
            print(row(framework, f"{kind}, {place}", trials), flush=True)
        for damage in DAMAGES:
            trials = [try_damaged(framework, stage, damage) for stage in (1, 2, 3)]
            print(row(framework, f"{damage} checkpoint at resume", trials), flush=True)


def row(framework: str, what: str, trials: list[Trial]) -> str:
    """Over all stages and numbers of ranks."""
    own, others = set(), set()
    for trial in trials:
        for outcome in trial.outcomes:
            if outcome.rank == VICTIM:
                own.add(outcome.error or "goes on")
            else:
                others.add(outcome.error or "goes on")
                others |= {said_of(outcome.message)} - {""}
    seconds = [trial.seconds for trial in trials]
    resumes = f"{sum(trial.resumes for trial in trials)} of {len(trials)}"
    took = f"{min(seconds):.1f} to {max(seconds):.1f}"
    return f"| {framework} | {what} | {'; '.join(sorted(own))} | {'; '.join(sorted(others))} | {took} | {resumes} |"


def said_of(message: str) -> str:
    """What an error says of the victim, without numbers that differ from run to run."""
    found = re.search(rf"rank {VICTIM}: ([^\n]*)", message)
    return re.sub(r" for \d+ s|, at \S+ \w+|, \d optimizer step.*| \(pid \d+\)", "", found[1]) if found else ""


if __name__ == "__main__":
    main([int(argument) for argument in sys.argv[1:]] or [2])
