"""Errors of impossible calls: they say what they got, what they expected, and what to do."""

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from helpers.models.engines import error, fused, greedy, prompt, vanilla
from helpers.models.small_models import VOCAB
from transformers import GenerationConfig, LlamaForCausalLM, pipeline
from transformers.generation.configuration_utils import ALL_CACHE_IMPLEMENTATIONS

import labkit
from labkit.engine.hf.causal_lm import FusedCausalLM
from labkit.models.tokenizer import byte_tokenizer
from labkit.system.errors import UnsupportedError, UserTypeError


@pytest.mark.parametrize("ids", [torch.empty(1, 0, dtype=torch.long), torch.empty(0, 3, dtype=torch.long)])
def test_an_empty_prompt_is_refused(ids: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="the prompt is empty"):
        fused("gpt2")(ids)
    with pytest.raises(ValueError, match="the prompt is empty"):
        greedy(fused("gpt2"), ids, 3)
    with pytest.raises(ValueError, match="the prompt is empty"):
        fused("gpt2").generate(input_ids=ids, max_new_tokens=3)


def test_no_prompt_at_all_is_refused() -> None:
    with pytest.raises(ValueError, match=r"input_ids: expected token ids of shape \[batch, tokens >= 1\], got nothing"):
        fused("gpt2")()
    with pytest.raises(ValueError, match="bos_token_id"):
        fused("gpt2").generate(max_new_tokens=3)


def test_a_prompt_without_a_batch_is_refused() -> None:
    with pytest.raises(ValueError, match=r"expected token ids of shape \[batch, tokens >= 1\], got \[4\]"):
        fused("gpt2")(torch.tensor([1, 2, 3, 4]))


def test_lists_of_unequal_length_are_refused_with_the_remedy() -> None:
    with pytest.raises(TypeError, match=r"expected a tensor .* got list; .*return_tensors='pt', padding=True"):
        fused("gpt2").generate([[1, 2, 3], [4]], max_new_tokens=3)


NO_IDS: dict[str, tuple[Any, ...]] = {
    "eos_token_id": ({5}, "5", ["5"], {"a": 1}, 10**30, object()),
    "bos_token_id": ({5}, "5"),
    "pad_token_id": ("x", {5}, [5], torch.tensor([5, 6])),
    "decoder_start_token_id": ("x",),
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in NO_IDS.items() for value in values])
def test_special_tokens_that_are_no_ids_are_refused(name: str, value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    words = f"got {name} = .*, expected the id of a token, such as 5"
    with pytest.raises(UserTypeError, match=words):
        fused("gpt2").generate(prompt(1, 5), max_new_tokens=2, **{name: value})
    config = GenerationConfig(max_new_tokens=2)
    setattr(config, name, value)
    for arguments, keywords in (((config,), {}), ((), {"generation_config": config})):
        with pytest.raises(UserTypeError, match=f"generation_config: {words}"):
            fused("gpt2").generate(prompt(1, 5), *arguments, **keywords)
    engine = fused("gpt2")
    monkeypatch.setattr(engine.module.generation_config, name, value)
    with pytest.raises(UserTypeError, match=f"the model's generation_config: {words}"):
        engine.generate(prompt(1, 5), max_new_tokens=2)


@pytest.mark.parametrize("ids", [5, [5, 6], (5,), torch.tensor([5]), np.int64(5), np.array([5, 6])], ids=repr)
def test_every_form_of_ids_that_transformers_takes_gives_its_tokens(ids: Any) -> None:
    options = {"eos_token_id": ids, "pad_token_id": torch.tensor(3), "max_new_tokens": 4, "do_sample": False}
    assert torch.equal(
        fused("gpt2").generate(prompt(1, 5), **options), vanilla("gpt2").generate(prompt(1, 5), **options)
    )


@pytest.mark.parametrize("token", [-1, VOCAB, 10**9])
def test_tokens_out_of_the_vocabulary_are_refused(token: int) -> None:
    ids = torch.tensor([[5, token, 7]])
    with pytest.raises(
        ValueError, match=rf"token ids run from .*{token}.*; the model's vocabulary is 0 to {VOCAB - 1}"
    ):
        fused("gpt2")(ids)
    with pytest.raises(ValueError, match="the model's vocabulary is"):
        greedy(fused("gpt2"), ids, 3)


@pytest.mark.parametrize("shape", [(2, 8), (1, 9), (2, 10), (9,)])
def test_a_mask_of_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(
        ValueError, match=r"attention_mask is .*; expected \[2, 9\], that is 0 tokens in the cache and 9 new"
    ):
        fused("gpt2")(prompt(2, 9), attention_mask=torch.ones(shape))


@pytest.mark.parametrize("positions", [[[-1, 0, 1]], [[0, 1]], [[0, 1, 2, 3]], [0, 1, 2], [[0, 1, 2]] * 3], ids=str)
def test_positions_that_do_not_fit_are_refused(positions: list[object]) -> None:
    with pytest.raises(ValueError, match=r"position_ids are .*, from -?\d on; expected \[2, 3\] from 0 on"):
        fused("gpt2")(prompt(2, 3), position_ids=torch.tensor(positions))


def test_tokens_that_are_no_integers_are_refused() -> None:
    with pytest.raises(ValueError, match=r"input_ids: expected integers, got torch\.float32"):
        fused("gpt2")(torch.tensor([[1.5, 2.0]]))


def test_embeddings_instead_of_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match=r"inputs_embeds: .* pass input_ids"):
        fused("gpt2")(inputs_embeds=torch.zeros(1, 2, 60))


