"""The fused model computes the same as the vanilla model, with every division of the text into steps."""

import pytest
import torch
from helpers.models.engines import IMPLS, error, fused, greedy, prompt, vanilla
from helpers.models.small_models import SMALL_CONFIGS

import labkit
from labkit.engine.runners import step as step_module

TOLERANCE = 1e-4  # of the range of the logits, compared with transformers in float32
SAME = 1e-5  # of that range, between two ways through the engine that sum in different orders

each_model = pytest.mark.parametrize("name", SMALL_CONFIGS)
each_impl = pytest.mark.parametrize("impl", IMPLS)


@each_impl
@each_model
@pytest.mark.usefixtures("poisoned")
def test_logits_equal_vanilla(name: str, impl: str) -> None:
    engine = labkit.init_inference(vanilla(name), impl=impl)
    ids = prompt(2, 23)
    with torch.no_grad():
        expected = vanilla(name)(ids).logits
    assert engine(ids).logits.dtype == torch.float32
    assert error(engine(ids).logits, expected) <= TOLERANCE


@each_model
def test_greedy_tokens_equal_vanilla(name: str) -> None:
    ids = prompt(2, 9)
    expected = greedy(vanilla(name), ids, 64)
    assert expected.shape == (2, 73)
    for impl in IMPLS:
        assert torch.equal(greedy(fused(name, impl), ids, 64), expected)


@each_impl
@each_model
def test_prefill_then_decode_equals_full_forward(name: str, impl: str) -> None:
    """One token after the other, and several tokens at once on a filled cache."""
    engine, ids = fused(name, impl), prompt(3, 22)
    expected = engine(ids).logits
    for cuts in ((1, *[1] * 21), (9, *[1] * 13), (4, 3, 1, 5, 2, 7)):
        cache, logits, begin = None, [], 0
        for step in cuts:
            out = engine(ids[:, begin : begin + step], past_key_values=cache)
            cache, begin = out.past_key_values, begin + step
            logits.append(out.logits)
        assert error(torch.cat(logits, dim=1), expected) <= SAME


@pytest.mark.parametrize("rows", [1, 5, 20])
@each_model
def test_a_prompt_in_chunks_equals_the_whole_prompt(name: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, ids = fused(name), prompt(2, 19)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    expected = engine(ids, attention_mask=mask)
    monkeypatch.setattr(step_module, "CHUNK_ROWS", rows)
    actual = engine(ids, attention_mask=mask)
    visible = mask.bool()
    assert error(actual.logits[visible], expected.logits[visible]) <= SAME
    next_token = ids[:, :1]
    assert (
        error(*(engine(next_token, past_key_values=out.past_key_values).logits for out in (actual, expected))) <= SAME
    )


@pytest.mark.parametrize("keep", [1, 3, 19])
@each_impl
def test_only_the_last_logits_on_request(impl: str, keep: int, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, ids = fused("gpt-neox-parallel", impl), prompt(2, 19)
    monkeypatch.setattr(step_module, "CHUNK_ROWS", 10)
    actual = engine(ids, logits_to_keep=keep).logits
    assert actual.shape == (2, keep, 131)
    assert error(actual, engine(ids).logits[:, -keep:]) <= SAME


@each_model
@pytest.mark.usefixtures("poisoned")
def test_stage_by_stage_equals_one_call(name: str) -> None:
    engine, ids = fused(name), prompt(3, 17)
    one_call = engine(ids).logits, greedy(engine, ids, 12)
    with engine.module.runner.stage_by_stage():
        staged = engine(ids).logits, greedy(engine, ids, 12)
    assert error(staged[0], one_call[0]) <= SAME
    assert torch.equal(staged[1], one_call[1])


@pytest.mark.parametrize("name", ["gpt2", "gptj", "bloom-normed-residual", "llama", "opt-no-bias", "opt-post-norm"])
def test_hidden_states_equal_vanilla(name: str) -> None:
    ids = prompt(2, 11)
    with torch.no_grad():
        expected = vanilla(name)(ids, output_hidden_states=True).hidden_states
    actual = fused(name)(ids, output_hidden_states=True).hidden_states
    assert len(actual) == len(expected)
    assert (
        max(error(actual_state, expected_state) for actual_state, expected_state in zip(actual, expected, strict=True))
        <= TOLERANCE
    )


def test_the_loss_equals_vanilla() -> None:
    ids = prompt(2, 11)
    with torch.no_grad():
        expected = vanilla("gpt2")(ids, labels=ids).loss
    assert torch.allclose(fused("gpt2")(ids, labels=ids).loss, expected, rtol=1e-4)


def test_logits_and_cache_come_as_a_tuple_on_request() -> None:
    logits, cache = fused("gpt2")(prompt(1, 4), return_dict=False)
    assert logits.shape == (1, 4, 131)
    assert cache.get_seq_length() == 4


def test_logits_may_be_edited_in_place() -> None:
    logits = fused("gpt2")(prompt(1, 4)).logits
    assert not logits.zero_().any()


@pytest.mark.parametrize("batch", [2, 3, 5, 12, 13, 31, 33, 64, 65])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_batch_equals_its_rows(name: str, batch: int) -> None:
    engine, ids = fused(name), prompt(batch, 5)
    whole = engine(ids)
    step = engine(ids[:, :1], past_key_values=whole.past_key_values).logits
    for row in range(0, batch, 1 + batch // 8):
        alone = engine(ids[row : row + 1])
        assert error(whole.logits[row], alone.logits[0]) <= SAME
        assert error(step[row], engine(ids[row : row + 1, :1], past_key_values=alone.past_key_values).logits[0]) <= SAME


def test_a_source_of_tensors_gives_the_same_engine_as_the_model() -> None:
    class Tensors:
        hf_config = vanilla("qwen3").config

        def names(self) -> set[str]:
            return set(vanilla("qwen3").state_dict())

        def get(self, name: str, dtype: torch.dtype | None = None, cut: object = None) -> torch.Tensor:
            return vanilla("qwen3").state_dict()[name].to(dtype)

    ids = prompt(2, 7)
    assert torch.equal(labkit.init_inference(Tensors())(ids).logits, fused("qwen3")(ids).logits)
