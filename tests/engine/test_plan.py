"""Layers are divided among pipeline stages so that each stage reads about the same bytes in a step."""

from dataclasses import replace

import pytest
import torch

from labkit.engine.plan import split_layers
from labkit.models.presets import PRESETS
from labkit.models.shards import shard
from labkit.weights.capacity import layer_bytes, model_bytes
from labkit.weights.spec import WeightSpec

NAMES = ("llama-shape", "gpt2-medium", "opt-350m", "qwen3-0.6b", "mistral-7b", "bloom-560m")  # tied and untied heads


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
@pytest.mark.parametrize("stages", [1, 2, 3, 5])
@pytest.mark.parametrize("name", NAMES)
def test_no_stage_reads_a_layer_more_than_its_share(name: str, stages: int, dtype: torch.dtype) -> None:
    """Without the embedding, of which a step reads only single rows."""
    spec = WeightSpec.of(PRESETS[name].hf_config, dtype)
    layers = split_layers(spec, stages)
    assert [index for part in layers for index in part] == list(range(spec.config.num_layers))
    parts = [shard(spec.config, layers=part, embedding=False) for part in layers]
    stage_bytes = [model_bytes(replace(spec, part=part)) for part in parts]
    one_layer = layer_bytes(spec)
    head_alone = max(stage_bytes) == stage_bytes[-1] and len(layers[-1]) == 1
    assert head_alone or max(stage_bytes) <= sum(stage_bytes) / stages + one_layer


def test_a_split_that_was_asked_for_is_taken() -> None:
    spec = WeightSpec.of(PRESETS["llama-shape"].hf_config, torch.float32)
    assert split_layers(spec, 3, [4, 19, 1]) == (range(4), range(4, 23), range(23, 24))
    with pytest.raises(ValueError, match=r"layers=\[4, 19, 2\] are 25 layers, the model has 24"):
        split_layers(spec, 3, [4, 19, 2])
    with pytest.raises(ValueError, match="pp_size=25 stages for 24 layers; use pp_size <= 24"):
        split_layers(spec, 25)
