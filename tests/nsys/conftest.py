"""The installed Nsight Systems, for tests that need it."""

import pytest
from installations import nsys_here

from labkit.nsys.tool import Nsys


@pytest.fixture
def real() -> Nsys:
    """The installed nsys; the test is skipped if there is none."""
    return nsys_here()
