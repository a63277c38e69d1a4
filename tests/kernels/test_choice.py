"""The choice of tokens: the same tokens, and the same state of torch's random numbers, as transformers."""

from math import inf, nan
from typing import Any

import pytest
import torch
from helpers.kernels.choices import BATCH, LENGTH, OF_BATCH, SETTINGS, Processors, by_transformers, drawn_case
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation import logits_process as hf

from labkit.engine.hf.known_processors import known_rules
from labkit.kernels.checks import unchecked
from labkit.kernels.choice import (
    BIAS,
    DECAY,
    ETA,
    NGRAM,
    ONLY_TOKENS,
    PENALTY_OF_IDS,
    PENALTY_OF_TEXT,
    SET_SCORES,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    ScoreRule,
    choose,
    draws_like_torch,
)
from labkit.system.errors import UserError, UserTypeError


def agree(name: str, logits: Tensor, text: Tensor, seed: int, *, samples: bool, helps: bool = False) -> bool:
    """Asserts that `choose`, as the engine calls it, makes the choice of transformers, or none and leaves the
    generator. Returns whether it made one. helps: whether transformers processes sequences in which rounding decides.
    """
    processors = LogitsProcessorList(SETTINGS[name]())
    rules = known_rules(processors, (logits.shape[0], logits.shape[1]))
    assert rules is not None
    torch.manual_seed(seed)
    before = torch.get_rng_state()
    process = (lambda rows: processors(text[rows], logits[rows])) if helps else None
    chosen = unchecked(choose)(logits, text, rules(text.shape[1]), samples=samples, threads=2, process=process)
    if chosen is None:
        assert torch.equal(torch.get_rng_state(), before)
        return False
    after = torch.get_rng_state()
    torch.manual_seed(seed)
    assert torch.equal(chosen, by_transformers(processors, text, logits, samples=samples))
    assert torch.equal(torch.get_rng_state(), after)
    return True


@pytest.mark.parametrize("samples", [True, False])
@pytest.mark.parametrize("name", SETTINGS)
def test_tokens_are_those_of_transformers(name: str, samples: bool) -> None:
    made = [agree(name, *drawn_case(101, seed, 3.0), seed, samples=samples) for seed in range(20)]
    assert sum(made) >= 19


@pytest.mark.sweep
@pytest.mark.parametrize(("vocab", "seeds"), [(101, 300), (49_152, 20), (250_880, 3)])
@pytest.mark.parametrize("name", SETTINGS)
def test_tokens_of_every_vocabulary_are_those_of_transformers(name: str, vocab: int, seeds: int) -> None:
    """About 100,000 choices, most of them drawn."""
    for seed in range(seeds):
        for spread in (0.5, 2.0, 8.0):
            helps = name not in OF_BATCH and seed % 2 == 0
            agree(name, *drawn_case(vocab, seed, spread), seed, samples=seed % 5 != 0, helps=helps)


def test_sequences_in_which_rounding_decides_are_processed_alone() -> None:
    """The others keep their choice, and all get the draws of their place in the batch."""
    logits, text = drawn_case(101, 0, 3.0)
    logits[1] = 2.0 * torch.arange(101).clamp(max=3)  # ties at every boundary
    processors = LogitsProcessorList([hf.TopPLogitsWarper(0.5)])
    processed: list[list[int]] = []

    def process(rows: Tensor) -> Tensor:
        processed.append(rows.tolist())
        return processors(text[rows], logits[rows])

    rules = known_rules(processors, (BATCH, 101))
    assert rules is not None
    for seed in range(20):
        torch.manual_seed(seed)
        chosen = choose(logits, text, rules(LENGTH), samples=True, process=process)
        torch.manual_seed(seed)
        assert chosen is not None
        assert torch.equal(chosen, by_transformers(processors, text, logits, samples=True))
    assert processed == [[1]] * 20


STRANGE = st.sampled_from([-inf, inf, nan, -1e30, -2.0, 0.0, -0.0, 1e-30, 1.0, 1.0000001, 3e38])
OF_LONG_TEXTS = OF_BATCH | {"forced end", "forced end later"}


