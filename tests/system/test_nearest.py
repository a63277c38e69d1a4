"""Suggestions for mistyped names."""

import pytest

from labkit.models.presets import PRESETS
from labkit.system.nearest import did_you_mean


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("smollm2_135m", " (did you mean 'smollm2-135m', 'smollm2-shape' or 'llama-2-13b'?)"),
        ("GPT2-medum", " (did you mean 'gpt2-medium', 'gpt2-large' or 'gpt2-xl'?)"),
        ("mistral7b", " (did you mean 'mistral-7b' or 'mixtral-8x7b'?)"),
        ("zzz", ""),
        ("", ""),
    ],
)
def test_at_most_three_names_are_offered_the_nearest_first(name: str, hint: str) -> None:
    assert did_you_mean(name, PRESETS) == hint


def test_names_are_offered_as_they_are_spelled() -> None:
    assert did_you_mean("t5block", ["T5Block", "other"]) == " (did you mean 'T5Block'?)"
    assert did_you_mean("anything", []) == ""
