"""Unsupported options and calls of fused encoders are refused by name; a damaged model stays unchanged."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.models.encoders import IDS, MASKS, SIZES, TOKENS, answer, assert_same, fused, vanilla
from transformers import (
    BertConfig,
    BertModel,
)

import labkit
from labkit.engine import InferenceEngine
from labkit.system.shown import shown_value


@pytest.mark.parametrize(
    ("name", "switch"),
    [
        ("bert", {"is_decoder": True}),
        ("roberta", {"is_decoder": True, "add_cross_attention": True}),
        ("bert", {"position_embedding_type": "relative_key"}),
        ("distilbert", {"quantization_config": {"bits": 4}}),
    ],
)
def test_a_switch_that_is_not_computed_is_refused_by_name(name: str, switch: dict[str, Any]) -> None:
    model = copy.deepcopy(vanilla(name))
    for key, value in switch.items():
        setattr(model.config, key, value)
    key, value = next(iter(switch.items()))
    with pytest.raises(ValueError, match=f"{key} = {shown_value(value)} is not supported for {name}; expected"):
        labkit.init_inference(model)


def test_an_unknown_activation_is_refused() -> None:
    with pytest.raises(ValueError, match='activation "tanh" is not supported'):
        labkit.init_inference(BertModel(BertConfig(**TOKENS, **SIZES, hidden_act="tanh")))


@pytest.mark.parametrize("consume", [False, True], ids=["", "consume"])
def test_a_damaged_model_is_refused_by_tensor_and_left_as_it_was(consume: bool) -> None:
    model = copy.deepcopy(vanilla("bert", "fill-mask"))
    with torch.no_grad():
        model.bert.encoder.layer[2].output.dense.weight[3, 4] = float("nan")
    with pytest.raises(ValueError, match=r"encoder\.layer\.2\.output\.dense\.weight holds values that are not finite"):
        labkit.init_inference(model, consume_model=consume)
    assert all(parameter.numel() for parameter in model.parameters())


CAUSAL = torch.ones(13, 13, dtype=torch.bool).tril().expand(3, 1, 13, 13)


CALLS: dict[str, tuple[dict[str, Any], str]] = {
    "attentions": ({"output_attentions": True}, "fused attention keeps no attention weights; use the vanilla model"),
    "cross-attention": ({"encoder_hidden_states": torch.zeros(3, 4, 60)}, "encoder_hidden_states, .* are for decoders"),
    "causal": ({"is_causal": True}, "is_causal are for decoders"),
    "causal mask": ({"attention_mask": CAUSAL}, r"tokens of one sequence see different ones; pass \[3, 13\]"),
    "added mask": (
        {"attention_mask": torch.zeros(3, 1, 13, 13)},
        r"expected \[3, 13\], 0 for padding, .* torch\.float32",
    ),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", ["bert", "roberta"])
def test_a_call_that_only_vanilla_answers_is_refused(name: str, call: str) -> None:
    options, words = CALLS[call]
    with pytest.raises(ValueError, match=words):
        fused(name, "fill-mask")(IDS, **options)


def test_a_mask_of_four_dimensions_that_hides_whole_keys_is_taken() -> None:
    mask = MASKS["scattered"]
    assert mask is not None
    wide = mask.bool()[:, None, None].expand(3, 1, 13, 13).contiguous()
    assert_same(answer(fused("bert"), wide), answer(vanilla("bert"), mask), mask)


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "graph": ({"impl": "triton", "enable_cuda_graph": True}, NotImplementedError, "an encoder has none"),
    "launch": ({"impl": "triton", "dependent_launch": True}, NotImplementedError, "an encoder has none"),
    "cache": ({"kv_dtype": "int8"}, ValueError, "kv_dtype is for the cache of a decoder, an encoder keeps none"),
    "file of a cache": ({"kv_offload": {}}, ValueError, "kv_offload is for the cache of a decoder, an encoder keeps"),
    "head": ({"dtype": torch.int8, "quant": {"lm_head": True}}, ValueError, "quant.lm_head: an encoder's head stays"),
}


@pytest.mark.parametrize("option", REFUSED)
def test_an_option_that_means_nothing_for_encoders_is_refused(option: str) -> None:
    options, kind, words = REFUSED[option]
    with pytest.raises(kind, match=words):
        labkit.init_inference(vanilla("bert"), options)


@pytest.mark.parametrize("call", [lambda engine: engine(IDS), lambda engine: engine.stage_times()])
def test_a_destroyed_engine_says_so(call: Callable[[InferenceEngine], object]) -> None:
    engine = labkit.init_inference(vanilla("bert"))
    engine.destroy()
    with pytest.raises(RuntimeError, match="this engine was destroyed; call init_inference again for a new one"):
        call(engine)
