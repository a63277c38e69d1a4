"""A decoder in plain torch that reads only canonical names. It specifies the meaning of a `ModelConfig` and canonical
weights, without any engine.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from labkit.models.config import ModelConfig, alibi_slopes

Weights = dict[str, Tensor]
ACTIVATION = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
}


def forward(config: ModelConfig, top: Weights, layers: list[Weights], ids: Tensor) -> Tensor:
    """Logits [T, V] of one unpadded sequence [T], with canonical weights, in fp32."""
    x = top["embed.weight"][ids] * config.embedding_scale
    if "project_in.weight" in top:
        x = linear(top, "project_in", x)
    if config.embedding_norm:
        x = norm(config, top, "embed_norm", x)
    if config.position == "learned":
        x = x + top["positions.weight"][torch.arange(len(ids)) + config.position_offset]
    for index, weights in enumerate(layers):
        x = layer(config, index, weights, x)
    if config.final_norm:
        x = norm(config, top, "final_norm", x)
    if "project_out.weight" in top:
        x = linear(top, "project_out", x)
    logits = F.linear(x, top["embed.weight" if config.tied_head else "head.weight"], top.get("head.bias"))
    return capped(config.logit_scale * logits, config.logit_cap)


def layer(config: ModelConfig, index: int, weights: Weights, x: Tensor) -> Tensor:
    if not config.pre_norm:
        x = norm(config, weights, "norm1", x + attention(config, index, weights, x))
        return norm(config, weights, "norm2", x + mlp(config, weights, x))
    normed = norm(config, weights, "norm1", x)
    attended = attention(config, index, weights, normed)
    if config.parallel_residual:
        return x + attended + mlp(config, weights, normed if config.shared_norm else norm(config, weights, "norm2", x))
    if config.output_norms:
        attended = norm(config, weights, "attn_out_norm", attended)
    x = (normed if config.residual_from_norm else x) + config.residual_scale * attended
    normed = norm(config, weights, "norm2", x)
    added = config.residual_scale * mlp(config, weights, normed)
    if config.output_norms:
        added = norm(config, weights, "mlp_out_norm", added)
    return (normed if config.residual_from_norm else x) + added


def attention(config: ModelConfig, index: int, weights: Weights, x: Tensor) -> Tensor:
    heads, kv_heads, length = config.num_heads, config.num_kv_heads, len(x)
    qkv = linear(weights, "qkv", x).view(length, heads + 2 * kv_heads, config.head_dim).transpose(0, 1)
    q, k, v = qkv.split((heads, kv_heads, kv_heads))
    if config.qk_norm and config.qk_norm_whole:
        parts = ((weights["q_norm.weight"], q), (weights["k_norm.weight"], k))
        q, k = (
            rms(config, weight, part.transpose(0, 1).flatten(1)).view(length, -1, config.head_dim).transpose(0, 1)
            for weight, part in parts
        )
    elif config.qk_norm:
        q, k = rms(config, weights["q_norm.weight"], q), rms(config, weights["k_norm.weight"], k)
    if config.rotary:
        q, k = rotate(config, q), rotate(config, k)
    k, v = (part.repeat_interleave(heads // kv_heads, dim=0) for part in (k, v))
    distance = torch.arange(length)[:, None] - torch.arange(length)
    scores = capped(config.attention_scales[index] * q @ k.transpose(1, 2), config.attention_cap)
    if config.position == "alibi":
        scores = scores - torch.tensor(alibi_slopes(heads))[:, None, None] * distance
    window = config.windows[index]
    hidden = (distance < 0) | (distance >= (length if window is None else window))
    scores = scores.masked_fill(hidden, -torch.inf)
    if config.attention_sinks:
        scores = torch.cat((scores, weights["sinks.weight"].view(-1, 1, 1).expand(-1, length, 1)), dim=-1)
    context = scores.softmax(-1)[..., :length] @ v
    return linear(weights, "attn_out", context.transpose(0, 1).reshape(length, -1))


def capped(x: Tensor, cap: float | None) -> Tensor:
    return x if cap is None else cap * torch.tanh(x / cap)


def mixture(config: ModelConfig, weights: Weights, x: Tensor) -> Tensor:
    """Every expert computes every row: the one-hot way, with shares of 0 for experts that a row did not choose."""
    experts = config.experts
    assert experts is not None
    probabilities = linear(weights, "router", x).softmax(-1)
    kept = torch.zeros_like(probabilities)
    largest, chosen = probabilities.topk(experts.chosen)
    kept.scatter_(1, chosen, largest / largest.sum(-1, keepdim=True) if experts.renormalised else largest)
    total = torch.zeros_like(x)
    names = [name for name in weights if name.split(".")[0] in ("ff1", "ff2")]
    of_experts = zip(*(weights[name].chunk(experts.count) for name in names), strict=True)
    for share, tensors in zip(kept.T, of_experts, strict=True):
        total += share[:, None] * dense(config, dict(zip(names, tensors, strict=True)), x)
    if experts.shared:
        beside = {f"ff{part}.weight": weights[f"shared_ff{part}.weight"] for part in (1, 2)}
        total += linear(weights, "shared_gate", x).sigmoid() * dense(config, beside, x)
    return total


def mlp(config: ModelConfig, weights: Weights, x: Tensor) -> Tensor:
    return dense(config, weights, x) if config.experts is None else mixture(config, weights, x)


def dense(config: ModelConfig, weights: Weights, x: Tensor) -> Tensor:
    inner = linear(weights, "ff1", x)
    if config.activation == "clamped_swiglu":
        gate, up = inner.chunk(2, dim=-1)
        return linear(weights, "ff2", F.silu(1.702 * gate.clamp(max=7)) / 1.702 * (up.clamp(-7, 7) + 1))
    activation = ACTIVATION[config.activation]
    if config.gated:
        gate, up = inner.chunk(2, dim=-1)
        return linear(weights, "ff2", activation(gate) * up)
    return linear(weights, "ff2", activation(inner))


def rotate(config: ModelConfig, x_hTD: Tensor) -> Tensor:
    rotary = config.rotary
    assert rotary is not None
    angles = torch.arange(x_hTD.shape[1])[:, None] * torch.tensor(rotary.inv_freq)
    cos, sin = angles.cos() * rotary.attention_scaling, angles.sin() * rotary.attention_scaling
    rotated, unrotated = x_hTD[..., : rotary.dim], x_hTD[..., rotary.dim :]
    if rotary.interleaved:
        a, b = rotated[..., 0::2], rotated[..., 1::2]
        rotated = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
    else:
        a, b = rotated.chunk(2, dim=-1)
        rotated = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    return torch.cat((rotated, unrotated), dim=-1)


def linear(weights: Weights, name: str, x: Tensor) -> Tensor:
    return F.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))


def norm(config: ModelConfig, weights: Weights, name: str, x: Tensor) -> Tensor:
    if config.norm == "rms":
        return rms(config, weights[f"{name}.weight"], x)
    return F.layer_norm(x, x.shape[-1:], weights[f"{name}.weight"], weights[f"{name}.bias"], config.norm_eps)


def rms(config: ModelConfig, weight: Tensor, x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], weight + config.norm_offset, config.norm_eps)
