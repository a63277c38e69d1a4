"""Weights that no torch dtype describes: their name in a record, and their size in memory."""

import json

import pytest
import torch

from labkit.harness.roofline import count_work, decode_bytes, probe_peak
from labkit.harness.stored_weights import StoredWeights, Weights, as_plain, from_plain, name_of
from labkit.kernels.build import unavailable
from labkit.models.config import ModelConfig
from labkit.models.policies import model_config_of
from labkit.models.presets import PRESETS

Q4 = StoredWeights(name="Q4_0", bits=4.5, head="Q6_K", head_bits=6.5625, computes="int8")


def config(name: str) -> ModelConfig:
    return model_config_of(PRESETS[name].hf_config)


@pytest.mark.parametrize("weights", [torch.float32, torch.int8, Q4], ids=str)
def test_weights_pass_from_process_to_process(weights: Weights) -> None:
    assert from_plain(json.loads(json.dumps(as_plain(weights)))) == weights


def test_a_record_has_the_name_that_the_library_gives() -> None:
    assert name_of(torch.bfloat16) == "bfloat16"
    assert name_of(Q4) == "Q4_0"
    assert str(Q4) == "Q4_0, LM head Q6_K"
    assert str(Q4.model_copy(update={"head": "Q4_0"})) == "Q4_0"


@pytest.mark.parametrize("model", ["gpt2", "llama-shape", "bloom-560m"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_stored_weights_with_the_bits_of_a_dtype_are_the_same_work(model: str, dtype: torch.dtype) -> None:
    bits = 8.0 * dtype.itemsize
    same = StoredWeights(name="same", bits=bits, head="same", head_bits=bits, computes=name_of(dtype))
    assert count_work(config(model), same, 2, 5, 4) == count_work(config(model), dtype, 2, 5, 4)


def test_a_step_reads_layers_and_head_with_their_own_bits() -> None:
    """GPT-2 by hand: 12 layers of 12 * 768^2, a tied head of 50257 rows, a row of each table, vectors, KV cache."""
    gpt2 = config("gpt2")
    layers, head, looked_up = 12 * 12 * 768**2, 50257 * 768, 2 * 768
    vectors = 12 * (2 * 2 + 3 + 1 + 4 + 1) * 768 + 2 * 768
    cache = 10 * gpt2.kv_bytes_per_token(torch.int8)
    numbers = round(((layers + looked_up) * 4.5 + head * 6.5625) / 8)
    assert decode_bytes(gpt2, Q4, batch=1, context=10) == numbers + vectors + cache


def test_four_bits_weigh_less_than_eight() -> None:
    four, eight = (count_work(config("llama-shape"), weights, 1, 5, 4) for weights in (Q4, torch.int8))
    assert four.weight_bytes < 0.7 * eight.weight_bytes
    assert four.decode_bytes < 0.7 * eight.decode_bytes
    assert four.kv_bytes == eight.kv_bytes


@pytest.mark.skipif(unavailable() is not None, reason="the probe is compiled")
def test_the_peak_is_that_of_the_type_that_computes() -> None:
    assert probe_peak(Q4, threads=1) is not None
