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
    sinks: the parameter of the module that has an attention sink for each head; "" without sinks.
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
    sinks: str = ""


@contextmanager
def observed_attention(config: Any) -> Iterator[list[AttentionCall]]:
    """Context in which the attention of models with this config is torch's, and its calls are listed. Models that
    write their attention out do not call it.
    """
    calls: list[AttentionCall] = []

    def forward(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **settings: Any
    ) -> tuple[Tensor, None]:
        sinks = _parameter(module, settings.get("s_aux"))
        plain_scores = settings.get("softcap") is None and not sinks
        attend = sdpa_attention_forward if plain_scores else _attend
        output, _ = attend(module, query, key, value, attention_mask, **settings)
        scale = settings.get("scaling")
        special = [name for name, plain in PLAIN.items() if settings.get(name, plain[0]) not in plain]
        if sinks:
            special.remove("s_aux")
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
                sinks=sinks,
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


def _parameter(module: nn.Module, value: Any) -> str:
    """The name of the module's own parameter that a value is, or "" for another value."""
    return next((name for name, parameter in module.named_parameters(recurse=False) if parameter is value), "")


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    softcap: float | None = None,
    scaling: float | None = None,
    s_aux: Tensor | None = None,
    **settings: Any,
) -> tuple[Tensor, None]:
    """Attention with capped scores or with sinks [heads], which torch's own function does not have."""
    shared = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(shared, dim=1) for tensor in (key, value))
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if attention_mask is None:  # as torch's function takes it: all keys up to the query
        attention_mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril(scores.shape[-1] - scores.shape[-2])
    scores = scores.masked_fill(~attention_mask, torch.finfo(scores.dtype).min)
    if s_aux is not None:
        scores = torch.cat((scores, s_aux[:, None, None].expand(*scores.shape[:-1], 1)), -1)
    weights = scores.softmax(-1)[..., : key.shape[2]]
    return (weights @ value).transpose(1, 2), None
