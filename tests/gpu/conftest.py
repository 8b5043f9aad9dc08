import os
from pathlib import Path

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests run where there is a GPU and it was asked for, those without the mark `gpu` on the simulated device too."""
    import torch  # not before tests/harness/warm.py, for threads

    # Without the variable, the ranks have DeepSpeed on the CPU, where there is a GPU too.
    if os.environ.get("ZEROSYNC_TEST_CUDA") != "1":
        reason = "not asked for: set ZEROSYNC_TEST_CUDA=1 where there is a GPU"
    elif not torch.cuda.device_count():  # which leaves CUDA uninitialised, so that ranks can still be forked
        reason = "no GPU was found"
    else:
        return
    simulated = config.getoption("--simulated")
    for item in items:
        if Path(__file__).parent in item.path.parents and not (simulated and item.get_closest_marker("gpu") is None):
            item.add_marker(pytest.mark.skip(reason=reason))
