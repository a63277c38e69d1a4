"""Region 1: norm + Q, K, V GEMM + bias, then rotary embedding and the append to the KV cache."""

from ctypes import byref

import torch
from torch import Tensor

from .. import build, checks, gpu
from ..build import INT, POINTER
from ..types import NO_ROTARY, Heads, LayerCache, QkvWeights, Rotary, Rows, pointer
from .reference import qkv_gemm as reference

__all__ = ["qkv_gemm"]

build.declare("labkit_qkv_gemm", *[POINTER] * 6, INT, POINTER, POINTER, INT, allocates=True)


@checks.checked(
    heads=checks.heads,
    rows=checks.rows,
    weights=checks.qkv_weights,
    hidden=checks.floats("rows", "width"),
    rotary=checks.maybe(checks.rotary),
    cache=checks.cache,
    residual_from_norm=checks.flag,
)
def qkv_gemm(
    hidden: Tensor,
    weights: QkvWeights,
    heads: Heads,
    rotary: Rotary | None,
    rows: Rows,
    cache: LayerCache,
    *,
    residual_from_norm: bool = False,
    threads: int = 1,
    impl: str,
) -> tuple[Tensor, Tensor]:
    """hidden [N, H] float32 -> (queries [N, Hq*D] rotated, residual [N, H]); keys and values go into `cache` at `past`.

    The residual is `hidden`, or the normed rows if the model adds these (`residual_from_norm`).
    """
    if impl == "reference":
        return reference(hidden, weights, heads, rotary, rows, cache, residual_from_norm)
    queries = torch.empty(len(hidden), heads.query * heads.dim, device=hidden.device)
    if impl == "cpp":
        residual = torch.empty_like(hidden)
        build.in_use(weights.proj.weight_type).labkit_qkv_gemm(
            byref(weights.c),
            byref(rotary.c if rotary else NO_ROTARY),
            byref(heads.c),
            byref(rows.c),
            byref(cache.c),
            pointer(hidden),
            residual_from_norm,
            pointer(queries),
            pointer(residual),
            threads,
        )
        return queries, residual
    gpu.require()
    from .triton_impl import qkv_gemm as run

    normed = torch.empty_like(hidden) if residual_from_norm else None
    run(hidden, weights, heads, rotary, rows, cache, queries, normed, gpu.default_launcher())
    return queries, hidden if normed is None else normed