@given(
    st.lists(STRANGE, min_size=1, max_size=1) | st.lists(STRANGE | st.floats(width=32), min_size=9, max_size=9),
    st.sampled_from([name for name in SETTINGS if name not in OF_LONG_TEXTS]),
    st.booleans(),
)
def test_strange_scores_never_give_another_token(scores: list[float], name: str, samples: bool) -> None:
    """Scores that are not numbers, infinite, equal or all removed, and a vocabulary of one token."""
    logits, text = torch.tensor([scores]), torch.zeros(1, 3, dtype=torch.int64)
    if known_rules(LogitsProcessorList(SETTINGS[name]()), (1, len(scores))) is not None:
        agree(name, logits, text, 0, samples=samples)


def test_ties_at_a_boundary_are_torchs() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 2.0, 2.0, 0.0, 3.0]] * BATCH)
    text = torch.zeros(BATCH, LENGTH, dtype=torch.int64)
    for name in ("top-k 1", "top-p", "top-p 0.3", "min-p", "typical", "all tokens"):
        for seed in range(30):
            agree(name, logits, text, seed, samples=True)
            agree(name, logits, text, seed, samples=False)


class OfTheUser(hf.TopKLogitsWarper):
    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        return scores


@pytest.mark.parametrize(
    "processors",
    [
        [OfTheUser(3)],
        [hf.TopKLogitsWarper(3), hf.TemperatureLogitsWarper(0.5)],
        [hf.TopKLogitsWarper(3, filter_value=-1e4)],
        [hf.SequenceBiasLogitsProcessor({(1, 4): -3.0, (2, 4): 8.0})],
        [hf.SequenceBiasLogitsProcessor({(500,): -3.0})],
        [hf.RepetitionPenaltyLogitsProcessor(1.3, prompt_ignore_length=torch.tensor([1, 2, 3]))],
        [hf.LogitNormalization()],
    ],
    ids=[
        "a user's class",
        "an unusual order",
        "another mark",
        "two biases of a token",
        "out of bounds",
        "rows",
        "unknown",
    ],
)
def test_what_is_not_known_is_left_to_transformers(processors: Processors) -> None:
    assert known_rules(LogitsProcessorList(processors), (BATCH, 101)) is None


def test_the_draws_of_this_torch_are_known() -> None:
    """Else choosing is slower: torch makes the draws of the whole vocabulary."""
    state = torch.get_rng_state()
    assert draws_like_torch()
    assert torch.equal(torch.get_rng_state(), state)


def test_draws_of_another_torch_are_taken_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("labkit.kernels.choice.draws_like_torch", lambda: False)
    for name in ("all tokens", "top-p", "many"):
        assert all(agree(name, *drawn_case(101, seed, 3.0), seed, samples=True) for seed in range(10))


