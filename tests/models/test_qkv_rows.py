"""Orders of the rows of a QKV matrix."""

import pytest
import torch
from helpers.models.small_models import small_model

from labkit.models.config import ModelConfig
from labkit.models.policies import policy_for
from labkit.models.qkv_rows import by_kind, by_kv_head, heads_of_rank
from labkit.models.shards import shard


def config(heads: int, kv_heads: int) -> ModelConfig:
    hf_config = small_model("llama", num_attention_heads=heads, num_key_value_heads=kv_heads).config
    return policy_for(hf_config).model_config(hf_config)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (6, 2), (4, 1)])
def test_one_order_gives_the_other_back(heads: int, kv_heads: int) -> None:
    of = config(heads, kv_heads)
    rows = torch.arange((heads + 2 * kv_heads) * of.head_dim)
    mixed = by_kv_head(rows, of)
    assert torch.equal(by_kind(mixed, of), rows)
    assert torch.equal(mixed[: of.head_dim], rows[: of.head_dim])
    assert torch.equal(mixed[-of.head_dim :], rows[-of.head_dim :]), "the last value"


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 6), (6, 3), (6, 2), (6, 1)])
def test_a_rank_has_its_heads_in_either_order(heads: int, kv_heads: int, ranks: int) -> None:
    of = config(heads, kv_heads)
    rows = torch.arange((heads + 2 * kv_heads) * of.head_dim).unflatten(0, (-1, of.head_dim))
    query, key, value = rows.split([heads, kv_heads, kv_heads])
    mixed = by_kv_head(rows.flatten(), of).unflatten(0, (-1, of.head_dim))
    for rank in range(ranks):
        part = shard(of, ranks, rank)
        own = mixed[list(heads_of_rank(part))].flatten()
        kv = list(part.kv)
        expected = torch.cat((query[list(part.query)], key[kv], value[kv]))
        assert torch.equal(by_kind(own, part.local), expected.flatten())
