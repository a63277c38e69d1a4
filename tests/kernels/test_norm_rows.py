"""A norm of rows alone, and times the SiLU of a gate."""

import pytest
from helpers.kernels.ops import Draw, assert_near

from labkit.kernels import norm_rows

pytestmark = pytest.mark.usefixtures("poisoned", "isa")


@pytest.mark.parametrize("kind", ["none", "layer", "rms"])
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (1, 63), (5, 64), (13, 129), (600, 64)])
def test_cpp_equals_reference(rows: int, width: int, kind: str) -> None:
    draw = Draw()
    x, gate, norm = draw.normal(rows, width), draw.normal(rows, width), draw.norm(kind, width)
    for opened_by in (None, gate):
        expected, actual = (norm_rows(x, norm, opened_by, threads=2, impl=impl) for impl in ("reference", "cpp"))
        assert_near(actual, expected, 1.0 + expected.abs().max(), 2e-6)
