"""Engines that stream their layers from a file in every step give the results of engines with resident layers."""

import gc
import os
import threading
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.models.engines import error, few_models, fused, greedy, profiled, prompt, vanilla
from helpers.models.offloaded import least_gb, reader_of, stream_of, streamed, streamed_model
from helpers.models.small_models import small_model
from helpers.sweeps import crossed

import labkit
from labkit.engine.engine import FusedEngine
from labkit.engine.offload import streaming
from labkit.engine.runners.step import CHUNK_ROWS
from labkit.kernels.memory import Arena
from labkit.stages import Phase, Stage, parse

LAYERS = 3
DTYPES = {
    "bfloat16": {"dtype": torch.bfloat16},
    "float16": {"dtype": torch.float16},
    "int8": {"dtype": torch.int8},
    "int4": {"quant": {"weight": {"num_bits": 4, "q_groups": 2}}},
}


@few_models
@pytest.mark.usefixtures("poisoned")
def test_tokens_equal_those_of_the_resident_engine(name: str, tmp_path: Path) -> None:
    """For every policy row in float32: padded prompts, then token by token through two slots."""
    ids, mask = prompt(3, 11), torch.ones(3, 11, dtype=torch.long)
    mask[0, :4] = 0
    engine = streamed(name, tmp_path)
    assert len(stream_of(engine).layers) == engine.model_config.num_layers
    expected = greedy(fused(name), ids, 9, attention_mask=mask)
    assert torch.equal(greedy(engine, ids, 9, attention_mask=mask), expected)


@pytest.mark.parametrize(("options", "name"), crossed(DTYPES, ("llama", "gpt2-untied", "bloom")))
def test_logits_are_those_of_the_resident_engine_in_every_precision(
    options: dict[str, Any], name: str, tmp_path: Path
) -> None:
    ids = prompt(2, 20)
    resident = labkit.init_inference(vanilla(name), **options)
    with torch.inference_mode():
        logits, expected = (side(ids).logits for side in (streamed(name, tmp_path, **options), resident))
    assert torch.equal(logits, expected)


def test_layers_that_stay_are_not_read_again(tmp_path: Path) -> None:
    """With more memory more layers are resident, spread among the others; with enough memory nothing is streamed."""
    model = small_model("gpt2", n_layer=9)
    least = least_gb(model, tmp_path)
    ids, expected = prompt(1, 5), greedy(labkit.init_inference(model), prompt(1, 5), 4)
    smallest = stream_of(streamed_model(model, tmp_path))
    layer_gb = smallest.stream.slot_bytes / 1e9
    streamed_layers = []
    for extra_layers in range(5):
        offload = {"path": tmp_path, "slots": 2, "resident_gb": least + extra_layers * layer_gb}
        engine = labkit.init_inference(model, offload=offload)
        assert isinstance(engine, FusedEngine)
        stream = stream_of(engine)
        streamed_layers.append(len(stream.layers))
        assert stream.resident_bytes <= (least + extra_layers * layer_gb) * 1e9
        assert torch.equal(greedy(engine, ids, 4), expected)
        assert 4 * streamed_layers[-1] <= stream.stream.blocks_read <= 4 * streamed_layers[-1] + stream.stream.slots
    assert streamed_layers == [9, 8, 7, 6, 5]
    whole = labkit.init_inference(model, offload={"path": tmp_path, "resident_gb": 1})
    assert isinstance(whole, FusedEngine)
    assert whole.streamed is None
    assert torch.equal(greedy(whole, ids, 4), expected)


