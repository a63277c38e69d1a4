"""Published scripts for DeepSpeed, with `deepspeed` replaced by `labkit`, on small random models."""

import os
from time import perf_counter
from typing import Any

import numpy as np
import pytest
import torch
from helpers.models.small_models import small_model
from transformers import PreTrainedModel, PreTrainedTokenizerFast, pipeline, set_seed

import labkit
from labkit.models.tokenizer import byte_tokenizer

VOCAB = 300
PAYLOAD = (
    "Hello my name is Philipp. I am getting in touch with you because i didn't get a response from you. "
    "What do I need to do to get my new card which I have requested 2 weeks ago?"
)


def text_model(name: str, **overrides: Any) -> PreTrainedModel:
    """Small model with a byte vocabulary, in which only the end token ends a text early."""
    model = small_model(name, vocab_size=VOCAB, max_position_embeddings=1024, **overrides)
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = 256
    return model


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    return byte_tokenizer(VOCAB)


def measure_latency(
    model: Any, tokenizer: Any, payload: str, generation_args: dict[str, Any], device: torch.device
) -> tuple[str, float]:
    """As published, except for the number of runs."""
    input_ids = tokenizer(payload, return_tensors="pt").input_ids.to(device)
    latencies = []
    for _ in range(1):
        _ = model.generate(input_ids, **generation_args)
    for _ in range(3):
        start_time = perf_counter()
        _ = model.generate(input_ids, **generation_args)
        latency = perf_counter() - start_time
        latencies.append(latency)
    time_avg_ms = 1000 * np.mean(latencies)
    time_std_ms = 1000 * np.std(latencies)
    time_p95_ms = 1000 * np.percentile(latencies, 95)
    text = f"P95 latency (ms) - {time_p95_ms}; Average latency (ms) - {time_avg_ms:.2f} +- {time_std_ms:.2f};"
    return text, time_p95_ms


def test_gptj_latency(tokenizer: PreTrainedTokenizerFast) -> None:
    model = text_model("gptj")
    generation_args = {"do_sample": False, "num_beams": 1, "min_length": 128, "max_new_tokens": 32}
    expected = model.generate(tokenizer(PAYLOAD, return_tensors="pt").input_ids, **generation_args)

    ds_model = labkit.init_inference(
        model=model,
        mp_size=1,
        dtype=torch.float32,
        replace_method="auto",
        replace_with_kernel_inject=True,
    )
    assert str(ds_model.module.device) == "cpu"

    from labkit.ops.transformer.inference import DeepSpeedTransformerInference

    assert isinstance(ds_model.module.transformer.h[0], DeepSpeedTransformerInference) == True  # noqa: E712

    input_ids = tokenizer("My name is Philipp and I", return_tensors="pt").input_ids.to(model.device)
    logits = ds_model.generate(input_ids, do_sample=True, max_length=100)
    assert tokenizer.decode(logits[0].tolist()).startswith("My name is Philipp and I")

    text, p95 = measure_latency(ds_model, tokenizer, PAYLOAD, generation_args, ds_model.module.device)
    assert text.startswith("P95 latency (ms) - ")
    assert p95 > 0
    assert torch.equal(
        ds_model.generate(tokenizer(PAYLOAD, return_tensors="pt").input_ids, **generation_args), expected
    )


def test_gptj_in_half_precision_as_published(tokenizer: PreTrainedTokenizerFast) -> None:
    ds_model = labkit.init_inference(
        model=text_model("gptj", dtype=torch.float16),
        mp_size=1,
        dtype=torch.float16,
        replace_method="auto",
        replace_with_kernel_inject=True,
    )
    ids = tokenizer(PAYLOAD, return_tensors="pt").input_ids
    assert ds_model.generate(ids, do_sample=False, max_new_tokens=16).shape[1] > ids.shape[1]


def test_pipeline_with_four_return_sequences(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    generator = pipeline("text-generation", model=text_model("gptj"), tokenizer=tokenizer)
    set_seed(42)
    expected = generator("DeepSpeed is", do_sample=True, max_length=50, num_return_sequences=4)

    world_size = int(os.getenv("WORLD_SIZE", "4"))
    generator.model = labkit.init_inference(
        generator.model, mp_size=world_size, dtype=torch.float, replace_with_kernel_inject=True
    )
    set_seed(42)
    string = generator("DeepSpeed is", do_sample=True, max_length=50, num_return_sequences=4)
    assert string == expected
    assert len({item["generated_text"] for item in string}) == 4
    assert all(item["generated_text"].startswith("DeepSpeed is") for item in string)


def test_gpt_neo_with_min_length(tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    generator = pipeline("text-generation", model=text_model("gpt-neo"), tokenizer=tokenizer)
    world_size = int(os.getenv("WORLD_SIZE", "1"))
    set_seed(1)
    expected = generator("DeepSpeed is", do_sample=True, min_length=50)
    generator.model = labkit.init_inference(
        generator.model, tensor_parallel={"tp_size": world_size}, dtype=torch.float, replace_with_kernel_inject=True
    )
    set_seed(1)
    string = generator("DeepSpeed is", do_sample=True, min_length=50)
    assert string == expected
    assert len(tokenizer(string[0]["generated_text"]).input_ids) >= 48


def test_pipeline_on_a_batch_of_unequal_texts(tokenizer: PreTrainedTokenizerFast) -> None:
    texts = ["DeepSpeed is", "a", "The longest of the three texts"]
    generator = pipeline("text-generation", model=text_model("gpt-neo"), tokenizer=tokenizer)
    expected = generator(texts, do_sample=False, max_new_tokens=12)
    generator.model = labkit.init_inference(generator.model, dtype=torch.float, replace_with_kernel_inject=True)
    assert generator(texts, do_sample=False, max_new_tokens=12, batch_size=3) == expected
