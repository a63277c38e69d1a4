"""The logits of a row in a decode step do not depend on the other rows, to the last bit."""

from typing import Any

import pytest
import torch
from helpers.models.engines import prompt
from helpers.models.small_models import small_model
from helpers.sweeps import crossed
from torch import Tensor

import labkit

INT4: dict[str, Any] = {"dtype": torch.int8, "quant": {"weight": {"num_bits": 4, "q_groups": 2}}}
TYPES: dict[str, dict[str, Any]] = {
    "fp32": {"dtype": torch.float32},
    "bf16": {"dtype": torch.bfloat16},
    "fp16": {"dtype": torch.float16},
    "int8": {"dtype": torch.int8},
    "int4": INT4,
}


def logits_of_steps(engine: Any, ids: Tensor, begin: int = 0) -> Tensor:
    """The logits of steps with one token of each row, from step `begin` on."""
    cache, logits = engine.module.new_cache(), []
    for step in range(ids.shape[1]):
        output = engine.module(input_ids=ids[:, step : step + 1], past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        logits.append(output.logits)
    return torch.cat(logits[begin:], 1)


@pytest.mark.parametrize(
    ("options", "name"), crossed(TYPES, ["gpt-oss", "llama", "bloom", "qwen2-moe", "opt-post-norm"])
)
def test_two_rows_have_the_logits_of_each_alone(options: dict[str, Any], name: str) -> None:
    """In mixtures a row may meet the other one in an expert."""
    engine, ids = labkit.init_inference(small_model(name), **options), prompt(2, 14)
    together = logits_of_steps(engine, ids)
    for row in (0, 1):
        assert torch.equal(logits_of_steps(engine, ids[row, None]), together[row, None])


@pytest.mark.parametrize("name", ["llama", "gpt-oss"])
def test_attention_to_many_tokens_does_not_depend_on_the_rows_beside_it(name: str) -> None:
    """Their keys are divided into parts."""
    engine = labkit.init_inference(small_model(name, max_position_embeddings=1024), dtype=torch.float32)
    ids = prompt(4, 600)
    together = logits_of_steps(engine, ids, begin=590)
    for rows in (slice(1), slice(2, 4)):
        assert torch.equal(logits_of_steps(engine, ids[rows], begin=590), together[rows])
