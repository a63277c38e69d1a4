"""Positions far beyond the length of a text give the results of vanilla models, and cost no more."""

import pytest
import torch
from helpers.models.engines import IMPLS, error, fused, greedy, prompt, vanilla
from torch import Tensor

from labkit.engine.memory.kv_cache import KVCache
from labkit.engine.memory.rotary import FEW_POSITIONS, RotaryTables
from labkit.models.policies import model_config_of

TOLERANCE = 1e-4
LAST = 2**31 - 1
BEGINS = (FEW_POSITIONS - 4, FEW_POSITIONS + 1, 2**24 + 3, LAST - 13)


def from_position(begin: int, count: int) -> Tensor:
    return torch.arange(begin, begin + count)[None]


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("name", ["llama-yarn", "gpt-neox-parallel"])
def test_a_text_may_begin_at_any_position(name: str, impl: str) -> None:
    engine, ids = fused(name, impl), prompt(2, 9)
    for begin in BEGINS:
        whole = from_position(begin, 9)
        with torch.no_grad():
            expected = vanilla(name)(ids, position_ids=whole).logits
        assert error(engine(ids, position_ids=whole).logits, expected) <= TOLERANCE
        cache = engine(ids[:, :7], position_ids=whole[:, :7]).past_key_values
        assert (
            error(engine(ids[:, 7:], past_key_values=cache, position_ids=whole[:, 7:]).logits, expected[:, 7:])
            <= TOLERANCE
        )
        texts = [greedy(model, ids, 5, position_ids=whole.expand(2, -1)) for model in (engine, vanilla(name))]
        assert torch.equal(*texts)


def test_one_row_may_be_far_from_the_others() -> None:
    ids, positions = prompt(3, 5), torch.stack([from_position(begin, 5)[0] for begin in (0, 2**20, 7)])
    with torch.no_grad():
        expected = vanilla("qwen3")(ids, position_ids=positions).logits
    assert error(fused("qwen3")(ids, position_ids=positions).logits, expected) <= TOLERANCE


def test_tables_hold_what_a_cache_has_slots_for_and_no_far_position() -> None:
    config = model_config_of(vanilla("llama").config)
    tables, cache = RotaryTables(config.rotaries, torch.device("cpu")), KVCache(config, torch.float32)
    cache.reserve(1, 100)
    assert not tables.holds(2 * FEW_POSITIONS, cache)
    cache.reserve(1, 2 * FEW_POSITIONS)
    assert tables.holds(2 * FEW_POSITIONS, cache)


@pytest.mark.parametrize("name", ["llama", "gpt2", "bloom"])
@pytest.mark.parametrize("position", [2**31, 2**32 + 5])
def test_positions_that_the_cache_cannot_count_are_refused(name: str, position: int) -> None:
    with pytest.raises(ValueError, match=rf"reach position {position}; expected at most {LAST}"):
        fused(name)(prompt(1, 1), position_ids=torch.tensor([[position]]))


def test_the_token_behind_the_last_position_is_refused() -> None:
    engine, ids = fused("llama"), prompt(1, 3)
    with pytest.raises(ValueError, match=rf"reach position {LAST + 1}; expected at most {LAST}"):
        greedy(engine, ids, 9, position_ids=from_position(LAST - 5, 3))


def test_positions_that_are_no_integers_are_refused() -> None:
    with pytest.raises(ValueError, match=r"position_ids: expected integers, got torch\.float32"):
        fused("llama")(prompt(1, 2), position_ids=torch.tensor([[0.5, 1.5]]))
    with pytest.raises(ValueError, match=r"position_ids are \[1, 0\]; expected \[1, 2\] from 0 on"):
        fused("llama")(prompt(1, 2), position_ids=torch.empty(1, 0, dtype=torch.long))
