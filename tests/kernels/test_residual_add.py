"""Region 4: output bias and residual."""

import pytest
import torch
from ops import Draw, assert_near

from labkit.kernels import residual_add

pytestmark = pytest.mark.usefixtures("poisoned", "isa")


@pytest.mark.parametrize("hidden", [1, 33, 60, 63, 64])
@pytest.mark.parametrize("rows", [1, 2, 5, 13, 64])
def test_cpp_equals_reference(rows: int, hidden: int) -> None:
    draw = Draw()
    residual, mlp_out, attn_out = (draw.normal(rows, hidden) for _ in range(3))
    mlp_bias, attn_bias = draw.normal(hidden), draw.normal(hidden)
    for arguments in (
        (residual, mlp_out, mlp_bias),
        (residual, mlp_out, None),
        (residual, mlp_out, mlp_bias, attn_out, attn_bias),
        (residual, mlp_out, None, attn_out, None),
    ):
        expected = residual_add(*arguments, impl="reference")
        actual = residual_add(*arguments, impl="cpp")
        assert_near(actual, expected, sum(part.abs() for part in arguments if part is not None), 4e-7)


def test_inputs_stay_as_they_are() -> None:
    draw = Draw()
    inputs = [draw.normal(3, 20), draw.normal(3, 20), draw.normal(20)]
    copies = [tensor.clone() for tensor in inputs]
    residual_add(*inputs, impl="cpp")
    assert all(torch.equal(a, b) for a, b in zip(inputs, copies, strict=True))
