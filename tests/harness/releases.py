"""What a test needs of DeepSpeed's release, where neither ZeroSync nor an error stands in for an older one."""

import deepspeed
import pytest
from packaging.version import Version


def since(release: str, why: str) -> pytest.MarkDecorator:
    """Leave the test out before DeepSpeed `release`, because `why`."""
    found = Version(Version(deepspeed.__version__).base_version)
    return pytest.mark.skipif(found < Version(release), reason=f"before DeepSpeed {release}, {why}")
