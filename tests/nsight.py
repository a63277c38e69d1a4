"""The real Nsight Systems, for tests that use it where it is installed."""

import pytest

from labkit.nsys.tool import find_nsys

NSYS = find_nsys()
needs_nsys = pytest.mark.skipif(NSYS is None, reason="nsys is not installed; labkit doctor says how to")
