"""Levels of classes, folders and presets, with what was recognised and why there is no higher one."""

from collections import Counter

import pytest
from helpers.models.any_models import any_model
from transformers import Cohere2Config

from labkit.engine.levels import NONE, Level, all_levels, config_of_class, level_of
from labkit.models.derived.row import derived_policy
from labkit.models.level_names import DERIVED, HOOKS, ROW
from labkit.models.presets import PRESETS


def test_a_preset_has_a_row() -> None:
    level = level_of(PRESETS["gpt2"].hf_config)
    assert (level.architecture, level.level, level.why) == ("GPT2LMHeadModel", ROW, "")
    assert "12 layers of 768, 12 heads of 64" in level.facts


def test_a_derived_row_says_what_was_recognised() -> None:
    level = level_of(any_model("granite", residual_multiplier=0.25, tie_word_embeddings=True).config)
    assert (level.architecture, level.level, level.why) == ("GraniteForCausalLM", DERIVED, "")
    assert {"rms norms before attention and MLP", "residual scale 0.25"} <= set(level.facts)


def test_hooks_say_why_there_is_no_row_and_what_they_replace() -> None:
    config = config_of_class("PhimoeForCausalLM")
    assert config is not None
    level = level_of(config)
    assert (level.level, level.why) == (HOOKS, "a router that no row describes: its experts or their shares are others")
    assert "1 x head: lm_head" in level.facts


def test_a_class_is_found_by_its_name_and_its_model_type() -> None:
    by_name, by_type = config_of_class("GraniteForCausalLM"), config_of_class("granite")
    assert type(by_name) is type(by_type) is not type(None)
    assert config_of_class("nosuch") is None


def test_sizes_without_a_known_name_are_bounded() -> None:
    config = any_model("granite").config
    config.num_memories = 1 << 40
    level = level_of(config)
    assert level.level == NONE
    assert "num_memories = 1099511627776" in level.why


@pytest.mark.sweep
def test_nearly_all_classes_of_transformers_run() -> None:
    """Classes whose own default config fails are the rest."""
    levels: list[Level] = list(all_levels())
    counts = Counter(level.level for level in levels)
    assert counts[ROW] + counts[DERIVED] >= 60
    assert counts[NONE] <= 30
    assert all(level.why for level in levels if level.level in (HOOKS, NONE))


@pytest.mark.parametrize(("scale", "heads"), [(0.25, 32), (1 / 24, 32)])
def test_a_number_that_several_fields_may_give_is_traced_to_one(scale: float, heads: int) -> None:
    """The small model has 4 heads of 24 numbers."""
    config = Cohere2Config(logit_scale=scale, num_attention_heads=heads, num_key_value_heads=8, num_hidden_layers=4)
    policy = derived_policy(config)
    assert policy.model_config(config).logit_scale == scale
