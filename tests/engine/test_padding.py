"""Sequences of unequal length in one batch: padding at any place changes no visible result."""

import pytest
import torch
from helpers.models.engines import FEW, IMPLS, WHOLE, error, few_models, fused, greedy, prompt, vanilla
from helpers.models.small_models import SMALL_CONFIGS, WINDOW
from helpers.sweeps import crossed, swept
from torch import Tensor

LENGTHS = (5, 11, 1, 8)
TOTAL = 11
SAME = 1e-5
FEW_WHOLE = [name for name in FEW if name in WHOLE]
each_impl = pytest.mark.parametrize("impl", IMPLS)


def padded(side: str) -> tuple[list[Tensor], Tensor, Tensor]:
    """(sequences [length], ids [batch, TOTAL], mask); "holes" means padding on the left and in the middle."""
    ids, mask = prompt(len(LENGTHS), TOTAL), torch.zeros(len(LENGTHS), TOTAL, dtype=torch.int64)
    for row, length in enumerate(LENGTHS):
        if side == "left":
            mask[row, TOTAL - length :] = 1
        elif side == "right":
            mask[row, :length] = 1
        else:
            mask[row, torch.linspace(row, TOTAL - 1, length).long()] = 1
            mask[row, -1] = 1
    return [ids[row][mask[row].bool()] for row in range(len(LENGTHS))], ids.where(mask.bool(), 0), mask


def places(mask: Tensor) -> Tensor:
    """Positions that each text would have alone."""
    return (mask.cumsum(1) - 1).clamp(min=0)


@pytest.mark.parametrize("side", ["left", "right", "holes"])
@few_models
def test_without_positions_they_are_those_of_vanilla(name: str, side: str) -> None:
    """The default positions differ between models: some count visible tokens, some count all tokens."""
    _, ids, mask = padded(side)
    visible, new_ids = mask.bool(), prompt(len(LENGTHS), 2, seed=1)
    longer = torch.cat((mask, torch.ones_like(new_ids)), dim=1)
    with torch.no_grad():
        first = vanilla(name)(ids, attention_mask=mask, use_cache=True)
        next_logits = vanilla(name)(new_ids, attention_mask=longer, past_key_values=first.past_key_values).logits
    actual = fused(name)(ids, attention_mask=mask)
    assert error(actual.logits[visible], first.logits[visible]) <= 1e-4
    assert (
        error(fused(name)(new_ids, attention_mask=longer, past_key_values=actual.past_key_values).logits, next_logits)
        <= 1e-4
    )


@few_models
def test_generation_from_right_padding_equals_vanilla(name: str) -> None:
    """Eager transformers averages all values for a token that sees nothing. A text with more padding than a window
    has such a token, and is left out there.
    """
    _, ids, mask = padded("right")
    if vanilla(name).config._attn_implementation == "eager" and getattr(vanilla(name).config, "sliding_window", None):
        sees = mask[:, -WINDOW:].any(dim=1)
        ids, mask = ids[sees], mask[sees]
        assert len(ids) == len(LENGTHS) - 1
    assert torch.equal(
        greedy(fused(name), ids, 12, attention_mask=mask), greedy(vanilla(name), ids, 12, attention_mask=mask)
    )


@pytest.mark.parametrize(("name", "side", "impl"), crossed(SMALL_CONFIGS.keys(), ["left", "right"], IMPLS))
def test_logits_of_padded_sequences_equal_single_runs(name: str, side: str, impl: str) -> None:
    engine = fused(name, impl)
    texts, ids, mask = padded(side)
    logits = engine(ids, attention_mask=mask, position_ids=places(mask)).logits
    for row, text in enumerate(texts):
        assert error(logits[row][mask[row].bool()], engine(text[None]).logits[0]) <= SAME


@each_impl
@pytest.mark.parametrize("name", FEW_WHOLE)
def test_logits_between_holes_equal_single_runs(name: str, impl: str) -> None:
    """Not for windowed models: their windows count all slots, including holes."""
    engine = fused(name, impl)
    texts, ids, mask = padded("holes")
    logits = engine(ids, attention_mask=mask, position_ids=places(mask)).logits
    for row, text in enumerate(texts):
        assert error(logits[row][mask[row].bool()], engine(text[None]).logits[0]) <= SAME


@few_models
def test_generation_from_left_padding_equals_single_runs(name: str) -> None:
    texts, ids, mask = padded("left")
    for impl in IMPLS:
        together = greedy(fused(name, impl), ids, 12, attention_mask=mask)
        for row, text in enumerate(texts):
            assert torch.equal(together[row, TOTAL:], greedy(vanilla(name), text[None], 12)[0, len(text) :])


@few_models
def test_generation_from_holes_equals_vanilla(name: str) -> None:
    _, ids, mask = padded("holes")
    expected = greedy(vanilla(name), ids, 12, attention_mask=mask)
    for impl in IMPLS:
        assert torch.equal(greedy(fused(name, impl), ids, 12, attention_mask=mask), expected)


@pytest.mark.parametrize("name", FEW)
def test_padding_is_recognised_without_a_mask(name: str) -> None:
    """transformers does so, too, unless the padding token is also the end token."""
    _, ids, mask = padded("left")
    ids[:, -1] = 5
    tokens = greedy(fused(name), ids, 8)
    assert torch.equal(tokens, greedy(fused(name), ids, 8, attention_mask=mask))
    assert torch.equal(tokens, greedy(vanilla(name), ids, 8))


@each_impl
@pytest.mark.parametrize("name", swept(WHOLE, FEW_WHOLE))
def test_steps_after_right_padding_equal_single_runs(name: str, impl: str) -> None:
    engine = fused(name, impl)
    texts, ids, mask = padded("right")
    cache = engine(ids, attention_mask=mask, position_ids=places(mask)).past_key_values
    steps, positions = prompt(len(LENGTHS), 4, seed=1), mask.sum(1, keepdim=True) + torch.arange(4)
    first = engine(steps[:, :3], past_key_values=cache, position_ids=positions[:, :3]).logits
    second = engine(steps[:, 3:], past_key_values=cache, position_ids=positions[:, 3:]).logits
    for row, text in enumerate(texts):
        alone = engine(torch.cat((text, steps[row]))[None]).logits[0, -4:]
        assert error(torch.cat((first[row], second[row])), alone) <= SAME


@pytest.mark.parametrize("name", FEW)
def test_a_mask_of_ones_changes_nothing(name: str) -> None:
    engine, ids = fused(name), prompt(2, 9)
    assert torch.equal(engine(ids, attention_mask=torch.ones_like(ids)).logits, engine(ids).logits)


@pytest.mark.parametrize("name", FEW)
def test_what_is_masked_does_not_matter(name: str) -> None:
    engine = fused(name)
    _, ids, mask = padded("holes")
    changed_ids = ids.where(mask.bool(), 77)
    visible = mask.bool()
    first, second = (engine(tokens, attention_mask=mask).logits[visible] for tokens in (ids, changed_ids))
    assert torch.equal(first, second)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_positions_given_by_the_caller_are_used_and_go_on(name: str) -> None:
    ids, start = prompt(2, 6), 9
    positions = (torch.arange(6) + start)[None]
    with torch.no_grad():
        expected = vanilla(name)(ids, position_ids=positions).logits
    assert error(fused(name)(ids, position_ids=positions.expand(2, -1)).logits, expected) <= 1e-4
    generated = greedy(fused(name), ids, 12, position_ids=positions)
    assert torch.equal(generated, greedy(vanilla(name), ids, 12, position_ids=positions))
