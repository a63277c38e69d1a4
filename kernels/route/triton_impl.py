"""The choice of experts in Triton: the norm and the logits in one kernel; then one program for each row chooses."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..gemm.triton_impl import product_arguments, tile_arguments
from ..gpu import FEW_ROWS, Launcher, optional
from ..plain import linear, normalise
from ..residual_add.triton_impl import add_normed
from ..tiles import product, wait_for_previous
from ..tuned import Tile
from .router import Router

ONE_WARP = Tile(rows=1, depth=1, warps=1)


@triton.jit
def route_logits(
    logits_ptr, normed_ptr, M, N, eps, gain_ptr, shift_ptr, x_ptr, w_ptr, scales_ptr, bias_ptr,
    NORM: tl.constexpr, SHIFT: tl.constexpr, K: tl.constexpr, CODES: tl.constexpr, BIAS: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, AHEAD: tl.constexpr, MP: tl.constexpr, DOT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """normed [M, K] = norm(x); logits [M, N] = normed W^T + bias. The programs write normed together."""
    experts = tl.program_id(0) * BN + tl.arange(0, BN)
    inside = experts < N
    y = product(
        w_ptr, scales_ptr, experts, inside, x_ptr, x_ptr, x_ptr, gain_ptr, shift_ptr, eps, normed_ptr, M,
        K, CODES, NORM, SHIFT, False, False, "normed", BN, BK, AHEAD, MP, DOT, PDL,
    )  # fmt: skip
    if BIAS:
        y += tl.load(bias_ptr + experts, mask=inside, other=0.0)[:, None]
    m = tl.arange(0, MP)
    tl.store(logits_ptr + m[None, :] * N + experts[:, None], y, mask=inside[:, None] & (m < M)[None, :])


@triton.jit
def choose_experts(
    chosen_ptr, shares_ptr, logits_ptr, bias_ptr, factor, E, K,
    SIGMOID: tl.constexpr, BIAS: tl.constexpr, RENORMALISED: tl.constexpr, EP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Chooses K of E experts for row `program_id(0)`, in the order of their logits, or of their scores with the bias. A
    NaN counts as the smallest number, and makes all shares NaN.
    """
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, EP)
    left = expert < E
    logits = tl.load(logits_ptr + row * E + expert, mask=left, other=float("-inf"))
    if SIGMOID:
        scores = tl.sigmoid(logits)
    else:
        parts = tl.where(left, tl.exp(logits - tl.max(tl.where(logits == logits, logits, float("-inf")), axis=0)), 0.0)
        scores = parts / tl.sum(parts, axis=0)
    compared = logits
    if BIAS:
        compared = scores + tl.load(bias_ptr + expert, mask=left, other=0.0)
    spoiled = tl.max((left & (compared != compared)).to(tl.int32), axis=0)
    numbers = tl.where(compared == compared, compared, float("-inf"))
    place = expert * 0 + K
    for k in range(K):
        best = tl.max(tl.where(left, numbers, float("-inf")), axis=0)
        first = tl.min(tl.where(left & (numbers == best), expert, EP), axis=0)
        place = tl.where(expert == first, k, place)
        left = left & (expert != first)
    chosen = place < K
    shares = scores
    if RENORMALISED:
        shares /= tl.sum(tl.where(chosen, scores, 0.0), axis=0)
    shares = tl.where(spoiled == 1, float("nan"), shares * factor)
    tl.store(chosen_ptr + row * K + place, expert.to(tl.int64), mask=chosen)
    tl.store(shares_ptr + row * K + place, shares, mask=chosen)


class RoutedRows(NamedTuple):
    """The results of `route`."""

    normed: Tensor
    residual: Tensor
    chosen: Tensor
    shares: Tensor


def route(
    hidden: Tensor, addend: Tensor | None, addend_bias: Tensor | None, router: Router, launch: Launcher
) -> RoutedRows:
    """See the op's contract. Without an addend the residual is `hidden` itself."""
    residual, rows, experts = hidden, len(hidden), router.matrix.outputs
    if addend is not None:
        residual = add_normed(hidden, addend, addend_bias, router.addend_norm, torch.empty_like(hidden), launch)
    normed, logits = _logits(residual, router, launch)
    chosen = torch.empty(rows, router.chosen, dtype=torch.int64, device=hidden.device)
    shares = torch.empty(rows, router.chosen, device=hidden.device)
    launch(
        choose_experts,
        (rows,),
        ONE_WARP,
        chosen_ptr=chosen,
        shares_ptr=shares,
        logits_ptr=logits,
        bias_ptr=optional(router.choice_bias, logits),
        factor=float(router.factor),
        E=experts,
        K=router.chosen,
        SIGMOID=router.scores == "sigmoid",
        BIAS=router.choice_bias is not None,
        RENORMALISED=router.renormalised,
        EP=triton.next_power_of_2(experts),
    )
    return RoutedRows(normed, residual, chosen, shares)


def _logits(hidden: Tensor, router: Router, launch: Launcher) -> tuple[Tensor, Tensor]:
    """The normed rows [M, H], and a logit for each expert [M, E]. Products are in float32 for any number of rows:
    rounded rows would choose other experts.
    """
    rows, matrix = len(hidden), router.matrix
    if rows > FEW_ROWS:
        normed = normalise(router.norm, hidden)
        return normed, linear(normed, matrix)
    normed, logits = torch.empty_like(hidden), torch.empty(rows, matrix.outputs, device=hidden.device)
    tile = launch.tile("route", "float32", rows, matrix.outputs, matrix.inputs)
    launch(
        route_logits,
        (triton.cdiv(matrix.outputs, tile.rows),),
        tile,
        logits_ptr=logits,
        normed_ptr=normed,
        N=matrix.outputs,
        **product_arguments(hidden, router.norm, matrix, matrix.bias),
        **tile_arguments(rows, matrix, tile) | {"DOT": tl.float32},
    )
    return normed, logits