def test_the_generator_goes_on_where_transformers_would() -> None:
    """From any place in its words, over many steps."""
    torch.manual_seed(3)
    torch.rand(77)
    logits, text = drawn_case(307, 0, 2.0)
    state = torch.get_rng_state()
    ours = [choose(logits, text, (), samples=True) for _ in range(50)]
    after = torch.get_rng_state()
    torch.set_rng_state(state)
    theirs = [by_transformers(LogitsProcessorList(), text, logits, samples=True) for _ in range(50)]
    assert all(a is not None and torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert torch.equal(torch.get_rng_state(), after)


@pytest.mark.parametrize("name", SETTINGS)
def test_the_rules_of_processors_are_accepted(name: str) -> None:
    logits, text = drawn_case(101, 0, 3.0)
    rules = known_rules(LogitsProcessorList(SETTINGS[name]()), (BATCH, 101))
    assert rules is not None
    torch.manual_seed(0)
    expected = unchecked(choose)(logits, text, rules(LENGTH), samples=True)
    torch.manual_seed(0)
    chosen = choose(logits, text, rules(LENGTH), samples=True)
    if chosen is None or expected is None:
        assert chosen is expected
    else:
        assert torch.equal(chosen, expected)


IDS = torch.tensor([1, 2])
LOGITS, TEXT = torch.zeros(2, 5), torch.zeros(2, 3, dtype=torch.int64)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"logits": LOGITS.double()}, r"logits: expected contiguous float32 .*, got torch.float64 \[2, 5\]"),
        ({"logits": torch.zeros(2, 0)}, r"logits: expected .*, got torch.float32 \[2, 0\]"),
        ({"logits": LOGITS.to("meta")}, "logits: .* on meta instead of cpu"),
        ({"logits": LOGITS[:, ::2]}, "logits: .* that is not contiguous"),
        ({"text": TEXT[:1]}, r"text: expected contiguous int64 \[2, .*, got torch.int64 \[1, 3\]"),
        ({"text": TEXT.int()}, "text: .* got torch.int32"),
        ({"text": [[1, 2, 3]] * 2}, "text: .* got list"),
        ({"samples": 1}, "got samples = 1, expected False or True"),
        ({"threads": 0}, "got threads = 0, expected 1"),
        ({"threads": -1}, "got threads = -1, expected 1"),
        ({"process": 3}, "process: expected a function or None, got int"),
        ({"rules": ScoreRule(TOP_K, count=3)}, "rules: expected a list or tuple of ScoreRules, got ScoreRule"),
        ({"rules": [TOP_K]}, r"rules\[0\]: expected a ScoreRule, got int"),
    ],
)
def test_arguments_that_do_not_fit_are_named(arguments: dict[str, Any], words: str) -> None:
    fitting: dict[str, Any] = {"logits": LOGITS, "text": TEXT, "rules": (), "samples": False}
    with pytest.raises((UserError, UserTypeError), match=words):
        choose(**fitting | arguments)


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        ([ScoreRule(99, 1.3)], r"got rules\[0\]\.kind = 99, expected 0 to 13"),
        ([ScoreRule(SET_SCORES, 1.3, count=5)], r"got rules\[0\]\.count = 5, expected 0"),
        ([ScoreRule(SET_SCORES, 1.3)], r"rules\[0\]\.ids: expected contiguous int64 \[any\], got NoneType"),
        ([ScoreRule(ONLY_TOKENS, 0.0, IDS.int())], r"ids: .* got torch.int32"),
        ([ScoreRule(DECAY, 0.5, torch.tensor([1, 3, 2, 3])[::2])], r"ids: .* not contiguous"),
        (
            [ScoreRule(SET_SCORES, -inf, torch.tensor([3, 5]))],
            r"ids: got 3 to 5, expected 0 to 4: the tokens of the voc",
        ),
        ([ScoreRule(BIAS, 1.0, torch.tensor([-1, 2]))], r"ids: got -1 to 2, expected 0 to 4"),
        ([ScoreRule(PENALTY_OF_IDS, 1.3, IDS)], r"ids: expected contiguous int64 \[2, any\], got torch.int64 \[2\]"),
        ([ScoreRule(TEMPERATURE, 0.5, IDS)], r"rules\[0\]\.ids: got Tensor, expected None for kind 2"),
        ([ScoreRule(TEMPERATURE, nan)], r"rules\[0\]\.value = nan, expected a finite float32 of 0 or more"),
        ([ScoreRule(DECAY, -inf, IDS)], r"rules\[0\]\.value = -inf, expected a finite float32"),
        ([ScoreRule(TOP_P, 1.5)], r"rules\[0\]\.value = 1\.5, expected a finite float32 of 0 or more, at most 1"),
        ([ScoreRule(TOP_K)], r"rules\[0\]\.count = 0, expected 1 or more"),
        ([ScoreRule(NGRAM, count=-1)], r"rules\[0\]\.count = -1, expected 1 or more"),
        ([ScoreRule(PENALTY_OF_TEXT, 1.3, count=4)], r"rules\[0\]\.count = 4, expected 0 to 3"),
        ([ScoreRule(ETA, 0.1, keep=0)], r"rules\[0\]\.keep = 0, expected 1 or more"),
        (
            [ScoreRule(TOP_K, count=3), ScoreRule(TEMPERATURE, 0.5)],
            r"rules\[1\]: got kind 2 after kind 8; put the rules",
        ),
    ],
)
def test_rules_that_do_not_fit_are_named(rules: list[ScoreRule], words: str) -> None:
    with pytest.raises((UserError, UserTypeError), match=words):
        choose(LOGITS, TEXT, rules, samples=False)