def test_address_space_is_taken_only_for_what_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models can be larger than memory, and the system refuses more address space than that."""
    reserve, capacities = streaming.Arena.reserved, list[int]()

    def reserve_and_record(capacity: int) -> Arena:
        capacities.append(capacity)
        return reserve(capacity)

    monkeypatch.setattr(streaming.Arena, "reserved", reserve_and_record)
    layers = stream_of(streamed_model(small_model("gpt2", n_layer=24), tmp_path))
    assert layers.file is not None
    assert 4 * capacities[-1] < layers.file.stat().st_size


def test_a_long_prompt_reads_each_layer_once(tmp_path: Path) -> None:
    """2,000 tokens pass a layer in chunks before the next layer starts."""
    model = small_model("llama", max_position_embeddings=2048)
    ids = prompt(1, 2000)
    assert ids.shape[1] > 3 * CHUNK_ROWS
    engine, resident = streamed_model(model, tmp_path), labkit.init_inference(model)
    stream = stream_of(engine).stream
    with torch.inference_mode():
        logits, expected = (side(ids, logits_to_keep=3).logits for side in (engine, resident))
    assert torch.equal(logits, expected)
    assert LAYERS <= stream.blocks_read <= LAYERS + stream.slots  # some are prefetched for the next step


def test_the_whole_of_generate_runs_on_streamed_layers(tmp_path: Path) -> None:
    """Sampling, beams, batches of unequal lengths, continuing from a cache, hidden states."""
    engine, resident = streamed("mistral", tmp_path), fused("mistral")
    ids, mask = prompt(2, 9), torch.ones(2, 9, dtype=torch.long)
    mask[1, :3] = 0
    for options in ({"num_beams": 3}, {"num_beams": 2, "num_return_sequences": 2}, {"repetition_penalty": 1.3}):
        actual, expected = (greedy(side, ids, 6, attention_mask=mask, **options) for side in (engine, resident))
        assert torch.equal(actual, expected)
    sampled = []
    for side in (engine, resident):
        torch.manual_seed(3)
        sampled.append(side.generate(ids, do_sample=True, top_k=20, max_new_tokens=6, pad_token_id=0))
    assert torch.equal(*sampled)
    with torch.inference_mode():
        first = engine(ids[:, :5], use_cache=True)
        actual = engine(ids[:, 5:], past_key_values=first.past_key_values, output_hidden_states=True)
        expected = resident(ids, output_hidden_states=True)
    assert error(actual.logits[:, -1], expected.logits[:, -1]) <= 1e-5
    assert len(actual.hidden_states) == len(expected.hidden_states)


def test_engines_may_share_a_file(tmp_path: Path) -> None:
    """Several engines on one file at the same time, and several threads on one engine."""
    engines = [streamed("gptj", tmp_path), streamed("gptj", tmp_path)]
    assert reader_of(engines[0]).path == reader_of(engines[1]).path
    expected, texts = greedy(fused("gptj"), prompt(1, 6), 20), {}

    def work(number: int) -> None:
        torch.set_num_threads(1)
        texts[number] = greedy(engines[number % 2], prompt(1, 6), 20)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(texts) == 4
    assert all(torch.equal(text, expected) for text in texts.values())


def test_a_streamed_engine_ends_with_its_threads_and_files(tmp_path: Path) -> None:
    gc.collect()  # frees what errors of other tests keep alive, before threads are counted
    threads, files = len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))
    engine = streamed("gpt2", tmp_path)
    assert len(os.listdir("/proc/self/task")) == threads + 1
    engine.destroy()
    assert len(os.listdir("/proc/self/task")) == threads
    assert len(os.listdir("/proc/self/fd")) <= files + 1  # the manifest's reader may stay until it is garbage-collected


def test_waits_are_stages_and_spans(tmp_path: Path) -> None:
    """The wait of a step for a layer is a stage of its own; reads, waits and layers are on one clock."""
    engine = streamed("gpt2", tmp_path)
    stream = stream_of(engine).stream
    greedy(engine, prompt(1, 4), 5)
    stages = {(entry.phase, entry.stage) for entry in engine.stage_times()}
    assert {(Phase.PREFILL, Stage.FETCH), (Phase.DECODE, Stage.FETCH)} <= stages
    spans = stream.take_spans()
    assert [sum(span.kind == kind for span in spans) for kind in ("wait", "compute")] == [5 * LAYERS, 5 * LAYERS]
    assert sum(span.kind == "read" for span in spans) >= 5 * LAYERS
    assert all(span.begin_ns <= span.end_ns for span in spans)
    computed = [span for span in spans if span.kind == "compute"]
    assert all(before.end_ns <= after.begin_ns for before, after in pairwise(computed))
    assert not [span for span in stream.take_spans() if span.kind != "read"]


def test_a_profiler_sees_the_waits(tmp_path: Path) -> None:
    engine = streamed("gpt2", tmp_path)
    expected = greedy(fused("gpt2"), prompt(1, 4), 3)
    texts: list[torch.Tensor] = []
    names = profiled(lambda: texts.append(greedy(engine, prompt(1, 4), 3)))
    assert torch.equal(texts[0], expected)
    fetched = [parsed.layer for name in names if (parsed := parse(name)) and parsed.stage == Stage.FETCH]
    assert fetched == [*range(LAYERS)] * 3
