"""The KV cache: continuing, growing, cropping, reordering, and caches of transformers."""

from typing import Any

import pytest
import torch
from helpers.models.engines import FEW, error, fused, greedy, prompt, vanilla
from helpers.models.small_models import small_model
from torch import Tensor
from transformers import DynamicCache, StaticCache

import labkit
from labkit.engine.memory.kv_cache import BLOCK, KVCache

SAME = 1e-5
MASK = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1], [1] * 8])
each_model = pytest.mark.parametrize("name", FEW)


def filled(name: str, ids: Tensor, mask: Tensor | None = None) -> KVCache:
    return fused(name)(ids, attention_mask=mask).past_key_values


def longer(mask: Tensor, tokens: int) -> Tensor:
    return torch.cat((mask, torch.ones(len(mask), tokens, dtype=mask.dtype)), dim=1)


@each_model
def test_going_on_from_a_returned_cache_equals_one_run(name: str) -> None:
    """With the whole text, as transformers expects it, and with the new tokens only."""
    ids, new_ids = prompt(2, 8), prompt(2, 3, seed=1)
    engine = fused(name)
    for whole_text in (True, False):
        first = greedy(engine, ids, 6, return_dict_in_generate=True)
        text = torch.cat((first.sequences, new_ids), dim=1)
        expected = greedy(vanilla(name), text, 7)
        cache = first.past_key_values
        assert cache.get_seq_length() == 13
        input_ids = text if whole_text else text[:, 13:]
        actual = greedy(engine, input_ids, 7, past_key_values=cache, attention_mask=torch.ones_like(text))
        assert torch.equal(actual[:, -7:], expected[:, -7:])
        assert torch.equal(actual[:, :-7], input_ids)


@each_model
def test_going_on_from_a_padded_batch_equals_one_run(name: str) -> None:
    ids, new_ids = prompt(2, 8).where(MASK.bool(), 0), prompt(2, 3, seed=1)
    first = greedy(fused(name), ids, 6, attention_mask=MASK, return_dict_in_generate=True)
    text, mask = torch.cat((first.sequences, new_ids), dim=1), longer(MASK, 9)
    expected = greedy(vanilla(name), text, 7, attention_mask=mask)
    actual = greedy(fused(name), text, 7, attention_mask=mask, past_key_values=first.past_key_values)
    assert torch.equal(actual, expected)


@each_model
def test_generation_goes_on_from_a_forward_pass(name: str) -> None:
    ids = prompt(2, 8)
    cache = filled(name, ids[:, :5])
    fused(name)(ids[:, 5:7], past_key_values=cache)
    assert torch.equal(greedy(fused(name), ids, 6, past_key_values=cache), greedy(vanilla(name), ids, 6))


@each_model
def test_a_cache_of_transformers_is_gone_on_with_and_filled(name: str) -> None:
    """Both models can continue with the cache afterwards, as two vanilla models could."""
    ids, mask = prompt(2, 8).where(MASK.bool(), 0), MASK
    step = prompt(2, 2, seed=1)
    vanilla_model, engine = vanilla(name), fused(name)
    caches = DynamicCache(), DynamicCache()
    with torch.no_grad():
        vanilla_model(ids, attention_mask=mask, past_key_values=caches[0])
    engine(ids, attention_mask=mask, past_key_values=caches[1])
    logits = []
    for cache in caches:
        out = engine(step, attention_mask=longer(mask, 2), past_key_values=cache)
        assert cache.get_seq_length() == out.past_key_values.get_seq_length() == 10
        last = engine(step[:, :1], attention_mask=longer(mask, 3), past_key_values=cache)
        assert cache.get_seq_length() == 11
        logits.append(torch.cat((out.logits, last.logits), dim=1))
    text, whole = torch.cat((ids, step, step[:, :1]), dim=1), longer(mask, 3)
    expected = engine(text, attention_mask=whole).logits[:, -3:]
    assert max(error(actual, expected) for actual in logits) <= 1e-4


def test_generation_fills_a_cache_of_transformers() -> None:
    ids, cache = prompt(2, 8), DynamicCache()
    first = greedy(fused("llama"), ids, 6, past_key_values=cache)
    assert cache.get_seq_length() == 13
    assert torch.equal(greedy(vanilla("llama"), first, 5, past_key_values=cache), greedy(vanilla("llama"), first, 5))


