"""Long texts: only the model's own limit applies."""

import pytest
import torch
from helpers.models.engines import fused, greedy, prompt, vanilla
from helpers.models.small_models import POSITIONS

LONG = 2000


@pytest.mark.parametrize("name", ["bloom", "llama", "mistral"])
def test_each_of_two_thousand_tokens_is_a_best_one(name: str) -> None:
    """Each token is the best one for the vanilla model after the text before it, or equally good."""
    ids = prompt(1, 10)
    text = greedy(fused(name), ids, LONG)
    assert text.shape == (1, 10 + LONG)
    with torch.no_grad():
        logits = vanilla(name)(text).logits[0, 9:-1]
    chosen = logits.gather(1, text[0, 10:, None])[:, 0]
    gap = (logits.amax(dim=1) - chosen) / (logits.amax(dim=1) - logits.amin(dim=1))
    assert float(gap.max()) <= 1e-4


@pytest.mark.parametrize("name", ["gpt2", "gpt-neo", "opt"])
def test_learned_positions_end_with_a_clear_error(name: str) -> None:
    engine = fused(name)
    words = f"{POSITIONS + 1} tokens are more than the model's {POSITIONS} positions; shorten the prompt or the output"
    assert engine(prompt(1, POSITIONS)).logits.shape == (1, POSITIONS, 131)
    with pytest.raises(ValueError, match=words):
        engine(prompt(1, POSITIONS + 1))
    with pytest.raises(ValueError, match=words):
        greedy(engine, prompt(1, POSITIONS - 5), 7)
    assert greedy(engine, prompt(1, POSITIONS - 5), 6).shape == (1, POSITIONS + 1)


def test_a_refused_step_leaves_the_cache_as_it_was() -> None:
    engine, ids = fused("gpt2"), prompt(1, POSITIONS)
    cache = engine(ids[:, :-1]).past_key_values
    with pytest.raises(ValueError, match="positions"):
        engine(ids[:, :2], past_key_values=cache)
    assert cache.get_seq_length() == POSITIONS - 1
    assert torch.equal(engine(ids[:, -1:], past_key_values=cache).logits.argmax(), engine(ids).logits[0, -1].argmax())
