"""Region 4: output bias and residual."""

import pytest
import torch
from helpers.kernels.ops import Draw, assert_near

from labkit.kernels import residual_add
from labkit.system.errors import UserError

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


@pytest.mark.parametrize("kind", ["layer", "rms"])
@pytest.mark.parametrize("rows", [1, 5])
def test_the_output_may_be_normed(rows: int, kind: str) -> None:
    draw = Draw()
    residual, mlp_out, bias, norm = draw.normal(rows, 63), draw.normal(rows, 63), draw.normal(63), draw.norm(kind, 63)
    for mlp_bias in (bias, None):
        expected, actual = (
            residual_add(residual, mlp_out, mlp_bias, mlp_norm=norm, impl=impl) for impl in ("reference", "cpp")
        )
        assert_near(actual, expected, 1.0 + expected.abs().max(), 1e-6)
    with pytest.raises(UserError, match="got attn_out and mlp_norm, expected one of them"):
        residual_add(residual, mlp_out, None, mlp_out, mlp_norm=norm, impl="cpp")


def test_inputs_stay_as_they_are() -> None:
    draw = Draw()
    inputs = [draw.normal(3, 20), draw.normal(3, 20), draw.normal(20)]
    copies = [tensor.clone() for tensor in inputs]
    residual, mlp_out, bias = inputs
    residual_add(residual, mlp_out, bias, impl="cpp")
    assert all(torch.equal(a, b) for a, b in zip(inputs, copies, strict=True))