def test_a_static_cache_of_transformers_serves_too() -> None:
    ids = prompt(2, 8)
    cache = StaticCache(vanilla("llama").config, max_cache_len=40)
    fused("llama")(ids[:, :7], past_key_values=cache)
    actual = fused("llama")(ids[:, 7:], past_key_values=cache).logits
    assert error(actual, fused("llama")(ids).logits[:, 7:]) <= SAME


@pytest.mark.parametrize("name", ["mistral", "qwen3-biased"])
def test_a_cache_that_dropped_what_windows_hide_is_served_turn_after_turn(name: str) -> None:
    """transformers' DynamicCache(config=...) keeps only the window of each layer."""
    ids, model = prompt(2, 31), vanilla(name)
    caches = [DynamicCache(config=model.config) for _ in range(2)]
    for begin, end in ((0, 20), (20, 21), (21, 29), (29, 31)):
        with torch.no_grad():
            expected = model(ids[:, begin:end], past_key_values=caches[0]).logits
        actual = fused(name)(ids[:, begin:end], past_key_values=caches[1]).logits
        assert error(actual, expected) <= SAME
        assert caches[1].get_seq_length() == end


def test_a_cache_that_dropped_tokens_that_are_seen_is_refused() -> None:
    ids, model = prompt(1, 20), vanilla("mistral")
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids, past_key_values=cache)
    cache.layers[1].keys = cache.layers[1].keys[:, :, -3:]
    with pytest.raises(ValueError, match=r"layer 1 of the given cache kept only 3 of 20 tokens.*give a DynamicCache"):
        fused("mistral")(ids[:, :1], past_key_values=cache)


@pytest.mark.parametrize(
    ("make_engine", "words"),
    [
        (lambda: fused("gpt-neox-sequential"), "GPTNeoXForCausalLM"),
        (lambda: fused("gpt2", "reference", torch.bfloat16), "in torch.bfloat16"),
        (lambda: labkit.init_inference(small_model("gpt2", n_layer=2)), "2 layers"),
        (lambda: labkit.init_inference(small_model("gpt2", n_head=6)), "6 heads of 10"),
    ],
)
def test_a_cache_of_another_engine_is_refused(make_engine: Any, words: str) -> None:
    cache = make_engine()(prompt(1, 5)).past_key_values
    with pytest.raises(ValueError, match=f"made by another engine: .*{words}.*this engine keeps 3 layers of GPT2"):
        fused("gpt2")(prompt(1, 1), past_key_values=cache)
    with pytest.raises(ValueError, match="made by another engine"):
        fused("gpt2").generate(prompt(1, 6), past_key_values=cache, max_new_tokens=2)


def test_a_cache_of_another_model_is_refused() -> None:
    cache = DynamicCache()
    with torch.no_grad():
        vanilla("gpt-neo")(prompt(1, 5), past_key_values=cache)
    with pytest.raises(ValueError, match="the given cache has 4 layers, the model 3"):
        fused("gpt2")(prompt(1, 1), past_key_values=cache)


def test_a_cache_of_another_batch_is_refused() -> None:
    cache = filled("gpt2", prompt(2, 5))
    with pytest.raises(ValueError, match="the cache holds 2 sequences, got 3; use one cache per batch"):
        fused("gpt2")(prompt(3, 1), past_key_values=cache)


@each_model
@pytest.mark.parametrize("mask", [None, MASK, MASK.flip(1)], ids=["", "left-padded", "right-padded"])
def test_a_cropped_cache_equals_a_shorter_text(name: str, mask: Tensor | None) -> None:
    ids, step = prompt(2, 8), prompt(2, 3, seed=1)
    for crop in (-3, 5):
        cache = filled(name, ids, mask)
        cache.crop(crop)
        assert cache.get_seq_length() == 5
        actual = fused(name)(step, past_key_values=cache).logits
        expected = fused(name)(
            step, past_key_values=filled(name, ids[:, :5], mask if mask is None else mask[:, :5])
        ).logits
        # a different number of tokens rounds differently
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def test_nothing_more_can_be_cropped_than_there_is() -> None:
    cache = filled("gpt2", prompt(1, 4))
    with pytest.raises(ValueError, match="can't drop 5 of 4 tokens"):
        cache.crop(-5)
    cache.crop(9)
    assert cache.get_seq_length() == 4