def test_embeddings_beside_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match=r"inputs_embeds: .* pass input_ids, and not both"):
        fused("gpt2")(prompt(1, 2), inputs_embeds=torch.zeros(1, 2, 60))


@pytest.mark.parametrize("name", ["head_mask", "encoder_hidden_states", "encoder_attention_mask"])
def test_what_the_fused_layers_do_not_compute_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=rf"{name}: .*; leave it out, or use the vanilla model"):
        fused("llama")(prompt(1, 2), **{name: torch.ones(3, 3)})
    fused("llama")(prompt(1, 2), **{name: None})


@pytest.mark.parametrize("name", ["gpt2", "gptj", "gpt-neo", "llama", "opt", "bloom"])
def test_token_types_are_refused_where_they_change_the_logits(name: str) -> None:
    ids = prompt(1, 3)
    with torch.no_grad():
        changed = not torch.equal(vanilla(name)(ids).logits, vanilla(name)(ids, token_type_ids=ids).logits)
    if changed:
        with pytest.raises(ValueError, match="token_type_ids: the fused model adds no embeddings of token types"):
            fused(name)(ids, token_type_ids=ids)
    else:
        assert torch.equal(fused(name)(ids, token_type_ids=ids).logits, fused(name)(ids).logits)
    assert changed == (name in ("gpt2", "gptj", "gpt-neo"))


@pytest.mark.parametrize("name", ["nonsense", "num_logits_to_keep", "input_id"])
def test_unknown_keywords_are_refused(name: str) -> None:
    with pytest.raises(TypeError, match=rf"unexpected keyword argument '{name}'"):
        fused("gpt2")(prompt(1, 2), **{name: 1})


def test_what_the_loss_takes_reaches_it() -> None:
    ids = prompt(2, 6)
    for options in ({"num_items_in_batch": 3}, {"ignore_index": int(ids[0, 2])}, {"shift_labels": ids.roll(2)}):
        with torch.no_grad():
            expected = vanilla("gpt2")(ids, labels=ids, **options).loss
        assert torch.allclose(fused("gpt2")(ids, labels=ids, **options).loss, expected, rtol=1e-4)


@pytest.mark.parametrize("name", ["attention_mask", "position_ids", "labels"])
def test_lists_in_place_of_tensors_are_refused(name: str) -> None:
    with pytest.raises(TypeError, match=rf"{name}: expected a tensor, got list"):
        fused("gpt2")(prompt(1, 2), **{name: [[1, 1]]})


@pytest.mark.parametrize("keep", [-1, 1.5, torch.tensor([0.0]), torch.tensor([True])], ids=str)
def test_numbers_of_logits_that_cannot_be_are_refused(keep: object) -> None:
    with pytest.raises(ValueError, match=r"logits_to_keep: expected .*, got"):
        fused("gpt2")(prompt(1, 4), logits_to_keep=keep)


