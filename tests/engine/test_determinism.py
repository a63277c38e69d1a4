"""Results do not depend on chance, on the number of threads, or on earlier runs."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from helpers.models.engines import FEW, IMPLS, fused, greedy, prompt, vanilla

import labkit


@pytest.mark.parametrize("name", FEW)
def test_logits_are_bitwise_the_same_for_any_number_of_threads(name: str) -> None:
    """Tests the C++ step; torch's results for the reference may differ in the last bits."""
    engine, ids = fused(name), prompt(3, 11)
    runs = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        out = engine(ids)
        runs.append((out.logits, engine(ids[:, :1], past_key_values=out.past_key_values).logits))
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(run, runs[0], strict=True))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_greedy_tokens_are_the_same_for_any_number_of_threads(name: str, impl: str) -> None:
    ids = prompt(2, 9)
    expected = greedy(vanilla(name), ids, 20)
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        assert torch.equal(greedy(fused(name, impl), ids, 20), expected)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("name", ["gptj", "llama"])
def test_twenty_greedy_runs_are_bitwise_the_same(name: str, impl: str) -> None:
    """Tokens and logits of the decode loop, with the machine's default number of threads."""
    ids, options = prompt(2, 9), {"return_dict_in_generate": True, "output_logits": True}
    first, *others = (greedy(fused(name, impl), ids, 12, **options) for _ in range(20))
    for run in others:
        assert torch.equal(run.sequences, first.sequences)
        assert all(torch.equal(*logits) for logits in zip(run.logits, first.logits, strict=True))


@pytest.mark.parametrize("impl", IMPLS)
def test_callers_in_several_threads_may_share_an_engine(impl: str) -> None:
    engine, texts = labkit.init_inference(vanilla("llama"), impl=impl), [prompt(2, 5 + seed, seed) for seed in range(4)]
    expected = [greedy(engine, text, 40) for text in texts]
    with ThreadPoolExecutor(len(texts)) as pool:
        actual = list(pool.map(lambda text: greedy(engine, text, 40), texts))
    assert all(
        torch.equal(text_of_thread, expected_text)
        for text_of_thread, expected_text in zip(actual, expected, strict=True)
    )


@pytest.mark.parametrize("name", FEW)
def test_a_run_does_not_depend_on_the_one_before(name: str) -> None:
    """Workspaces and tables stay from call to call, and grow."""
    engine = labkit.init_inference(vanilla(name))
    expected = engine(prompt(2, 9)).logits
    engine(prompt(7, 30, seed=1))
    engine(prompt(1, 1, seed=2))
    assert torch.equal(engine(prompt(2, 9)).logits, expected)
