"""A rank of the doctor's tests on the simulated device, whose communicator has NCCL's rules; patient for less long."""

import sys
from datetime import timedelta

from tests.harness.simulated import on_simulated_device
from zerosync_strategy.tools.doctor import on_rank

if __name__ == "__main__":
    on_rank.TIMEOUT = timedelta(seconds=12)
    on_simulated_device(lambda: on_rank.main(sys.argv[1], sys.argv[2:]))
