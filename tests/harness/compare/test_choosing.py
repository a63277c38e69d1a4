"""Sides that sample draw vanilla's tokens, and settings that cannot be are refused before anything starts."""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.sweeps import sweep, swept

from labkit.engine import init_inference
from labkit.harness import Comparison, load_records
from labkit.harness.compare import plan
from labkit.harness.compare.choosing import SETTINGS, generation_arguments, sample_text
from labkit.harness.compare.compare import compare, comparison_case
from labkit.harness.compare.loader import load_side
from labkit.harness.compare.plan import SideSpec, check_sides
from labkit.harness.compare.sides import SIDES
from labkit.system.errors import UserError
from labkit.weights.resolve import resolve

TYPICAL = "top_p=0.9, temperature=0.8"
SAMPLES = (
    *(TYPICAL, "temperature=0.5", "top_k=3", "top_p=0.5", "min_p=0.02", "typical_p=0.5"),
    *("epsilon_cutoff=0.001", "eta_cutoff=0.001", "repetition_penalty=1.5"),
)
CASE: dict[str, Any] = {"model": "tiny-gpt2", "dtype": "float32", "batch": 2, "prompt": 9, "new": 6, "threads": 1}


@pytest.mark.parametrize(
    ("given", "text", "arguments"),
    [
        (None, "", {"do_sample": False}),
        ("", "", {"do_sample": False}),
        ({}, "", {"do_sample": False}),
        (TYPICAL, "temperature=0.8,top_p=0.9", {"do_sample": True, "temperature": 0.8, "top_p": 0.9}),
        ({"top_k": 5, "temperature": 2}, "temperature=2,top_k=5", {"do_sample": True, "temperature": 2.0, "top_k": 5}),
        ("top_k=0", "top_k=0", {"do_sample": True, "top_k": 0}),
    ],
)
def test_settings_are_read_from_text_and_mappings(given: Any, text: str, arguments: dict[str, Any]) -> None:
    assert sample_text(given) == text
    assert sample_text(text) == text
    assert generation_arguments(text) == arguments


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("top_p", r"got sample = 'top_p' with 'top_p', a word without =; expected settings, such as top_p=0.9"),
        ("top_p=0.9,top_p=0.8", "a setting that is there already"),
        (
            "topp=0.9",
            r"got 'topp' in sample \(did you mean 'top_p' or 'top_k'\?\); expected some of temperature, top_k",
        ),
        ("top_p=high", "got top_p = 'high', expected a number"),
        ("top_p=1.1", "got top_p = 1.1, expected at most 1"),
        ("top_p=nan", "got top_p = nan, expected a number"),
        ("top_k=2.5", "got top_k = 2.5, expected a whole number"),
        *(
            (f"temperature={least}", f"got temperature = {least}, expected at least 1e-06; leave sample out for greedy")
            for least in ("0", "1e-39", "1e-45", "1e-300")
        ),
        *((f"repetition_penalty={least}", "expected at least 1e-06") for least in ("0", "1e-39", "1e-300")),
        ({"top_k": True}, "got top_k = True, expected a number"),
        ({1: 2}, "got '1' in sample|got 1 in sample"),
        (0.9, "got sample = 0.9, expected settings"),
    ],
)
def test_other_settings_are_refused(given: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        comparison_case(**CASE, sample=given)


@pytest.mark.parametrize("name", ["hf-static", "fused", "accelerate"])
@pytest.mark.parametrize("sample", swept(SAMPLES, (TYPICAL,)))
def test_a_side_draws_the_tokens_of_vanilla(name: str, sample: str) -> None:
    if name == "accelerate":
        pytest.importorskip("accelerate")
    prompt = torch.arange(40, 49).repeat(2, 1)
    texts = []
    for side_name in ("hf-eager", name):
        side = load_side(side_name, resolve("tiny-gpt2"), torch.float32, threads=1)
        arguments = side.arguments(2, 9, sample_text(sample))
        torch.manual_seed(3)
        texts.append(side.generate(prompt, max_new_tokens=12, **arguments))
    assert torch.equal(*texts)
    assert not torch.equal(texts[0], side.generate(prompt, max_new_tokens=12, **side.arguments(2, 9)))


def test_a_side_that_is_greedy_is_refused_with_those_that_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "check_side", lambda *names, **sizes: None)  # whether it is installed
    for row in SIDES.values():
        if not row.samples:
            with pytest.raises(UserError, match=f"side '{row.name}', which is greedy; expected .*: hf-eager, hf-gemm"):
                check_sides([SideSpec(row.name, 1)], comparison_case(**CASE, sample=TYPICAL))
    assert {row.name for row in SIDES.values() if not row.samples} >= {"hf-graph", "llama.cpp", "openvino"}


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("bound", ["least", "most"])
def test_the_bounds_of_a_setting_can_be_sampled_with(name: str, bound: str) -> None:
    """They give probabilities without infinities: torch draws no token from others."""
    row = SETTINGS[name]
    value = row.least if bound == "least" else row.most
    value = 1e-300 if row.above and value == 0 else value
    engine = init_inference("tiny-gpt2", replace_with_kernel_inject=True)
    arguments = generation_arguments(sample_text({name: value}))
    tokens = engine.generate(torch.arange(40, 49)[None], max_new_tokens=2, pad_token_id=0, **arguments)
    assert tokens.shape == (1, 11)


def test_every_setting_is_tried() -> None:
    assert set().union(*map(generation_arguments, SAMPLES)) == {"do_sample", *SETTINGS}


def test_the_case_of_a_record_says_how_tokens_were_chosen() -> None:
    assert comparison_case(**CASE).title == "tiny-gpt2, float32, batch 2, 9 + 6 tokens"
    case = comparison_case(**CASE, sample=TYPICAL)
    assert case.title == "tiny-gpt2, float32, batch 2, 9 + 6 tokens, sampled with temperature=0.8,top_p=0.9"
    assert type(case).model_validate_json(case.model_dump_json()) == case


@sweep
def test_both_sides_of_a_comparison_draw_the_same_tokens(tmp_path: Path) -> None:
    record = compare(**CASE, sample=TYPICAL, rounds=2, output=tmp_path)
    assert record.tokens_equal
    (kept,) = load_records(tmp_path)
    assert isinstance(kept, Comparison)
    assert kept.case.sample == "temperature=0.8,top_p=0.9"
