"""The choice of tokens in Triton's interpreter: the same tokens, and the same draws, as transformers."""

from math import inf, nan

import pytest
import torch
from helpers.kernels.choices import BATCH, LENGTH, SETTINGS, by_transformers, drawn_case
from helpers.kernels.gpus import INTERPRETED, ON_GPU, marked
from helpers.sweeps import swept
from torch import Tensor
from transformers import LogitsProcessorList

from labkit.engine.hf.known_processors import known_rules
from labkit.kernels import gpu
from labkit.kernels.choice import SET_SCORES, TOP_K, ScoreRule
from labkit.kernels.choice.triton_impl import TABLE, DeviceChoice

QUICK = ("top-k, top-p", "min-p of 7", "typical", "eta", "repetition of the prompt", "biases", "decay", "many")
DOUBTED = {"top-p of 7"}  # a rule whose minimum of tokens is not its default is left to transformers
interpreted = marked([*INTERPRETED, pytest.mark.filterwarnings("ignore::RuntimeWarning")])


def chosen(choice: DeviceChoice, text: Tensor, rules: list[ScoreRule]) -> Tensor | None:
    assert choice.set(text, rules)
    choice.launch(gpu.default_launcher())
    return choice.tokens(len(text))


def only(tokens: Tensor | None) -> Tensor:
    assert tokens is not None
    return tokens


def agree(name: str, logits: Tensor, text: Tensor, seed: int, *, samples: bool) -> bool:
    """Asserts that the kernel makes the choice of transformers, or none and leaves the generator. Returns whether it
    made one.
    """
    processors = LogitsProcessorList(SETTINGS[name]())
    rules = known_rules(processors, (logits.shape[0], logits.shape[1]))
    assert rules is not None
    generator = torch.cuda if logits.is_cuda else torch
    generator.manual_seed(seed)
    before = generator.get_rng_state()
    tokens = chosen(DeviceChoice(logits, LENGTH, samples=samples), text, list(rules(text.shape[1])))
    after = generator.get_rng_state()
    if tokens is None:
        assert torch.equal(after, before)
        return False
    generator.manual_seed(seed)
    assert torch.equal(tokens, by_transformers(processors, text, logits, samples=samples))
    assert torch.equal(generator.get_rng_state(), after)
    return True


@interpreted
@pytest.mark.parametrize("samples", [True, False])
@pytest.mark.parametrize("name", swept(list(SETTINGS), QUICK))
def test_tokens_are_those_of_transformers(name: str, samples: bool) -> None:
    made = [agree(name, *drawn_case(101, seed, 3.0), seed, samples=samples) for seed in (0, 1)]
    assert any(made) or name in DOUBTED


@interpreted
@pytest.mark.parametrize("name", swept(["all tokens", "top-k 50", "top-p", "min-p", "typical"], ["top-p"]))
def test_strange_scores_never_give_another_token(name: str) -> None:
    text = torch.zeros(1, LENGTH, dtype=torch.int64)
    for row in ([nan, 1.0, 2.0], [inf, 1.0, 2.0], [-inf] * 3, [2.0, 2.0, 1.0], [-0.0, 0.0, -inf], [3e38, 1.0, -3e38]):
        usable = max(row) < inf and max(row) > -inf and row[0] == row[0]
        for samples in (True, False):
            logits = torch.tensor([row])
            if usable:
                agree(name, logits, text, 0, samples=samples)
            else:
                processors = LogitsProcessorList(SETTINGS[name]())
                rules = known_rules(processors, (1, 3))
                assert rules is not None
                assert chosen(DeviceChoice(logits, LENGTH, samples=samples), text, list(rules(LENGTH))) is None


@interpreted
def test_rules_may_change_between_launches() -> None:
    logits, text = drawn_case(101, 0, 3.0)
    choice = DeviceChoice(logits, LENGTH, samples=False)
    best = logits.argmax(dim=1)
    rule = ScoreRule(SET_SCORES, -inf, best)
    for _ in range(2):
        assert torch.equal(only(chosen(choice, text, [])), best)
        assert not torch.isin(only(chosen(choice, text, [rule])), best).any()


@interpreted
def test_fewer_sequences_and_shorter_texts_than_the_memory_holds() -> None:
    logits, text = drawn_case(101, 0, 3.0)
    choice = DeviceChoice(logits, LENGTH + 30, samples=True)
    torch.manual_seed(0)
    tokens = only(chosen(choice, text[:2, :5], []))
    torch.manual_seed(0)
    assert torch.equal(tokens, by_transformers(LogitsProcessorList(), text[:2], logits[:2], samples=True))


@interpreted
def test_what_the_memory_cannot_hold_is_refused_and_draws_nothing() -> None:
    logits, text = drawn_case(101, 0, 3.0)
    choice, state = DeviceChoice(logits, LENGTH - 1, samples=True), torch.get_rng_state()
    many = ScoreRule(SET_SCORES, -inf, torch.zeros(TABLE, dtype=torch.int64))
    assert not choice.set(text, [])
    assert not choice.set(text[:, 1:], [many])
    assert choice.set(text[:, 1:], [ScoreRule(TOP_K, count=3)])
    assert choice.tokens(BATCH) is not None
    assert not torch.equal(torch.get_rng_state(), state)


@marked(ON_GPU)
@pytest.mark.parametrize("vocab", [101, 49_152, 250_880])
@pytest.mark.parametrize("name", SETTINGS)
def test_tokens_on_a_gpu_are_those_of_transformers(name: str, vocab: int) -> None:
    made = []
    for seed in range(10):
        logits, text = (tensor.cuda() for tensor in drawn_case(vocab, seed, (0.5, 2.0, 8.0)[seed % 3]))
        made.append(agree(name, logits, text, seed, samples=seed % 5 != 0))
    assert sum(made) >= 5 or name in DOUBTED
