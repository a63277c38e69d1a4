"""Region 2: scores, softmax and context of new queries against the KV cache."""

from ctypes import byref

import torch
from torch import Tensor

from labkit.system.errors import UserError

from .. import build, gpu
from ..build import INT, POINTER
from ..checks import check_rows, check_slots
from ..dispatch import choose
from ..types import AttentionParams, Heads, LayerCache, Rows, check_heads, pointer
from .reference import attention as reference

__all__ = ["attention"]

build.declare("labkit_attention", *[POINTER] * 6, INT)


def attention(
    queries: Tensor,
    params: AttentionParams,
    heads: Heads,
    rows: Rows,
    cache: LayerCache,
    *,
    threads: int = 1,
    impl: str,
) -> Tensor:
    """queries [N, Hq*D] float32 -> context [N, Hq*D]; the new keys and values are in `cache` already.

    Token t of a sequence sees the slots `first <= j <= past + t`, within the window, that are visible; those up to
    `past + T - 1` unless `params.causal`. A row that sees nothing (padding) gives zeros. Bytes: the KV cache of what is
    seen, once per tile of 4 queries.
    """
    run = choose("attention", impl, threads, reference=reference, cpp=_cpp, triton=_triton)
    check_heads(heads, impl)
    check_rows("queries", queries, heads.query * heads.dim, rows.batch * rows.tokens)
    check_slots(rows, cache)
    if params.slopes is not None and rows.key_positions is None:
        raise UserError("got slopes and no key_positions; ALiBi needs the position of each slot's token in `rows`")
    return run(queries, params, heads, rows, cache, threads)


def _cpp(queries: Tensor, params: AttentionParams, heads: Heads, rows: Rows, cache: LayerCache, threads: int) -> Tensor:
    context = torch.empty_like(queries)
    stored = torch.float32 if cache.key_scales is not None else cache.keys.dtype  # every library reads int8 slots
    build.in_use(str(stored).removeprefix("torch.")).labkit_attention(
        byref(params.c), byref(heads.c), byref(rows.c), byref(cache.c), pointer(queries), pointer(context), threads
    )
    return context


def _triton(
    queries: Tensor, params: AttentionParams, heads: Heads, rows: Rows, cache: LayerCache, threads: int
) -> Tensor:
    gpu.require()
    from .triton_impl import attention as run

    return run(queries, params, heads, rows, cache, torch.empty_like(queries), gpu.default_launcher())
