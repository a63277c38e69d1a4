"""bfloat16 and float16 engines compared with a float32 engine that has the same, already rounded weights.

The remaining difference comes from keys and values stored in 16 bits and, if the CPU multiplies pairs of bf16, from
rows rounded to bfloat16. Vanilla models round every intermediate result, so the engine must be nearer to float32.
"""

import pytest
import torch
from helpers.models.engines import IMPLS, distance, greedy, prompt
from helpers.models.small_models import ALL_EXPERTS, SMALL_CONFIGS, small_model
from helpers.sweeps import crossed

import labkit
from labkit.engine import InferenceEngine

BOUND = {torch.bfloat16: 6e-2, torch.float16: 3e-3}  # of the spread of the logits, root mean square
dtypes = pytest.mark.parametrize("dtype", BOUND, ids=["bf16", "fp16"])


def pair(name: str, dtype: torch.dtype, impl: str) -> tuple[InferenceEngine, InferenceEngine]:
    """(16-bit engine, float32 engine) with the same weights."""
    rounded = small_model(name, dtype=dtype, **ALL_EXPERTS.get(name, {}))
    return (
        labkit.init_inference(rounded, impl=impl),
        labkit.init_inference(rounded, impl=impl, dtype=torch.float32),
    )


@pytest.mark.parametrize(("name", "dtype", "impl"), crossed(SMALL_CONFIGS.keys(), BOUND.keys(), IMPLS))
@pytest.mark.usefixtures("poisoned")
def test_logits_are_near_float32_and_nearer_than_vanilla(name: str, dtype: torch.dtype, impl: str) -> None:
    half, single = pair(name, dtype, impl)
    assert (half.dtype, single.dtype) == (dtype, torch.float32)
    ids = prompt(3, 15)
    out = half(ids[:, :12])
    steps = half(ids[:, 12:], past_key_values=out.past_key_values).logits
    assert out.past_key_values.heads.keys[0].dtype == dtype
    expected = single(ids).logits
    with torch.no_grad():
        vanilla_logits = small_model(name, dtype=dtype, **ALL_EXPERTS.get(name, {}))(ids).logits.float()
    difference = distance(torch.cat((out.logits, steps), dim=1), expected)
    assert 0 < difference < min(BOUND[dtype], distance(vanilla_logits, expected))


@dtypes
@pytest.mark.parametrize(("name", "width"), [("llama", "intermediate_size"), ("opt", "ffn_dim")])
@pytest.mark.usefixtures("poisoned")
def test_widths_may_be_odd(name: str, width: str, dtype: torch.dtype) -> None:
    """Pairs of bf16 then end in padding, which must be set and not have the old contents of memory."""
    rounded, ids = small_model(name, dtype=dtype, **{width: 97}), prompt(13, 3)
    expected = labkit.init_inference(rounded, dtype=torch.float32)(ids).logits
    assert distance(labkit.init_inference(rounded)(ids).logits, expected) < BOUND[dtype]


@dtypes
@pytest.mark.parametrize("name", ["gpt2", "gptj", "bloom", "llama"])
def test_repeated_runs_are_bitwise_the_same(name: str, dtype: torch.dtype) -> None:
    half, _ = pair(name, dtype, "cpp")
    ids = prompt(3, 9)
    runs = [
        greedy(half, ids, 20, return_dict_in_generate=True, output_logits=True),
        greedy(half, ids, 20, return_dict_in_generate=True, output_logits=True),
    ]
    assert torch.equal(runs[0].sequences, runs[1].sequences)
    assert all(torch.equal(a, b) for a, b in zip(runs[0].logits, runs[1].logits, strict=True))
    assert torch.equal(greedy(half, ids, 20), runs[0].sequences)


@dtypes
def test_logits_are_float32_whatever_the_weights(dtype: torch.dtype) -> None:
    half, _ = pair("gpt2", dtype, "cpp")
    assert half(prompt(1, 3)).logits.dtype == torch.float32
