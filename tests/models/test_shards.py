"""The shards of a model together hold all of it, and each shard holds what its own rows need."""

import pytest
import torch
from helpers.models.small_models import SMALL_CONFIGS, small_config
from torch import Tensor

from labkit.models.config import ModelConfig
from labkit.models.policies import model_config_of
from labkit.models.shards import Shard, shard
from labkit.weights.checkpoint.pieces import pieces, ranges_of

CUT = [name for name in SMALL_CONFIGS if name != "olmoe"]  # its norms over all heads cannot be cut
WIDE = {"num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 72, "head_dim": 20}


def model_config(name: str, **overrides: object) -> ModelConfig:
    return model_config_of(small_config(name, **overrides))


def canonical(config: ModelConfig) -> dict[str, Tensor]:
    """Every weight of a layer and outside of layers, with all numbers different."""
    shapes = config.layer_shapes() | config.top_shapes()
    return {name: torch.arange(torch.Size(shape).numel()).view(shape) for name, shape in shapes.items()}


def shards(config: ModelConfig, size: int) -> list[Shard]:
    return [shard(config, size, rank) for rank in range(size)]


def assert_whole(config: ModelConfig, size: int) -> None:
    for name, whole in canonical(config).items():
        cuts = [part.cut(name) for part in shards(config, size)]
        shares = [whole if cut is None else cut(whole) for cut in cuts]
        if cuts[0] is None:
            continue
        assert torch.equal(torch.cat(shares, cuts[0].dim).unique(), whole.flatten()), name
        needed = pieces(((0, cuts[0].whole),), [ranges_of(cut, cuts[0].whole) for cut in cuts])
        assembled = [shares[piece.holder].narrow(cuts[0].dim, piece.begin, piece.end - piece.begin) for piece in needed]
        assert torch.equal(torch.cat(assembled, cuts[0].dim), whole), name


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("name", CUT)
def test_the_shards_of_every_weight_together_are_the_whole(name: str, size: int) -> None:
    assert_whole(model_config(name), size)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("kv_heads", [1, 2, 4, 8])
def test_so_they_are_when_heads_do_not_divide_evenly(kv_heads: int, size: int) -> None:
    assert_whole(model_config("llama", **WIDE | {"num_key_value_heads": kv_heads}), size)


@pytest.mark.parametrize("name", CUT)
def test_a_shard_has_the_shapes_that_it_announces(name: str) -> None:
    config = model_config(name)
    for part in shards(config, 3):
        for shape, whole in ((part.layer_shapes, config.layer_shapes()), (part.top_shapes, config.top_shapes())):
            for weight, expected in shape.items():
                cut = part.cut(weight)
                tensor = torch.empty(whole[weight], device="meta")
                assert (tensor if cut is None else cut(tensor)).shape == expected, weight


@pytest.mark.parametrize("size", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("kv_heads", [1, 2, 4, 8])
def test_every_query_head_reads_the_kv_head_that_it_read_in_the_whole_model(kv_heads: int, size: int) -> None:
    config = model_config("llama", **WIDE | {"num_key_value_heads": kv_heads})
    for part in shards(config, size):
        local, per_kv = part.local, config.num_heads // config.num_kv_heads
        group = local.num_heads // local.num_kv_heads
        assert [part.kv[head // group] for head in range(local.num_heads)] == [head // per_kv for head in part.query]


def test_more_ranks_than_heads_are_refused() -> None:
    with pytest.raises(ValueError, match="3 query heads cannot be split over 4 ranks; use tp_size <= 3"):
        shard(model_config("gpt2"), 4)


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_out_of_range_is_refused(rank: int) -> None:
    with pytest.raises(ValueError, match=f"rank {rank} of 2: expected 0 to 1"):
        shard(model_config("gpt2"), 2, rank)
