"""For torchrun: a rank dies in the first life of the job, and the next resumes.

Arguments: stage, directory. Rank 0 saves the parameters at the end there.
"""

import os
import sys
from pathlib import Path

import torch

from tests.faults.jobs import fault, plain

if __name__ == "__main__":
    stage, directory = int(sys.argv[1]), Path(sys.argv[2])
    first_life = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    dies = first_life and os.environ["RANK"] == "1"
    faulty = ("reduction", fault("SIGKILL", directory / "died_at", directory)) if dies else None
    parameters = plain(stage, directory / "run", faulty)
    if os.environ["RANK"] == "0":
        torch.save(parameters, directory / "parameters.pt")
