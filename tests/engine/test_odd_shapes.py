"""Models whose widths fill no lane, no vector and no block of the kernels, in memory that starts as NaN.

Weights are padded with zeros along K. A kernel that reads padding of the activations before it is written multiplies
these zeros by the old contents of memory. With NaN there, the result is NaN, too.
"""

from functools import cache
from typing import Any

import pytest
import torch
from helpers.models.engines import distance, prompt
from helpers.models.small_models import small_model
from helpers.sweeps import crossed, numbered
from transformers import PreTrainedModel

import labkit

BOUNDS = {"int8": 0.2, "float32": 1e-4, "float16": 1e-2, "bfloat16": 0.1, "int4": 1.5}
SHAPES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 6, "hidden_size": 33}),  # 3 * 6 != 33
    ("gpt2", {"n_embd": 9, "n_head": 3, "n_inner": 5}),
    ("gpt2", {"n_embd": 7, "n_head": 1, "n_inner": 3}),
    ("qwen3", {"num_attention_heads": 5, "num_key_value_heads": 5, "head_dim": 2, "hidden_size": 15}),
    ("opt", {"hidden_size": 21, "num_attention_heads": 3, "word_embed_proj_dim": 7, "ffn_dim": 13}),
    ("opt-no-bias", {"hidden_size": 15, "num_attention_heads": 5, "word_embed_proj_dim": 5, "ffn_dim": 11}),
    ("gptj", {"n_embd": 14, "n_head": 1, "rotary_dim": 6}),
    ("bloom", {"hidden_size": 25, "n_head": 5}),
    ("gpt-neox-sequential", {"hidden_size": 22, "num_attention_heads": 11, "intermediate_size": 9}),
    ("mistral", {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 34, "hidden_size": 11}),
]
QUANT = {"int4": {"weight": {"num_bits": 4, "q_type": "asymmetric"}, "lm_head": True}}
pytestmark = pytest.mark.usefixtures("poisoned")


@cache
def odd(number: int) -> PreTrainedModel:
    name: str
    sizes: dict[str, Any]
    name, sizes = SHAPES[number]
    return small_model(name, **sizes)


@pytest.mark.parametrize(
    ("dtype", "number", "kv_dtype"),
    crossed(
        BOUNDS.keys(),
        numbered(range(len(SHAPES))),
        {"kv": None, "kv8": "int8"},
    ),
)
def test_no_padding_is_read_before_it_is_written(number: int, dtype: str, kv_dtype: str | None) -> None:
    model, options = odd(number), {"quant": QUANT[dtype]} if dtype in QUANT else {"dtype": dtype}
    cache_options: dict[str, Any] = {} if kv_dtype is None else {"kv_dtype": kv_dtype}
    engine = labkit.init_inference(model, impl="cpp", **options, **cache_options)
    for batch, tokens in ((1, 1), (1, 2), (3, 9), (2, 40)):  # one row, one register tile, several, a packed prompt
        ids = prompt(batch, tokens)
        with torch.no_grad():
            expected = model(ids).logits
        out = engine(ids)
        bound = BOUNDS[dtype] + (0.1 if kv_dtype else 0.0)
        assert distance(out.logits, expected) <= bound
        assert engine(ids[:, :1], past_key_values=out.past_key_values).logits.isfinite().all()
