"""Orders of the rows of a QKV matrix or its bias: by kind (all queries, all keys, all values), or by KV head (the
queries of its group, its key, its value).
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from labkit.models.config import ModelConfig
from labkit.models.shards import Shard


def by_kind(tensor: Tensor, config: ModelConfig) -> Tensor:
    """Puts rows that are by KV head in the order by kind."""
    grouped = tensor.unflatten(0, (config.num_kv_heads, -1, config.head_dim))
    return torch.cat((grouped[:, :-2].flatten(0, 1), grouped[:, -2], grouped[:, -1])).reshape(tensor.shape)


def by_kv_head(tensor: Tensor, config: ModelConfig) -> Tensor:
    """Puts rows that are by kind in the order by KV head: the inverse of `by_kind`."""
    heads = tensor.unflatten(0, (-1, config.head_dim))
    query, key, value = heads.split([config.num_heads, config.num_kv_heads, config.num_kv_heads])
    grouped = query.unflatten(0, (config.num_kv_heads, -1))
    return torch.cat((grouped, key[:, None], value[:, None]), 1).reshape(tensor.shape)


def heads_of_rank(shard: Shard) -> Iterator[int]:
    """A rank's heads in a matrix whose rows are by KV head."""
    group, local = shard.config.num_heads // shard.config.num_kv_heads, len(shard.query) // len(shard.kv)
    for number, kv in enumerate(shard.kv):
        for query in shard.query[number * local : (number + 1) * local]:
            yield kv * (group + 2) + query % group
        yield kv * (group + 2) + group
        yield kv * (group + 2) + group + 1


def shapes_of_parts(shard: Shard, name: str, parts: int) -> list[tuple[int, ...]]:
    """The shapes of a weight's stored parts on this rank."""
    rows, *columns = (shard.layer_shapes | shard.top_shapes)[name]
    if parts == 3 and name.startswith("qkv."):
        heads = (shard.local.num_heads, shard.local.num_kv_heads, shard.local.num_kv_heads)
        return [(number * shard.local.head_dim, *columns) for number in heads]
    return [(rows // parts, *columns)] * parts
