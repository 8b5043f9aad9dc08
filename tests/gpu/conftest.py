import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # Counts devices without initialising CUDA, so that ranks can still be forked.
    if not torch.cuda.device_count():
        for item in items:
            if "tests/gpu" in str(item.fspath):
                item.add_marker(pytest.mark.skip(reason="needs CUDA; set ZEROSYNC_TEST_CUDA=1 where there is a GPU"))
