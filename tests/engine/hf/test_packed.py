"""Calls that packed weights cannot serve are refused; all other arguments of transformers' models work."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.models.engines import error, fused, prompt, vanilla
from transformers import BertConfig, BertModel

import labkit
from labkit.engine import InferenceEngine


@pytest.fixture(scope="module")
def encoder() -> InferenceEngine:
    config = BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=40, vocab_size=50)
    return labkit.init_inference(BertModel(config), dtype=torch.float32)


LOSING: dict[str, Callable[[Any], object]] = {
    "state_dict": lambda engine: engine.state_dict(),
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
    "half": lambda engine: engine.half(),
    "to dtype": lambda engine: engine.to(torch.bfloat16),
    "to device": lambda engine: engine.to("meta"),
    "double": lambda engine: engine.double(),
}


@pytest.mark.parametrize("call", LOSING)
def test_what_would_lose_the_weights_or_do_nothing_is_refused(call: str, encoder: InferenceEngine) -> None:
    for engine in (fused("gpt2"), encoder):
        with pytest.raises(NotImplementedError, match=r"packed|cannot be (copied|pickled)"):
            LOSING[call](engine)


def test_a_saved_model_would_have_no_weights(tmp_path: Any, encoder: InferenceEngine) -> None:
    for engine in (fused("gpt2"), encoder):
        with pytest.raises(NotImplementedError, match=r"save_mp_checkpoint_path|state_dict would be empty"):
            engine.save_pretrained(tmp_path / "saved")
        assert not list(tmp_path.rglob("*.safetensors"))


def test_what_changes_nothing_is_no_error(encoder: InferenceEngine) -> None:
    for engine in (fused("gpt2"), encoder):
        assert engine.to("cpu").float().to(torch.float32).eval() is engine
    assert fused("gpt2", "reference", torch.bfloat16).bfloat16() is fused("gpt2", "reference", torch.bfloat16)


@pytest.mark.parametrize("method", ["get_input_embeddings", "get_output_embeddings"])
def test_modules_that_are_not_there_are_not_given(method: str) -> None:
    with pytest.raises(NotImplementedError, match="packed for the kernels"):
        getattr(fused("gpt2"), method)()


@pytest.mark.parametrize("indices", [[0, 3, 8], [-1], [5, 2], [-9, 7, 7]])
def test_logits_of_chosen_tokens_equal_vanilla(indices: list[int]) -> None:
    ids, logits_to_keep = prompt(2, 9), torch.tensor(indices)
    with torch.no_grad():
        expected = vanilla("gpt2")(ids, logits_to_keep=logits_to_keep).logits
    assert error(fused("gpt2")(ids, logits_to_keep=logits_to_keep).logits, expected) <= 1e-5


@pytest.mark.parametrize("indices", [[9], [-10], [[1]], []])
def test_logits_of_tokens_that_are_not_there_are_refused(indices: list[Any]) -> None:
    with pytest.raises(ValueError, match="logits_to_keep: expected indices of 9 tokens in one dimension"):
        fused("gpt2")(prompt(1, 9), logits_to_keep=torch.tensor(indices, dtype=torch.long))
