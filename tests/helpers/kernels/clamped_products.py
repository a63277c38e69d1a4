"""GPT-OSS' clamped product of gate and up, as transformers computes it."""

from itertools import product

import torch
from torch import Tensor
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssConfig, GptOssExperts

VALUES = [-1e4, -40.0, -7.01, -7.0, -0.5, -0.0, 1e-20, 3.0, 7.0, 7.01, 1e4, torch.nan]


def clamped_products() -> tuple[Tensor, Tensor]:
    """Pairs of gate and up [N, 2], below, between and above the limits, and their products [N, 1]."""
    pairs = torch.tensor(list(product(VALUES, VALUES)))
    config = GptOssConfig(hidden_size=2, intermediate_size=1, num_local_experts=1)
    with torch.no_grad():
        return pairs, GptOssExperts(config)._apply_gate(pairs)


def assert_clamped_products(actual: Tensor, expected: Tensor) -> None:
    assert torch.equal(actual.isnan(), expected.isnan())
    off = (actual - expected).abs().nan_to_num()
    assert bool((off <= 1e-6 * (1 + expected.abs().nan_to_num())).all())
