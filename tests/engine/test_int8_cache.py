"""Engines with an int8 cache: near engines with a float cache, and equal in every way to run them."""

import copy
from functools import cache
from typing import Any

import pytest
import torch
from helpers.kernels.ops import distance
from helpers.models.engines import FEW, IMPLS, fused, greedy, prompt, shallow, vanilla
from helpers.models.small_models import small_config
from helpers.sweeps import crossed, swept
from torch import Tensor
from transformers import DynamicCache

import labkit
from labkit.engine import InferenceEngine
from labkit.engine.memory.heads import StoredHeads
from labkit.engine.memory.kv_cache import BLOCK, KVCache
from labkit.kernels import gpu
from labkit.models.policies import model_config_of

# |actual - expected| / |expected|, in Frobenius norms
NEAR = 0.08  # compared with the same engine and a float cache
ALIKE = 5e-3  # between two ways to compute the same, which sometimes round a number differently
SAME = 1e-5
MASK = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1], [1] * 8])
PADDED = prompt(2, 8).where(MASK.bool(), 0)
TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "int8": torch.int8}


@cache
def engine(name: str, impl: str = "cpp", dtype: torch.dtype = torch.float32) -> InferenceEngine:
    return labkit.init_inference(vanilla(name), impl=impl, dtype=dtype, kv_dtype=torch.int8)


def step_by_step(model: InferenceEngine, ids: Tensor, prompt_tokens: int) -> Tensor:
    """Logits of a prompt and of one token after the other."""
    out = model(ids[:, :prompt_tokens])
    logits = [out.logits]
    for index in range(prompt_tokens, ids.shape[1]):
        logits.append(model(ids[:, index, None], past_key_values=out.past_key_values).logits)
    return torch.cat(logits, dim=1)


@pytest.mark.parametrize(("name", "impl"), crossed(FEW, IMPLS))
@pytest.mark.usefixtures("poisoned")
def test_logits_are_near_those_of_a_cache_of_floats(name: str, impl: str) -> None:
    """Prompt and steps read the same cache, so together they equal the full forward."""
    ids = prompt(3, 40)
    whole = engine(name, impl)(ids).logits
    assert 0 < distance(whole, fused(name)(ids).logits) < NEAR
    assert distance(step_by_step(engine(name, impl), ids, 33), whole) < ALIKE


@pytest.mark.parametrize("dtype", TYPES.values(), ids=TYPES)
def test_weights_of_every_type_go_with_it(dtype: torch.dtype) -> None:
    """In one call, stage by stage, and in the reference."""
    ids, int8_engine = prompt(2, 13), engine("llama", dtype=dtype)
    actual, expected = int8_engine(ids).logits, fused("llama", dtype=dtype)(ids).logits
    assert 0 < distance(actual, expected) < NEAR
    with int8_engine.module.runner.stage_by_stage():
        assert distance(int8_engine(ids).logits, actual) < ALIKE
    assert distance(actual, engine("llama", "reference", dtype)(ids).logits) < NEAR


@pytest.mark.parametrize("name", FEW)
def test_greedy_tokens_of_a_padded_batch_are_the_references(name: str) -> None:
    """Up to a token that the reference nearly did not choose: its logits of both choices are alike."""
    actual, expected = (greedy(engine(name, impl), PADDED, 12, attention_mask=MASK) for impl in IMPLS)
    for row in range(len(expected)):
        for at in (actual[row] != expected[row]).nonzero()[:1].flatten().tolist():
            mask = torch.nn.functional.pad(MASK[row], (0, at - MASK.shape[1]), value=1)
            logits = engine(name, "reference")(expected[row, None, :at], attention_mask=mask[None]).logits[0, -1]
            assert logits[expected[row, at]] - logits[actual[row, at]] < ALIKE * logits.std()


@pytest.mark.parametrize("name", ["bloom", "opt"])
def test_padding_changes_nothing(name: str) -> None:
    """Only for models whose keys do not depend on the position. Rotated keys are rounded differently."""
    actual = engine(name)(PADDED, attention_mask=MASK).logits
    for row, visible in enumerate(MASK.bool()):
        assert distance(actual[row, visible], engine(name)(PADDED[row, visible][None]).logits[0]) < ALIKE


def test_reordered_repeated_cropped_and_copied_rows_go_on_as_themselves() -> None:
    """Scales move with their numbers."""
    model, ids, step = engine("llama"), prompt(2, 8), prompt(1, 3, seed=1)
    alone = [model(step, past_key_values=model(ids[row, None]).past_key_values).logits[0] for row in (0, 1)]

    def check(cache: KVCache, rows: tuple[int, ...]) -> None:
        actual = model(step.expand(len(rows), -1), past_key_values=cache).logits
        assert max(distance(logits, alone[row]) for logits, row in zip(actual, rows, strict=True)) < SAME

    for change, argument, rows in (
        ("reorder_cache", torch.tensor([1, 0]), (1, 0)),
        ("batch_select_indices", torch.tensor([1]), (1,)),
        ("batch_repeat_interleave", 2, (0, 0, 1, 1)),
    ):
        cache = model(ids).past_key_values
        getattr(cache, change)(argument)
        check(cache, rows)
    cache = model(torch.cat((ids, step.expand(2, -1)), dim=1)).past_key_values
    cache.crop(-3)
    twin = cache.__deepcopy__({})
    check(cache, (0, 1))
    check(twin, (0, 1))


