"""The real Nsight Systems, for tests that need it."""

import pytest
from installations import nsys_here

from labkit.nsys.tool import Nsys


@pytest.fixture
def real() -> Nsys:
    """Skips where it is not installed."""
    return nsys_here()
