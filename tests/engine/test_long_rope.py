"""Models with other rotary frequencies in long texts: tokens of transformers, or a refusal, wherever a text crosses."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.models.any_models import any_model
from helpers.models.engines import error
from helpers.models.long_ropes import PHI_4_MINI, SHORT, long_rope_model
from helpers.models.offloaded import kv_on_disk, streamed_model
from torch import Tensor
from transformers import DynamicCache, Phi3Config, PreTrainedModel

import labkit
from labkit.engine.engine import DecoderEngine, InjectedEngine
from labkit.engine.levels import level_of
from labkit.engine.memory.kv_cache import KVCache

LONGER = (
    rf"position {SHORT} needs the rotation for texts of more than {SHORT} tokens, but the {SHORT} tokens in the cache"
)
BEFORE, AFTER = (5, 12), (SHORT + 3, 6)  # tokens of a prompt, and new ones
CROSSING = (SHORT - 4, 10)
GREEDY: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}


@cache
def model() -> PreTrainedModel:
    return long_rope_model()


@cache
def engine() -> DecoderEngine:
    made = labkit.init_inference(model(), dtype=torch.float32)
    assert isinstance(made, DecoderEngine)
    assert (made.level, made.model_config.short_positions) == ("derived row", SHORT)
    return made


def prompt(tokens: int, rows: int = 2) -> Tensor:
    return torch.randint(3, 128, (rows, tokens), generator=torch.Generator().manual_seed(0))


def text(side: Any, length: tuple[int, int], **options: Any) -> Tensor:
    tokens: Tensor = side.generate(prompt(length[0]), max_new_tokens=length[1], **GREEDY | options)
    return tokens


@torch.no_grad()
def test_both_sets_of_frequencies_show_in_the_tokens() -> None:
    """Else the tests of this file could not fail."""
    alike = long_rope_model(rope_scaling=PHI_4_MINI["rope_scaling"] | {"long_factor": [1.0] * 48})
    assert torch.equal(text(alike, BEFORE), text(model(), BEFORE))
    assert not torch.equal(text(alike, AFTER), text(model(), AFTER))


@pytest.mark.parametrize("length", [BEFORE, AFTER, CROSSING, (SHORT, 2), (5, 80)])
def test_greedy_tokens_equal_those_of_transformers(length: tuple[int, int]) -> None:
    assert torch.equal(text(engine(), length), text(model(), length))


def test_logits_of_a_text_that_crosses_equal_those_of_transformers() -> None:
    options = {"return_dict_in_generate": True, "output_logits": True, "max_new_tokens": CROSSING[1]}
    sides = [side.generate(prompt(CROSSING[0]), **GREEDY | options) for side in (engine(), model())]
    assert torch.equal(*(generated.sequences for generated in sides))
    for ours, theirs in zip(*(generated.logits for generated in sides), strict=True):
        assert error(ours, theirs) < 1e-4


@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": True, "top_k": 5},
        {"repetition_penalty": 1.3},
        {"num_beams": 3},
        {"num_beams": 2, "do_sample": True},
        {"use_cache": False},
        {"return_dict_in_generate": True, "output_hidden_states": True},
        {"prompt_lookup_num_tokens": 3},
    ],
    ids=lambda options: ", ".join(options),
)
def test_every_way_to_generate_crosses_as_transformers_does(options: dict[str, Any]) -> None:
    texts = []
    for side in (engine(), model()):
        torch.manual_seed(3)
        rows = prompt(CROSSING[0], 1 if "prompt_lookup_num_tokens" in options else 2)
        tokens = side.generate(rows, max_new_tokens=CROSSING[1], **GREEDY | options)
        texts.append(tokens if isinstance(tokens, Tensor) else tokens.sequences)
    assert torch.equal(*texts)


@pytest.mark.parametrize("pads", [7, SHORT - 8])
def test_the_longest_row_of_a_batch_decides_for_all(pads: int) -> None:
    ids = prompt(CROSSING[0])
    mask = torch.ones_like(ids)
    mask[0, :pads] = 0
    texts = [side.generate(ids, attention_mask=mask, max_new_tokens=12, **GREEDY) for side in (engine(), model())]
    assert torch.equal(*texts)


def test_padding_of_all_rows_does_not_count() -> None:
    """transformers itself counts it: it computes such a text anew too early, and its keys have two rotations."""
    ids = prompt(CROSSING[0])
    mask = torch.ones(2, 6 + ids.shape[1], dtype=torch.long)
    mask[:, :6] = 0
    padded = torch.cat((torch.zeros(2, 6, dtype=torch.long), ids), dim=1)
    tokens = engine().generate(padded, attention_mask=mask, max_new_tokens=CROSSING[1], **GREEDY)
    assert torch.equal(tokens[:, 6:], text(model(), CROSSING))


@torch.no_grad()
def test_logits_of_texts_at_once_and_step_by_step() -> None:
    ids = prompt(SHORT + 20)
    for tokens in (SHORT, SHORT + 1, SHORT + 20):
        expected = model()(ids[:, :tokens]).logits
        assert error(engine()(ids[:, :tokens]).logits, expected) < 1e-4
    for begin in (5, SHORT + 1):
        cache, end = engine().new_cache(), SHORT if begin < SHORT else SHORT + 4
        logits = [engine()(ids[:, :begin], past_key_values=cache).logits]
        logits += [engine()(ids[:, at : at + 1], past_key_values=cache).logits for at in range(begin, end)]
        assert error(torch.cat(logits, dim=1), model()(ids[:, :end]).logits) < 1e-4


@pytest.mark.parametrize("kind", [KVCache, DynamicCache])
def test_a_step_that_crosses_is_refused_and_leaves_its_cache(kind: type) -> None:
    cache = engine().new_cache() if kind is KVCache else DynamicCache()
    ids = prompt(SHORT + 1)
    engine()(ids[:, :SHORT], past_key_values=cache)
    for _ in range(2):
        with pytest.raises(ValueError, match=LONGER):
            engine()(ids[:, SHORT:], past_key_values=cache)
        assert cache.get_seq_length() == SHORT


@torch.no_grad()
def test_a_short_step_after_a_long_text_is_refused() -> None:
    cache, ids = engine().new_cache(), prompt(SHORT + 1)
    engine()(ids, past_key_values=cache)
    cache.crop(SHORT - 5)
    with pytest.raises(ValueError, match=rf"texts of at most {SHORT} tokens, but the {SHORT - 5} tokens in the cache"):
        engine()(ids[:, :1], past_key_values=cache)
    cache.reset()
    assert error(engine()(ids[:, :9], past_key_values=cache).logits, model()(ids[:, :9]).logits) < 1e-4


def test_a_prompt_in_parts_that_crosses_is_refused() -> None:
    with pytest.raises(ValueError, match=r"give the whole text at once and without past_key_values"):
        text(engine(), AFTER, prefill_chunk_size=SHORT)


@pytest.mark.parametrize("kind", [KVCache, DynamicCache])
def test_a_text_with_a_cache_crosses_if_all_its_tokens_are_given(kind: type) -> None:
    cache = engine().new_cache() if kind is KVCache else DynamicCache()
    ids, expected = prompt(CROSSING[0]), text(model(), CROSSING)
    engine()(ids[:, :20], past_key_values=cache)
    assert torch.equal(text(engine(), CROSSING, past_key_values=cache), expected)
    if kind is DynamicCache:
        assert cache.get_seq_length() == 20  # it would have keys with two rotations
    again = torch.cat((expected, prompt(2)), dim=1)
    texts = [side.generate(again, max_new_tokens=3, **GREEDY) for side in (engine(), model())]
    assert torch.equal(*texts)
    assert torch.equal(engine().generate(again, max_new_tokens=3, past_key_values=cache, **GREEDY), texts[0])


def test_a_text_whose_first_tokens_are_in_a_cache_alone_is_refused() -> None:
    cache, ids = engine().new_cache(), prompt(CROSSING[0])
    engine()(ids[:, :20], past_key_values=cache)
    mask = torch.ones_like(ids)
    with pytest.raises(ValueError, match=LONGER):
        engine().generate(ids[:, 20:], attention_mask=mask, past_key_values=cache, max_new_tokens=9, **GREEDY)


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_the_other_kernels_cross_too(impl: str) -> None:
    other = labkit.init_inference(model(), dtype=torch.float32, impl=impl)
    assert torch.equal(text(other, CROSSING), text(model(), CROSSING))


def test_stage_by_stage_it_is_the_same() -> None:
    runner: Any = engine().fused.runner
    with runner.stage_by_stage():
        assert torch.equal(text(engine(), CROSSING), text(model(), CROSSING))


def test_offloaded_layers_and_an_offloaded_cache_cross_too(tmp_path: Path) -> None:
    options: dict[str, Any] = {"dtype": torch.float32}
    for other in (streamed_model(model(), tmp_path, **options), kv_on_disk(model(), tmp_path, **options)):
        for length in (BEFORE, CROSSING, AFTER):
            assert torch.equal(text(other, length), text(model(), length))


def test_saved_weights_and_a_folder_of_transformers_have_both_rotations(tmp_path: Path) -> None:
    model().save_pretrained(tmp_path / "folder")
    labkit.init_inference(model(), dtype=torch.float32, save_mp_checkpoint_path=tmp_path / "saved")
    for path in ("folder", "saved"):
        loaded = labkit.init_inference(tmp_path / path, dtype=torch.float32)
        assert loaded.level == "derived row"
        assert torch.equal(text(loaded, CROSSING), text(model(), CROSSING))


def test_a_model_that_has_read_a_long_text_is_unchanged() -> None:
    own = long_rope_model()
    text(own, AFTER)
    made = labkit.init_inference(own, dtype=torch.float32)
    assert made.level == "derived row"
    assert torch.equal(text(made, BEFORE), text(own, BEFORE))


@pytest.mark.parametrize(
    ("frequencies", "reason"),
    [("original_inv_freq", "original_inv_freq is 1.01"), ("long_inv_freq", "frequencies for long texts that are not")],
)
def test_other_frequencies_than_the_configs_get_no_row(frequencies: str, reason: str) -> None:
    own = long_rope_model()
    text(own, AFTER)
    getattr(own.model.rotary_emb, frequencies).mul_(1.01)
    made = labkit.init_inference(own, dtype=torch.float32)
    assert isinstance(made, InjectedEngine)
    assert reason in made.why
    assert torch.equal(text(made, CROSSING), text(own, CROSSING))


def test_phi_4_mini_has_a_derived_row() -> None:
    config = Phi3Config(**PHI_4_MINI | {"num_hidden_layers": 2})
    level = level_of(config)
    assert level.level == "derived row"
    assert {"positions: rotary, 96 of 128 numbers", "another rotation beyond 4096 positions"} < {*level.facts}


def test_a_class_that_keeps_its_cache_when_a_text_crosses_gets_no_row() -> None:
    """Only Phi-3's class computes the text anew. Keys with two rotations are no semantics of a row."""
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 12, "long_factor": [4.0] * 12}
    own = any_model("olmo2", rope_parameters=rope | {"rope_theta": 1e4, "original_max_position_embeddings": 64})
    made = labkit.init_inference(own, dtype=torch.float32)
    assert isinstance(made, InjectedEngine)
    assert "a padded generation differ" in made.why
