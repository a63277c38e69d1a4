"""Choice of the token if logits are equal, or NaN."""

import pytest
import torch
from helpers.models.engines import IMPLS, greedy, prompt
from helpers.models.small_models import small_model
from transformers import PreTrainedModel

import labkit

each_impl = pytest.mark.parametrize("impl", IMPLS)


def with_equal_rows(name: str) -> PreTrainedModel:
    """Model with equal logits for tokens 2 k and 2 k + 1, and for tokens 66 + k and k."""
    model = small_model(name)
    head = model.get_output_embeddings().weight
    with torch.no_grad():
        head[1:66:2] = head[0:66:2]
        head[66:] = head[:65]
    return model


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("batch", [1, 3, 13])
@each_impl
def test_of_equal_logits_the_first_is_taken(impl: str, batch: int, threads: int) -> None:
    torch.set_num_threads(threads)
    model, ids = with_equal_rows("gpt2-untied"), prompt(batch, 7)
    actual = greedy(labkit.init_inference(model, impl=impl), ids, 10)
    assert torch.equal(actual, greedy(model, ids, 10))
    assert int(actual[:, 7:].max()) < 66
    assert not (actual[:, 7:] % 2).any()


@each_impl
def test_logits_that_are_no_numbers_are_reported(impl: str) -> None:
    model = small_model("llama")
    with torch.no_grad():
        model.model.norm.weight.fill_(3e38)
    engine = labkit.init_inference(model, impl=impl)
    assert engine(prompt(1, 5)).logits.isnan().all()
    with pytest.raises(FloatingPointError, match="no logit is a number; the weights or the prompt drive the model out"):
        greedy(engine, prompt(2, 5), 3)


@each_impl
def test_one_logit_that_is_no_number_is_never_taken(impl: str) -> None:
    model = small_model("gptj")
    engine = labkit.init_inference(model, impl=impl)
    expected = greedy(engine, prompt(2, 5), 6)
    best = int(expected[0, 5])
    bias = engine.module.runner.layer_range.weights.head.matrix.bias
    assert bias is not None
    with torch.inference_mode():
        bias[best] = float("nan")
    assert engine(prompt(2, 5)).logits[..., best].isnan().all()
    assert best not in greedy(engine, prompt(2, 5), 6)[:, 5:]
