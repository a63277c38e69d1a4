"""Functions of transformers for one new token of each sequence, on labkit's kernels.

Each takes the arguments of the function whose name it has, and returns what that returns, or NotImplemented for
arguments that the kernel does not take.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from labkit.engine.team_size import team_size
from labkit.kernels.attention import attention as checked_attention
from labkit.kernels.checks import FLOATS, unchecked
from labkit.kernels.linear_attention import conv_step as checked_conv_step
from labkit.kernels.linear_attention import delta_step as checked_delta_step
from labkit.kernels.types import HEAD_DIM_LIMITS, HEAD_DIM_MULTIPLE, AttentionParams, Heads, LayerCache, Rows

attention = unchecked(checked_attention)
conv_step, delta_step = unchecked(checked_conv_step), unchecked(checked_delta_step)
OTHER_SCORES = ("softcap", "position_bias", "s_aux", "sinks", "cache", "indices", "block_indices")  # arguments


def sdpa_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **others: Any,
) -> Any:
    """Softmax attention of one new token over cached keys and values, [B, heads, slots, head size]."""
    batch, heads, tokens, size = query.shape
    if (
        tokens != 1
        or size % HEAD_DIM_MULTIPLE
        or size > HEAD_DIM_LIMITS["cpp"]
        or value.shape != key.shape
        or key.shape[0] != batch
        or heads % key.shape[1]
        or not (key.dtype == value.dtype in FLOATS)
        or not (_plain(key) and _plain(value))
        or (dropout and module.training)
        or any(others.get(name) is not None for name in OTHER_SCORES)
    ):
        return NotImplemented
    kv_heads, slots = key.shape[1:3]
    visible = None
    if attention_mask is not None:
        if attention_mask.dtype != torch.bool or attention_mask.shape != (batch, 1, 1, slots):
            return NotImplemented
        visible = attention_mask.view(batch, slots).contiguous().view(torch.uint8)
    nothing = torch.zeros(batch, dtype=torch.int32)
    context = attention(
        query.reshape(batch, -1).float().contiguous(),
        AttentionParams(size**-0.5 if scaling is None else float(scaling)),
        Heads(heads, kv_heads, size),
        Rows(batch, 1, nothing, nothing, visible),
        LayerCache(key, value, slots - 1),
        threads=team_size(),
        impl="cpp",
    )
    return context.to(query.dtype).view(batch, 1, heads, size), None


def causal_conv1d_update(
    hidden_states: Tensor, conv_state: Tensor, weight: Tensor, bias: Tensor | None = None, activation: Any = None
) -> Any:
    """The causal convolution of one token, with its state."""
    stored = (conv_state, weight) if bias is None else (conv_state, weight, bias)
    of_one_type = {tensor.dtype for tensor in stored} <= {conv_state.dtype} & set(FLOATS)
    if (
        hidden_states.shape[-1] != 1
        or activation not in (None, "silu", "swish")
        or not (of_one_type and all(map(_plain, stored)))
    ):
        return NotImplemented
    x = hidden_states[..., 0].float().contiguous()
    out = conv_step(x, conv_state, weight, bias, activation is not None, threads=team_size(), impl="cpp")
    return out[..., None].to(hidden_states.dtype)


def torch_recurrent_gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **others: Any,
) -> Any:
    """The gated delta rule of one token, with its state."""
    if query.shape[1] != 1 or initial_state is None or others.get("cu_seqlens") is not None or query.requires_grad:
        return NotImplemented
    q, k, v, log_decay, rate = (tensor[:, 0].float().contiguous() for tensor in (query, key, value, g, beta))
    state = initial_state.float().contiguous()
    out, state = delta_step(q, k, v, log_decay, rate, state, use_qk_l2norm_in_kernel, threads=team_size(), impl="cpp")
    return out[:, None].to(query.dtype), state if output_final_state else None


def _plain(tensor: Tensor) -> bool:
    """Whether a kernel can read and write a tensor in place."""
    return (
        tensor.device.type == "cpu"
        and tensor.is_contiguous()
        and not (tensor.requires_grad and torch.is_grad_enabled())
    )
