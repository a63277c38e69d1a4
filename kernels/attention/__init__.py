"""Region 2: scores, softmax and context of new queries against the KV cache."""

from ctypes import byref

import torch
from torch import Tensor

from .. import build, checks, gpu
from ..build import INT, POINTER
from ..types import AttentionParams, Heads, LayerCache, Rows, pointer
from .reference import attention as reference

__all__ = ["attention"]

build.declare("labkit_attention", *[POINTER] * 6, INT, allocates=True)


@checks.checked(
    heads=checks.heads,
    rows=checks.rows,
    params=checks.attention_params,
    queries=checks.floats("rows", "queries"),
    cache=checks.cache,
)
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
    """queries [N, Hq*D] float32 -> context [N, Hq*D]; `cache` already has the new keys and values.

    Token t of a sequence sees the visible slots `first <= j <= past + t` within the window; unless `params.causal`, the
    slots up to `past + T - 1`. A row that sees no slot (padding) gives zeros. Bytes: the KV cache of the seen slots,
    once for every 16 queries of a KV head; with many new tokens at most once for each thread.

    cpp rounds queries and probabilities where the processor multiplies pairs of 16-bit numbers: to bfloat16 on a
    bfloat16 cache, and to integers of 16 bits on an int8 cache that few new tokens read.
    """
    if impl == "reference":
        return reference(queries, params, heads, rows, cache)
    context = torch.empty_like(queries)
    if impl == "cpp":
        stored = torch.float32 if cache.key_scales is not None else cache.keys.dtype  # every library reads int8 slots
        build.in_use(str(stored).removeprefix("torch.")).labkit_attention(
            byref(params.c), byref(heads.c), byref(rows.c), byref(cache.c), pointer(queries), pointer(context), threads
        )
        return context
    gpu.require()
    from .triton_impl import attention as run

    return run(queries, params, heads, rows, cache, context, gpu.default_launcher())