@pytest.mark.parametrize("impl", IMPLS)
def test_the_size_of_keys_and_values_does_not_matter(impl: str) -> None:
    """Values are 2^30 times smaller, and the output projection is as much larger: the logits stay the same."""
    scaled = copy.deepcopy(vanilla("llama"))
    for layer in scaled.model.layers:
        layer.self_attn.v_proj.weight.data *= 2.0**-30
        layer.self_attn.o_proj.weight.data *= 2.0**30
    ids = prompt(2, 9)
    actual = labkit.init_inference(scaled, kv_dtype=torch.int8, impl=impl)(ids).logits
    assert distance(actual, engine("llama", impl)(ids).logits) < SAME


def test_beams_are_the_references() -> None:
    actual, expected = (greedy(engine("llama", impl), PADDED, 8, attention_mask=MASK, num_beams=3) for impl in IMPLS)
    assert torch.equal(actual, expected)


def test_a_cache_that_grows_loses_nothing() -> None:
    """Nor does it read free slots, whose scales are NaN in this test."""
    model, ids, step = engine("bloom"), prompt(2, BLOCK), prompt(2, 3, seed=1)
    roomy = model.module.new_cache(capacity=2 * BLOCK)
    grown = model(ids).past_key_values
    model(ids, past_key_values=roomy)
    for scales in (*roomy.heads.key_scales, *roomy.heads.value_scales):
        scales[:, :, BLOCK:] = float("nan")
    actual, expected = (model(step, past_key_values=kv).logits for kv in (grown, roomy))
    assert grown.capacity > BLOCK
    assert torch.equal(actual, expected)


def test_a_cache_of_transformers_is_gone_on_with_and_filled() -> None:
    """It holds floats in the model's type."""
    ids, step = prompt(2, 8), prompt(2, 2, seed=1)
    kv = DynamicCache()
    with torch.no_grad():
        vanilla("llama")(ids, past_key_values=kv)
    actual = engine("llama")(step, past_key_values=kv).logits
    expected = fused("llama")(step, past_key_values=fused("llama")(ids).past_key_values).logits
    assert 0 < distance(actual, expected) < NEAR
    assert kv.get_seq_length() == 10
    assert kv.layers[0].keys.dtype == torch.float32


def test_a_cache_takes_the_bytes_that_are_counted() -> None:
    cache = engine("gpt2")(prompt(3, 8)).past_key_values
    config = model_config_of(small_config("gpt2", n_embd=48))  # heads of 16 need no padding
    small = KVCache(config, torch.float32, kv_dtype=torch.int8)
    small.reserve(3, 8)
    assert isinstance(small.heads, StoredHeads)
    assert "in torch.float32 stored as torch.int8" in repr(cache)
    assert sum(tensor.nbytes for tensor in small.heads.tensors) == 24 * config.kv_bytes_per_token(
        torch.float32, torch.int8
    )


@pytest.mark.skipif(not gpu.interpreted() or bool(gpu.unavailable()), reason="runs in Triton's interpreter")
@pytest.mark.parametrize("name", swept(["gptj", "llama"], []))
def test_triton_steps_of_a_padded_batch_give_the_tokens_of_the_reference(name: str) -> None:
    """On borrowed memory; a separate kernel finishes the heads of a new token."""
    on_triton, reference = (
        labkit.init_inference(shallow(name, 2), impl=impl, kv_dtype="int8") for impl in ("triton", "reference")
    )
    actual, expected = (greedy(model, PADDED, 3, attention_mask=MASK) for model in (on_triton, reference))
    assert torch.equal(actual, expected)
    assert "finish_heads" in [node.kernel for node in on_triton.graph_nodes]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kv_dtype": "int4"}, "unsupported dtype 'int4'; expected one of float32, bfloat16, float16, int8"),
        ({"kv_dtype": 8}, "kv_dtype: got 8"),
        (
            {"kv_dtype": "fp16"},
            r"kv_dtype=torch.float16 with dtype=torch.float32; expected None or torch.float32, .*int8",
        ),
        ({"kv_dtype": "float32", "dtype": "int8"}, "with dtype=torch.int8; expected None or torch.bfloat16, .*int8"),
    ],
)
def test_other_types_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        labkit.init_inference(vanilla("gpt2"), **options)


def test_the_type_of_the_weights_is_what_none_means() -> None:
    same_type = labkit.init_inference(vanilla("gpt2"), kv_dtype="float32", impl="reference")
    assert same_type.module.new_cache().kv_dtype == torch.float32


def test_a_cache_of_another_kind_is_refused() -> None:
    cache = engine("gpt2")(prompt(1, 5)).past_key_values
    words = (
        "holds .* in torch.float32 stored as torch.int8 on the CPU, this engine keeps .* in torch.float32 on the CPU"
    )
    with pytest.raises(ValueError, match=words):
        fused("gpt2")(prompt(1, 1), past_key_values=cache)