def test_a_mask_of_logits_to_keep_is_vanillas() -> None:
    ids, mask = prompt(2, 4), torch.tensor([False, True, False, True])
    with torch.no_grad():
        expected = vanilla("gpt2")(ids, logits_to_keep=mask).logits
    assert error(fused("gpt2")(ids, logits_to_keep=mask).logits, expected) < 1e-4


@pytest.mark.parametrize("strict", [True, False])
def test_a_state_dict_that_would_change_nothing_is_refused(*, strict: bool) -> None:
    state = vanilla("gpt2").state_dict()
    for model in (fused("gpt2"), fused("gpt2").module):
        with pytest.raises(NotImplementedError, match="load_state_dict would change none, strict or not"):
            model.load_state_dict(state, strict=strict)


@pytest.mark.parametrize(("kv_dtype", "warns"), [(None, True), (torch.int8, False)], ids=["float", "int8"])
def test_a_quantised_cache_that_is_none_is_said(
    kv_dtype: torch.dtype | None, *, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    engine = labkit.init_inference(vanilla("gpt2"), kv_dtype=kv_dtype)
    greedy(engine, prompt(1, 3), 2, cache_implementation="quantized")
    assert ("kv_dtype=torch.int8) makes one whose cache has 8 bits" in caplog.text) == warns


@pytest.mark.parametrize("kind", [*ALL_CACHE_IMPLEMENTATIONS, "paged"])
def test_every_kind_of_cache_is_the_engines_own_or_refused(kind: str) -> None:
    engine, ids = fused("gpt2"), prompt(2, 3)
    options: list[dict[str, Any]] = [
        {"cache_implementation": kind, "max_new_tokens": 3, "do_sample": False},
        {"generation_config": GenerationConfig(cache_implementation=kind, max_new_tokens=3, do_sample=False)},
    ]
    for named in options:
        if kind == "paged":
            with pytest.raises(
                UnsupportedError, match=r"cache_implementation='paged' keeps .*; use generate with a batch"
            ):
                engine.generate(ids, **named)
        else:
            assert torch.equal(engine.generate(ids, **named), greedy(engine, ids, 3))


def test_continuous_batching_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"continuous batching keeps .* in pages .*; use generate with a batch"):
        fused("gpt2").module.generate_batch([[1, 2]])


@pytest.mark.parametrize("layers", [0, 1])
def test_an_early_exit_is_refused(layers: int) -> None:
    for named in (
        {"assistant_early_exit": layers},
        {"generation_config": GenerationConfig(assistant_early_exit=layers)},
    ):
        with pytest.raises(
            UnsupportedError, match=rf"assistant_early_exit={layers}: .* all of its layers; leave it out"
        ):
            fused("gpt2").generate(prompt(1, 3), **named)


@torch.no_grad()
def test_arguments_by_position_have_the_order_of_llama() -> None:
    def positional(forward: Callable[..., object]) -> list[str]:
        parameters = inspect.signature(forward).parameters.values()
        return [parameter.name for parameter in parameters if parameter.kind == parameter.POSITIONAL_OR_KEYWORD]

    assert positional(FusedCausalLM.forward) == positional(LlamaForCausalLM.forward)
    ids = prompt(2, 4)
    arguments = (ids, torch.ones_like(ids), None, None, None, ids, False, 0)
    torch.testing.assert_close(fused("llama")(*arguments).loss, vanilla("llama")(*arguments).loss)
    with pytest.raises(ValueError, match="inputs_embeds: the fused model looks tokens up itself"):
        fused("llama")(None, None, None, None, torch.zeros(1, 2, 72))


def test_attention_weights_are_refused() -> None:
    with pytest.raises(ValueError, match="keeps no attention weights; use the vanilla model"):
        fused("gpt2")(prompt(1, 4), output_attentions=True)


def test_unequal_texts_without_a_pad_token_are_refused() -> None:
    tokenizer = byte_tokenizer(300)
    tokenizer.pad_token = None
    generator = pipeline("text-generation", model=fused("gpt2").module, tokenizer=tokenizer)
    generator.model = fused("gpt2")
    generator.tokenizer.pad_token = None
    with pytest.raises(ValueError, match=r"pad_token|padding token"):
        generator(["abc", "a"], batch_size=2, max_new_tokens=3)
