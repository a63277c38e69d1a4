"""Engines that store keys and values in int8: near those that do not, and alike in every way to run them."""

import copy
from functools import cache
from typing import Any

import pytest
import torch
from engines import FEW, IMPLS, fused, greedy, prompt, shallow, vanilla
from ops import distance
from small_models import small_config
from sweeps import crossed, swept
from torch import Tensor
from transformers import DynamicCache

import labkit
from labkit.engine import InferenceEngine
from labkit.engine.memory.heads import StoredHeads
from labkit.engine.memory.kv_cache import BLOCK, KVCache
from labkit.kernels import gpu
from labkit.models.policies import model_config_of

# |got - want| / |want|, in Frobenius norms
NEAR = 0.08  # to the same engine with a cache of floats
ALIKE = 5e-3  # between two ways to compute the same, which now and then round a number to its other neighbour
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
    found = [out.logits]
    for at in range(prompt_tokens, ids.shape[1]):
        found.append(model(ids[:, at, None], past_key_values=out.past_key_values).logits)
    return torch.cat(found, dim=1)


@pytest.mark.parametrize(("name", "impl"), crossed(FEW, IMPLS))
@pytest.mark.usefixtures("poisoned")
def test_logits_are_near_those_of_a_cache_of_floats(name: str, impl: str) -> None:
    """Prompt and steps read the same cache: together they are the full forward."""
    ids = prompt(3, 40)
    whole = engine(name, impl)(ids).logits
    assert 0 < distance(whole, fused(name)(ids).logits) < NEAR
    assert distance(step_by_step(engine(name, impl), ids, 33), whole) < ALIKE


@pytest.mark.parametrize("dtype", TYPES.values(), ids=TYPES)
def test_weights_of_every_type_go_with_it(dtype: torch.dtype) -> None:
    """In one call, stage by stage, and in the reference."""
    ids, both = prompt(2, 13), engine("llama", dtype=dtype)
    got, want = both(ids).logits, fused("llama", dtype=dtype)(ids).logits
    assert 0 < distance(got, want) < NEAR
    with both.module.runner.stage_by_stage():
        assert distance(both(ids).logits, got) < ALIKE
    assert distance(got, engine("llama", "reference", dtype)(ids).logits) < NEAR


@pytest.mark.parametrize("name", FEW)
def test_greedy_tokens_of_a_padded_batch_are_the_references(name: str) -> None:
    got, want = (greedy(engine(name, impl), PADDED, 12, attention_mask=MASK) for impl in IMPLS)
    assert torch.equal(got, want)


@pytest.mark.parametrize("name", ["bloom", "opt"])
def test_padding_changes_nothing(name: str) -> None:
    """Where it leaves the keys as they are; those that are rotated by another position are rounded otherwise."""
    got = engine(name)(PADDED, attention_mask=MASK).logits
    for row, seen in enumerate(MASK.bool()):
        assert distance(got[row, seen], engine(name)(PADDED[row, seen][None]).logits[0]) < ALIKE


def test_reordered_repeated_cropped_and_copied_rows_go_on_as_themselves() -> None:
    """Scales move with their numbers."""
    model, ids, step = engine("llama"), prompt(2, 8), prompt(1, 3, seed=1)
    alone = [model(step, past_key_values=model(ids[row, None]).past_key_values).logits[0] for row in (0, 1)]

    def check(cache: KVCache, rows: tuple[int, ...]) -> None:
        got = model(step.expand(len(rows), -1), past_key_values=cache).logits
        assert max(distance(mine, alone[row]) for mine, row in zip(got, rows, strict=True)) < SAME

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
    kept = cache.__deepcopy__({})
    check(cache, (0, 1))
    check(kept, (0, 1))


@pytest.mark.parametrize("impl", IMPLS)
def test_the_size_of_keys_and_values_does_not_matter(impl: str) -> None:
    """Values 2^30 times smaller, and an output projection that makes up for it: the same logits."""
    scaled = copy.deepcopy(vanilla("llama"))
    for layer in scaled.model.layers:
        layer.self_attn.v_proj.weight.data *= 2.0**-30
        layer.self_attn.o_proj.weight.data *= 2.0**30
    ids = prompt(2, 9)
    got = labkit.init_inference(scaled, kv_dtype=torch.int8, impl=impl)(ids).logits
    assert distance(got, engine("llama", impl)(ids).logits) < SAME


def test_beams_are_the_references() -> None:
    got, want = (greedy(engine("llama", impl), PADDED, 8, attention_mask=MASK, num_beams=3) for impl in IMPLS)
    assert torch.equal(got, want)


def test_a_cache_that_grows_loses_nothing() -> None:
    """Nor does it read slots that are not filled: room for more is NaN here."""
    model, ids, step = engine("bloom"), prompt(2, BLOCK), prompt(2, 3, seed=1)
    roomy = model.module.new_cache(capacity=2 * BLOCK)
    grown = model(ids).past_key_values
    model(ids, past_key_values=roomy)
    for scales in (*roomy.heads.key_scales, *roomy.heads.value_scales):
        scales[:, :, BLOCK:] = float("nan")
    got, want = (model(step, past_key_values=each).logits for each in (grown, roomy))
    assert grown.capacity > BLOCK
    assert torch.equal(got, want)


def test_a_cache_of_transformers_is_gone_on_with_and_filled() -> None:
    """It holds floats in the type of the model."""
    ids, step = prompt(2, 8), prompt(2, 2, seed=1)
    given = DynamicCache()
    with torch.no_grad():
        vanilla("llama")(ids, past_key_values=given)
    got = engine("llama")(step, past_key_values=given).logits
    want = fused("llama")(step, past_key_values=fused("llama")(ids).past_key_values).logits
    assert 0 < distance(got, want) < NEAR
    assert given.get_seq_length() == 10
    assert given.layers[0].keys.dtype == torch.float32


def test_a_cache_takes_the_bytes_that_are_counted() -> None:
    cache = engine("gpt2")(prompt(3, 8)).past_key_values
    config = model_config_of(small_config("gpt2", n_embd=48))  # heads of 16, which need no padding
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
    """On memory that is borrowed; the heads of a new token are finished in a kernel of their own."""
    on_triton, reference = (
        labkit.init_inference(shallow(name, 2), impl=impl, kv_dtype="int8") for impl in ("triton", "reference")
    )
    got, want = (greedy(each, PADDED, 3, attention_mask=MASK) for each in (on_triton, reference))
    assert torch.equal(got, want)
    assert "finish_heads" in [node.kernel for node in on_triton.graph_nodes]


@pytest.mark.parametrize(
    ("options", "said"),
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
def test_other_types_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        labkit.init_inference(vanilla("gpt2"), **options)


def test_the_type_of_the_weights_is_what_none_means() -> None:
    own = labkit.init_inference(vanilla("gpt2"), kv_dtype="float32", impl="reference")
    assert own.module.new_cache().kv_dtype == torch.float32


def test_a_cache_of_another_kind_is_refused() -> None:
    cache = engine("gpt2")(prompt(1, 5)).past_key_values
    said = "holds .* in torch.float32 stored as torch.int8 on the CPU, this engine keeps .* in torch.float32 on the CPU"
    with pytest.raises(ValueError, match=said):
        fused("gpt2")(prompt(1, 1), past_key_values=cache)
