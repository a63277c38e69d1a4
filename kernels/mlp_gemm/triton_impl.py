"""Region 3 in Triton: addend, norm, product and activation in one kernel; beyond 16 rows, around torch's GEMM."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..gemm.triton_impl import matmul, product_arguments, tile_arguments, tile_type
from ..gpu import FEW_ROWS, Launcher, optional
from ..plain import normalise
from ..residual_add.triton_impl import add_normed, add_rows
from ..tiles import product, wait_for_previous
from ..tuned import Tile
from ..types import MlpWeights

TILE = Tile(rows=1, depth=1024)


@triton.jit
def activated(x, ACTIVATION: tl.constexpr):
    """activation(x).

    The tanh form of GELU, 0.5 x (1 + tanh(y)), is written as x * sigmoid(2 y), because Triton's interpreter has no
    tanh; 2 y = sqrt(8 / pi) (x + 0.044715 x^3).
    """
    if ACTIVATION == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        return x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    elif ACTIVATION == "silu":
        return x * tl.sigmoid(x)
    elif ACTIVATION == "relu_squared":
        return tl.where(x < 0.0, 0.0, x * x)
    else:
        return tl.where(x < 0.0, 0.0, x)  # NaN stays NaN


@triton.jit
def gated_product(gate, up, ACTIVATION: tl.constexpr):
    """activation(gate) * up, or the clamped product of GPT-OSS. NaN stays NaN."""
    if ACTIVATION == "clamped_swiglu":
        gate = tl.where(gate > 7.0, 7.0, gate)
        up = tl.where(up > 7.0, 7.0, tl.where(up < -7.0, -7.0, up))
        return gate * tl.sigmoid(1.702 * gate) * (up + 1.0)
    else:
        return activated(gate, ACTIVATION) * up


@triton.jit
def up_rows(tile, N, GATED: tl.constexpr, BN: tl.constexpr):
    """The outputs of a tile, the rows [BN] of the first matrix that make them, and whether these are inside of it.

    In a gated MLP these are BN / 2 rows of the gate and the same rows of up, so that both factors of an output are in
    the program's registers.
    """
    if GATED:
        n = tile * (BN // 2) + tl.arange(0, BN // 2)
        rows = tl.reshape(tl.join(n, n + N), (BN,))
        inside = tl.reshape(tl.join(n < N, n < N), (BN,))
    else:
        n = tile * BN + tl.arange(0, BN)
        rows = n
        inside = n < N
    return n, rows, inside


@triton.jit
def act_of(
    y, bias_ptr, rows, inside,
    BIAS: tl.constexpr, ACTIVATION: tl.constexpr, GATED: tl.constexpr, BN: tl.constexpr, MP: tl.constexpr,
):  # fmt: skip
    """The activations of a tile from its products y [BN, MP] of `up_rows`."""
    if BIAS:
        y += tl.load(bias_ptr + rows, mask=inside, other=0.0)[:, None]
    if GATED:
        gate, up = tl.split(tl.permute(tl.reshape(y, (BN // 2, 2, MP)), (0, 2, 1)))
        act = gated_product(gate, up, ACTIVATION)
    else:
        act = activated(y, ACTIVATION)
    return act


@triton.jit
def mlp_gemm_kernel(
    begin, act_ptr, residual_ptr, M, N, eps,
    x_ptr, addend_ptr, addend_bias_ptr, gain_ptr, shift_ptr, w_ptr, scales_ptr, bias_ptr,
    NORM: tl.constexpr, SHIFT: tl.constexpr, ADD: tl.constexpr, ADD_BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
    K: tl.constexpr, CODES: tl.constexpr, BIAS: tl.constexpr, ACTIVATION: tl.constexpr, GATED: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, AHEAD: tl.constexpr, MP: tl.constexpr, DOT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """act [M, N]. From program `begin` on, each program multiplies the BN rows of `up_rows`."""
    m = tl.arange(0, MP)
    n, rows, inside = up_rows(tl.program_id(0) - begin, N, GATED, BN)
    y = product(
        w_ptr, scales_ptr, rows, inside, x_ptr, addend_ptr, addend_bias_ptr, gain_ptr, shift_ptr, eps, residual_ptr, M,
        K, CODES, NORM, SHIFT, ADD, ADD_BIAS, RESIDUAL, BN, BK, AHEAD, MP, DOT, PDL,
    )  # fmt: skip
    act = act_of(y, bias_ptr, rows, inside, BIAS, ACTIVATION, GATED, BN, MP)
    tl.store(act_ptr + m[None, :] * N + n[:, None], act, mask=(n < N)[:, None] & (m < M)[None, :])


@triton.jit
def _activate(
    act_ptr, wide_ptr, bias_ptr, N,
    BIAS: tl.constexpr, ACTIVATION: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """act [M, N] from the product [M, N], or [M, 2 N] with gate before up."""
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < N
    wide_ptr += row * (2 * N if GATED else N)
    first = tl.load(wide_ptr + column, mask=inside).to(tl.float32)
    if BIAS:
        first += tl.load(bias_ptr + column, mask=inside)
    if GATED:
        up = tl.load(wide_ptr + N + column, mask=inside).to(tl.float32)
        if BIAS:
            up += tl.load(bias_ptr + N + column, mask=inside)
        act = gated_product(first, up, ACTIVATION)
    else:
        act = activated(first, ACTIVATION)
    tl.store(act_ptr + row * N + column, act, mask=inside)


def mlp_gemm(
    hidden: Tensor,
    addend: Tensor | None,
    addend_bias: Tensor | None,
    weights: MlpWeights,
    act: Tensor,
    residual: Tensor | None,
    launch: Launcher,
    *,
    residual_from_norm: bool = False,
) -> None:
    """Writes act [M, N] of any floating type and, if given, residual [M, H] float32; see the op's contract."""
    if addend is not None and weights.addend_norm.kind != "none":
        total = torch.empty_like(hidden) if residual is None or residual_from_norm else residual
        hidden = add_normed(hidden, addend, addend_bias, weights.addend_norm, total, launch)
        addend, addend_bias = None, None
        residual = residual if residual_from_norm else None
    if len(hidden) > FEW_ROWS:
        if addend is not None:
            hidden = add_rows([hidden, addend], [addend_bias], torch.empty_like(hidden), launch)
        return _many_rows(hidden, weights, act, residual, launch, residual_from_norm)
    tile = launch.tile("mlp_gemm", tile_type(weights.up), len(hidden), weights.up.outputs, weights.up.inputs)
    launch(
        mlp_gemm_kernel,
        (mlp_tiles(weights, tile),),
        tile,
        begin=0,
        N=act.shape[1],
        act_ptr=act,
        **mlp_arguments(hidden, addend, addend_bias, weights, residual, residual_from_norm),
        **tile_arguments(len(hidden), weights.up, tile),
    )


