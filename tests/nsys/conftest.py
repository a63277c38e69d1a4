"""The installed Nsight Systems, for tests that need it."""

import pytest
from helpers.nsys.installations import nsys_here

from labkit.nsys.tool import Nsys


@pytest.fixture
def real() -> Nsys:
    """The installed nsys. Without nsys the test is skipped."""
    return nsys_here()