@each_model
def test_reordered_selected_and_repeated_rows_go_on_as_themselves(name: str) -> None:
    ids, step = prompt(2, 8), prompt(1, 3, seed=1)
    alone = [
        fused(name)(step, past_key_values=filled(name, ids[row : row + 1], MASK[row : row + 1])).logits[0]
        for row in (0, 1)
    ]

    def logits_after(change: str, argument: object) -> Tensor:
        cache = filled(name, ids, MASK)
        getattr(cache, change)(argument)
        return fused(name)(step.expand(cache.batch_size, -1), past_key_values=cache).logits

    for change, argument, rows in (
        ("reorder_cache", torch.tensor([1, 0]), (1, 0)),
        ("reorder_cache", torch.tensor([1, 1]), (1, 1)),
        ("batch_select_indices", torch.tensor([1]), (1,)),
        ("batch_repeat_interleave", 2, (0, 0, 1, 1)),
    ):
        actual = logits_after(change, argument)
        assert len(actual) == len(rows)
        assert max(error(logits, alone[row]) for logits, row in zip(actual, rows, strict=True)) <= SAME


@pytest.mark.parametrize("mask", [None, MASK], ids=["", "padded"])
def test_a_cache_grows_without_losing_anything(mask: Tensor | None) -> None:
    ids = prompt(2, 8)
    cache = filled("bloom", ids, mask)
    text = ids
    for seed, size in enumerate((1, BLOCK, 3, 2 * BLOCK)):
        step = prompt(2, size, seed=seed + 2)
        text = torch.cat((text, step), dim=1)
        actual = fused("bloom")(step, past_key_values=cache).logits[:, -1]
        whole = fused("bloom")(text, attention_mask=None if mask is None else longer(mask, text.shape[1] - 8))
        assert error(actual, whole.logits[:, -1]) <= SAME
    assert cache.capacity >= cache.get_seq_length() == 8 + 4 + 3 * BLOCK


def test_reserved_room_is_taken_at_once() -> None:
    cache = fused("gpt2").module.new_cache(capacity=100)
    fused("gpt2")(prompt(1, 4), past_key_values=cache)
    assert cache.capacity == 100
    assert greedy(fused("gpt2"), prompt(1, 4), 50, return_dict_in_generate=True).past_key_values.capacity == 54


@each_model
def test_slots_that_are_not_filled_are_not_read(name: str) -> None:
    """Fills the free slots with NaN; the logits must stay equal to the last bit."""
    ids, step = prompt(2, 8), prompt(2, 3, seed=1)
    cache = fused(name).module.new_cache(capacity=40)
    fused(name)(ids, past_key_values=cache)
    for slots in cache.heads.tensors:
        slots[:, :, 8:] = float("nan")
    actual = fused(name)(step, past_key_values=cache).logits
    assert torch.equal(actual, fused(name)(step, past_key_values=filled(name, ids)).logits)


def test_a_cache_that_is_reset_starts_over() -> None:
    ids = prompt(2, 8)
    cache = filled("llama", ids, MASK)
    cache.reset()
    assert torch.equal(fused("llama")(ids, past_key_values=cache).logits, fused("llama")(ids).logits)


def test_the_text_must_be_longer_than_the_cache() -> None:
    ids = prompt(1, 6)
    with pytest.raises(ValueError, match="the cache holds 6 tokens and the text has 6"):
        greedy(fused("gpt2"), ids, 3, past_key_values=filled("gpt2", ids))


def test_two_engines_side_by_side_share_nothing() -> None:
    """Two engines of one model, and a third one, run in turns, step by step."""
    texts = {"a": prompt(2, 6), "b": prompt(2, 6, seed=1), "c": prompt(3, 4, seed=2)}
    engines = {"a": fused("gpt2"), "b": labkit.init_inference(vanilla("gpt2")), "c": fused("llama")}
    expected = {key: greedy(vanilla("llama" if key == "c" else "gpt2"), texts[key], 10) for key in texts}
    caches: dict[str, KVCache | None] = dict.fromkeys(texts)
    new = dict(texts)
    for _ in range(10):
        for key, engine in engines.items():
            out = engine(new[key], past_key_values=caches[key])
            caches[key], new[key] = out.past_key_values, out.logits[:, -1:].argmax(-1)
            texts[key] = torch.cat((texts[key], new[key]), dim=1)
    assert all(torch.equal(texts[key], expected[key]) for key in texts)


def test_destroying_one_engine_leaves_the_other() -> None:
    model, ids = small_model("gpt2"), prompt(1, 5)
    destroyed, remaining = labkit.init_inference(model), labkit.init_inference(model)
    expected = greedy(remaining, ids, 5)
    destroyed.destroy()
    assert torch.equal(greedy(remaining, ids, 5), expected)
    with pytest.raises(RuntimeError, match="this engine was destroyed; call init_inference again"):
        greedy(destroyed, ids, 5)
