"""One token of linear attention: the causal convolution, and the gated delta rule."""

import pytest
import torch
from helpers.kernels.ops import DTYPES, Draw, assert_near

from labkit.kernels import conv_step, delta_step
from labkit.system.errors import UserError

pytestmark = pytest.mark.usefixtures("poisoned", "isa")


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=list(DTYPES))
@pytest.mark.parametrize(("kept", "taps"), [(4, 4), (3, 4), (1, 1), (5, 2)])
@pytest.mark.parametrize(("batch", "channels"), [(1, 1), (2, 37), (1, 40_000)])
def test_the_convolution_equals_its_reference(
    batch: int, channels: int, kept: int, taps: int, dtype: torch.dtype
) -> None:
    draw = Draw()
    x, weight, bias = (
        draw.normal(batch, channels),
        draw.normal(channels, taps).to(dtype),
        draw.normal(channels).to(dtype),
    )
    for added, silu in ((None, False), (bias, True)):
        states = [draw.normal(batch, channels, kept).to(dtype)] * 2
        (expected, state), (actual, next_state) = (
            (conv_step(x, state, weight, added, silu, threads=2, impl=impl), state)
            for impl, state in zip(("reference", "cpp"), map(torch.clone, states), strict=True)
        )
        assert_near(actual, expected, 1.0 + expected.abs().max(), 2e-6)
        assert torch.equal(next_state, state)
        assert torch.equal(next_state[..., -1], x.to(dtype))


def test_tokens_one_by_one_are_torchs_convolution() -> None:
    draw, tokens, channels, taps = Draw(), 9, 5, 4
    x, weight = draw.normal(1, channels, tokens), draw.normal(channels, taps)
    padded = torch.nn.functional.pad(x, (taps - 1, 0))
    expected = torch.nn.functional.conv1d(padded, weight[:, None], groups=channels)
    state = torch.zeros(1, channels, taps)
    outputs = [conv_step(x[..., token].contiguous(), state, weight, None, False, impl="cpp") for token in range(tokens)]
    assert_near(torch.stack(outputs, -1), expected, 1.0, 2e-6)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("key_heads", "heads"), [(1, 1), (2, 6), (16, 16)])
@pytest.mark.parametrize(("keys", "values"), [(1, 1), (7, 21), (16, 80), (64, 129)])
def test_the_delta_rule_equals_its_reference(keys: int, values: int, key_heads: int, heads: int, normed: bool) -> None:
    draw = Draw()
    q, k = (draw.normal(2, key_heads, keys, std=keys**-0.5) for _ in range(2))
    v, state = draw.normal(2, heads, values), draw.normal(2, heads, keys, values)
    gates = -draw.normal(2, heads).abs(), draw.normal(2, heads).sigmoid()
    before = state.clone()
    expected, actual = (
        delta_step(q, k, v, *gates, state, normed, threads=2, impl=impl) for impl in ("reference", "cpp")
    )
    for ours, theirs in zip(actual, expected, strict=True):
        assert_near(ours, theirs, 1.0 + theirs.abs().max(), 4e-6)
    assert torch.equal(state, before)


def test_sizes_that_do_not_fit_are_refused() -> None:
    x = torch.zeros(1, 4)
    with pytest.raises(UserError, match="got 4 taps for a state of 2 tokens, expected at most one more"):
        conv_step(x, torch.zeros(1, 4, 2), torch.zeros(4, 4), None, False, impl="cpp")
    with pytest.raises(UserError, match=r"weight: expected contiguous bfloat16 \[4, taps\], got torch.float32"):
        conv_step(x, torch.zeros(1, 4, 2, dtype=torch.bfloat16), torch.zeros(4, 2), None, False, impl="cpp")
    rows, gate = torch.zeros(1, 2, 8), torch.zeros(1, 3)
    with pytest.raises(UserError, match="k: got 2 heads for 3 heads of values, expected a divisor"):
        delta_step(rows, rows, torch.zeros(1, 3, 8), gate, gate, torch.zeros(1, 3, 8, 8), False, impl="cpp")
