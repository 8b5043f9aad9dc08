"""What a test needs of a release, where neither ZeroSync nor an error of its own stands in for an older one."""

from importlib.metadata import version

import pytest
from packaging.version import Version


def since(release: str, why: str, package: str = "deepspeed") -> pytest.MarkDecorator:
    """Leave the test out before this release of `package`, because `why`."""
    found = Version(Version(version(package)).base_version)
    return pytest.mark.skipif(found < Version(release), reason=f"before {package} {release}, {why}")
