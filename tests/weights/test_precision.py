"""Names of precisions, and the options of `init_inference` that they stand for."""

from typing import Any

import pytest
import torch
from helpers.models.small_models import small_model

from labkit.engine import init_inference
from labkit.harness.stored_weights import StoredWeights, matrix_bytes, stored_by
from labkit.system.errors import UserError
from labkit.weights.precision import precision_of
from labkit.weights.resolve import resolve

FLOAT = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "stored": None}


@pytest.mark.parametrize("name", FLOAT)
def test_a_floating_type_asks_for_nothing_else(name: str) -> None:
    assert precision_of(name).options == {"dtype": FLOAT[name]}


@pytest.mark.parametrize(
    ("name", "quant"),
    [
        ("int8", {"weight": {"num_bits": 8, "q_type": "symmetric"}}),
        ("int4", {"weight": {"num_bits": 4, "q_type": "asymmetric", "group_size": 32}}),
        ("int4-64-symmetric", {"weight": {"num_bits": 4, "q_type": "symmetric", "group_size": 64}}),
        ("int4-row", {"weight": {"num_bits": 4, "q_type": "asymmetric"}}),
        ("int8-32+head", {"weight": {"num_bits": 8, "q_type": "symmetric", "group_size": 32}, "lm_head": True}),
        (
            "int4-128+head8+a8",
            {
                "weight": {"num_bits": 4, "q_type": "asymmetric", "group_size": 128},
                "lm_head": {"num_bits": 8, "group_size": 32},
                "activation": {"enabled": True},
            },
        ),
    ],
)
def test_integers_say_bits_groups_type_head_and_rounding(name: str, quant: dict[str, Any]) -> None:
    assert precision_of(name).options == {"dtype": torch.int8, "quant": quant}


@pytest.mark.parametrize("name", ["int3", "int4-33", "int4-", "int8+tail", "", "float64", "int4-32-", "stored+head"])
def test_an_unknown_name_lists_what_is_known(name: str) -> None:
    with pytest.raises(UserError, match="expected one of "):
        precision_of(name)


@pytest.mark.parametrize(
    ("name", "layers", "bits", "head"),
    [
        ("int8", "int8", 8 + 16 / 64, "bfloat16"),
        ("int8+head", "int8", 8 + 16 / 64, "int8"),
        ("int4+head8", "int4-32", 5, "int8-32"),
        ("int4-64-symmetric+head", "int4-row-symmetric", 4.25, "int4-row-symmetric"),
        ("int8-32-asymmetric", "int8-32-asymmetric", 9, "bfloat16"),
    ],
)
def test_an_engine_says_how_it_stores_its_weights(name: str, layers: str, bits: float, head: str) -> None:
    """All matrices have 64 inputs, so a group of 64 is a whole row."""
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16}
    model = small_model("llama", hidden_size=64, intermediate_size=64, num_hidden_layers=1, **heads)
    engine = init_inference(model, replace_with_kernel_inject=True, impl="reference", **precision_of(name).options)
    stored = stored_by(engine)
    assert isinstance(stored, StoredWeights)
    assert (stored.name, stored.bits, stored.head) == (layers, pytest.approx(bits), head)
    assert stored.bytes == matrix_bytes(engine.weights)


def test_stored_is_the_type_of_the_weights_where_they_are_no_codes() -> None:
    engine = init_inference(resolve("tiny-gpt2"), replace_with_kernel_inject=True, **precision_of("stored").options)
    assert stored_by(engine) == torch.float32