def mlp_tiles(weights: MlpWeights, tile: Tile) -> int:
    """Number of programs of region 3 with tiles of this size."""
    return triton.cdiv(weights.up.outputs, tile.rows)


def mlp_arguments(
    hidden: Tensor,
    addend: Tensor | None,
    addend_bias: Tensor | None,
    weights: MlpWeights,
    residual: Tensor | None,
    residual_from_norm: bool,
) -> dict[str, object]:
    """The kernel's arguments that don't depend on the tile."""
    return product_arguments(hidden, weights.norm, weights.up, weights.up.bias) | {
        "addend_ptr": optional(addend, hidden),
        "addend_bias_ptr": optional(addend_bias, hidden),
        "residual_ptr": optional(residual, hidden),
        "ADD": addend is not None,
        "ADD_BIAS": addend_bias is not None,
        "RESIDUAL": "none" if residual is None else "normed" if residual_from_norm else "sum",
        "ACTIVATION": weights.activation,
        "GATED": weights.gated,
    }


def _many_rows(
    hidden: Tensor,
    weights: MlpWeights,
    act: Tensor,
    residual: Tensor | None,
    launch: Launcher,
    residual_from_norm: bool,
) -> None:
    normed = normalise(weights.norm, hidden)
    if residual is not None:
        residual.copy_(normed if residual_from_norm else hidden)
    wide = matmul(normed, weights.up)
    outputs, bias = act.shape[1], weights.up.bias
    launch(
        _activate,
        (len(hidden), triton.cdiv(outputs, TILE.depth)),
        TILE,
        act_ptr=act,
        wide_ptr=wide,
        bias_ptr=optional(bias, act),
        N=outputs,
        BIAS=bias is not None,
        ACTIVATION=weights.activation,
        GATED=weights.gated,
        BLOCK=TILE.depth,
    )
