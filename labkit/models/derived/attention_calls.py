"""The calls of a model's attention function: rotated queries and keys, values, and its settings."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "labkit-observed"
PLAIN = {  # arguments that change nothing if they have these values
    "dropout": (0.0, None),
    "is_causal": (True, None),
    "position_bias": (None,),
    "s_aux": (None,),
    "head_mask": (None,),
}


@dataclass(frozen=True)
class AttentionCall:
    """A call for one layer.

    query [B, heads, T, D], key and value [B, KV heads, T, D]; output [B, T, heads, D].
    special: names of arguments that change the result in a way that no row describes.
    alibi: the scores have ALiBi's slopes.
    """

    module: nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor
    scale: float
    window: int | None
    cap: float | None
    special: tuple[str, ...]
    alibi: bool = False


@contextmanager
def observed_attention(config: Any) -> Iterator[list[AttentionCall]]:
    """Context in which the attention of models with this config is torch's, and its calls are listed. Models that
    write their attention out do not call it.
    """
    calls: list[AttentionCall] = []

    def forward(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **settings: Any
    ) -> tuple[Tensor, None]:
        attend = sdpa_attention_forward if settings.get("softcap") is None else _capped
        output, _ = attend(module, query, key, value, attention_mask, **settings)
        scale = settings.get("scaling")
        special = [name for name, plain in PLAIN.items() if settings.get(name, plain[0]) not in plain]
        calls.append(
            AttentionCall(
                module,
                query.clone(),
                key.clone(),
                value.clone(),
                output.clone(),
                query.shape[-1] ** -0.5 if scale is None else float(scale),
                settings.get("sliding_window"),
                settings.get("softcap"),
                tuple(special),
            )
        )
        return output, None

    AttentionInterface.register(NAME, forward)
    AttentionMaskInterface.register(NAME, sdpa_mask)  # without it, a model gets no mask at all
    before = config._attn_implementation
    config._attn_implementation = NAME
    try:
        with torch.no_grad():
            yield calls
    finally:
        config._attn_implementation = before


def _capped(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    softcap: float,
    scaling: float | None = None,
    **settings: Any,
) -> tuple[Tensor, None]:
    """Attention with capped scores, which torch's own function does not have."""
    shared = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(shared, dim=1) for tensor in (key, value))
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    scores = torch.tanh(scores / softcap) * softcap
    if attention_mask is None:  # as torch's function takes it: all keys up to the query
        attention_mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril(scores.shape[-1] - scores.shape[-2])
    weights = scores.masked_fill(~attention_mask, torch.finfo(scores.dtype).min).softmax(-1)
    return (weights @ value).transpose(1, 2), None
