"""Engines with an offloaded KV cache on the disk give the results of engines with a resident cache."""

import copy
import gc
import os
import threading
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.models.engines import error, few_models, fused, greedy, profiled, prompt, vanilla
from helpers.models.offloaded import kv_on_disk, kv_stream_of, stream_of, streamed
from helpers.models.small_models import small_model
from helpers.sweeps import crossed
from torch import Tensor
from transformers import DynamicCache

import labkit
from labkit.engine.memory.heads_on_disk import HeadsOnDisk
from labkit.engine.memory.kv_cache import KVCache
from labkit.engine.runners.step import CHUNK_ROWS
from labkit.kernels import slot_stream
from labkit.stages import Phase, Stage, parse

LAYERS = 3
TYPES: dict[str, dict[str, Any]] = {
    "bfloat16": {"dtype": torch.bfloat16},
    "int8": {"dtype": torch.int8},
    "int8-cache": {"kv_dtype": torch.int8},
    "int8-both": {"dtype": torch.int8, "kv_dtype": torch.int8},
}


@pytest.fixture
def poisoned_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fills slots with NaN until data is put into them."""
    reserve = slot_stream.reserved
    monkeypatch.setattr(slot_stream, "reserved", lambda size: reserve(size).fill_(0xFF))


@few_models
@pytest.mark.usefixtures("poisoned", "poisoned_slots")
def test_tokens_equal_those_of_the_resident_engine(name: str, tmp_path: Path) -> None:
    """For every policy row in float32: padded prompts, then token by token through two slots."""
    ids, mask = prompt(3, 11), torch.ones(3, 11, dtype=torch.long)
    mask[0, :4] = 0
    engine = kv_on_disk(vanilla(name), tmp_path)
    expected = greedy(fused(name), ids, 9, attention_mask=mask)
    output = greedy(engine, ids, 9, attention_mask=mask, return_dict_in_generate=True)
    assert torch.equal(output.sequences, expected)
    stream = kv_stream_of(output.past_key_values)
    stream.flush()
    assert stream.blocks_written == 9 * engine.model_config.num_layers


@pytest.mark.parametrize(("options", "name"), crossed(TYPES, ("llama", "gpt2-untied", "bloom")))
@pytest.mark.usefixtures("poisoned_slots")
def test_logits_are_those_of_the_resident_engine_in_every_type(
    options: dict[str, Any], name: str, tmp_path: Path
) -> None:
    engines = kv_on_disk(vanilla(name), tmp_path, 3, **options), labkit.init_inference(vanilla(name), **options)
    logits = []
    with torch.inference_mode():
        for engine in engines:
            first = engine(prompt(2, 20))
            logits.append(engine(prompt(2, 1, seed=1), past_key_values=first.past_key_values).logits)
    assert torch.equal(*logits)


def test_weights_and_cache_may_both_be_on_the_disk(tmp_path: Path) -> None:
    """Both have slots of their own, and the waits for each are a stage of their own."""
    engine = streamed("llama", tmp_path, kv_offload={"path": tmp_path, "slots": 2}, kv_dtype=torch.int8)
    resident = labkit.init_inference(vanilla("llama"), kv_dtype=torch.int8)
    output = greedy(engine, prompt(2, 7), 6, return_dict_in_generate=True)
    assert torch.equal(output.sequences, greedy(resident, prompt(2, 7), 6))
    assert stream_of(engine).stream.blocks_read >= 6 * LAYERS
    assert kv_stream_of(output.past_key_values).blocks_read >= 6 * LAYERS
    stages = [entry.stage for entry in engine.stage_times() if entry.phase == Phase.DECODE and entry.layer == 1]
    assert stages[:3] == [Stage.FETCH, Stage.FETCH_KV, Stage.QKV]
    with engine.module.runner.stage_by_stage():
        assert torch.equal(greedy(engine, prompt(2, 7), 6), output.sequences)


def test_a_long_prompt_is_written_once(tmp_path: Path) -> None:
    """2,000 tokens pass a layer in chunks before the next layer starts; none of them is read back."""
    model = small_model("llama", max_position_embeddings=2048)
    ids = prompt(1, 2000)
    assert ids.shape[1] > 3 * CHUNK_ROWS
    engine, resident = kv_on_disk(model, tmp_path), labkit.init_inference(model)
    with torch.inference_mode():
        output, expected = (side(ids, logits_to_keep=3) for side in (engine, resident))
        stream = kv_stream_of(output.past_key_values)
        assert torch.equal(output.logits, expected.logits)
        stream.flush()
        assert stream.blocks_written == LAYERS
        next_output = engine(ids[:, :1], past_key_values=output.past_key_values)
        next_expected = resident(ids[:, :1], past_key_values=expected.past_key_values)
    assert torch.equal(next_output.logits, next_expected.logits)


def test_the_whole_of_generate_runs_on_it(tmp_path: Path) -> None:
    """Sampling, beams, batches of unequal lengths, assisted decoding, hidden states."""
    engine, resident = kv_on_disk(vanilla("mistral"), tmp_path), fused("mistral")
    ids, mask = prompt(2, 9), torch.ones(2, 9, dtype=torch.long)
    mask[1, :3] = 0
    for options in ({"num_beams": 3}, {"num_beams": 2, "num_return_sequences": 2}, {"repetition_penalty": 1.3}):
        actual, expected = (greedy(side, ids, 6, attention_mask=mask, **options) for side in (engine, resident))
        assert torch.equal(actual, expected)
    actual, expected = (greedy(side, ids[:1], 12, prompt_lookup_num_tokens=3) for side in (engine, resident))
    assert torch.equal(actual, expected)
    sampled = []
    for side in (engine, resident):
        torch.manual_seed(3)
        sampled.append(side.generate(ids, do_sample=True, top_k=20, max_new_tokens=6, pad_token_id=0))
    assert torch.equal(*sampled)
    with torch.inference_mode():
        first = engine(ids[:, :5], use_cache=True)
        continued = engine(ids[:, 5:], past_key_values=first.past_key_values, output_hidden_states=True)
        whole = resident(ids, output_hidden_states=True)
    assert error(continued.logits[:, -1], whole.logits[:, -1]) <= 1e-5
    assert len(continued.hidden_states) == len(whole.hidden_states)


CHANGES: dict[str, Callable[[KVCache], object]] = {
    "nothing": lambda cache: None,
    "crop": lambda cache: cache.crop(-3),
    "reset": lambda cache: cache.reset(),
    "reorder": lambda cache: cache.reorder_cache(torch.tensor([1, 0])),
    "select": lambda cache: cache.batch_select_indices(torch.tensor([1])),
    "select by mask": lambda cache: cache.batch_select_indices(torch.tensor([False, True])),
    "repeat": lambda cache: cache.batch_repeat_interleave(2),
    "grow": lambda cache: cache.reserve(2, 700),
}


@pytest.mark.parametrize("kv_dtype", [None, torch.int8], ids=["float32", "int8"])
def test_a_changed_cache_goes_on_as_one_in_memory(kv_dtype: torch.dtype | None, tmp_path: Path) -> None:
    """Cropped, reordered, selected, repeated or grown. The original of a changed copy works too."""
    model = vanilla("llama")
    engines = kv_on_disk(model, tmp_path, kv_dtype=kv_dtype), labkit.init_inference(model, kv_dtype=kv_dtype)
    mask = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1], [1] * 8])
    firsts = [engine(prompt(2, 8), attention_mask=mask).past_key_values for engine in engines]

    def logits_after(change: Callable[[KVCache], object]) -> list[Tensor]:
        logits = []
        for engine, first in zip(engines, firsts, strict=True):
            cache = copy.deepcopy(first)
            change(cache)
            for seed in (1, 2):
                step = prompt(1, 2, seed).expand(cache.batch_size, -1)
                logits.append(engine(step, past_key_values=cache).logits)
        return logits

    for name, change in CHANGES.items():
        first_logits, second_logits, *expected = logits_after(change)
        assert torch.equal(first_logits, expected[0]), name
        assert torch.equal(second_logits, expected[1]), name
    assert [first.length for first in firsts] == [8, 8]


def test_caches_of_transformers_are_gone_on_with_and_filled(tmp_path: Path) -> None:
    engine, ids = kv_on_disk(vanilla("gpt2"), tmp_path), prompt(2, 8)
    cache = DynamicCache()
    with torch.no_grad():
        vanilla("gpt2")(ids[:, :5], past_key_values=cache)
    logits = engine(ids[:, 5:], past_key_values=cache).logits
    assert error(logits, fused("gpt2")(ids).logits[:, 5:]) <= 1e-5
    assert cache.get_seq_length() == 8
    with torch.no_grad():
        vanilla_logits = vanilla("gpt2")(ids[:, :1], past_key_values=cache).logits
    assert error(vanilla_logits, fused("gpt2")(torch.cat((ids, ids[:, :1]), dim=1)).logits[:, -1:]) <= 1e-5


def test_a_cache_in_memory_is_another_engine_s(tmp_path: Path) -> None:
    engine, resident = kv_on_disk(vanilla("gpt2"), tmp_path), fused("gpt2")
    with pytest.raises(ValueError, match=r"made by another engine: it holds .* on the CPU, .* keeps .* on disk"):
        engine(prompt(1, 1), past_key_values=resident(prompt(1, 4)).past_key_values)
    with pytest.raises(ValueError, match=r"made by another engine: it holds .* on disk, .* keeps .* on the CPU"):
        resident(prompt(1, 1), past_key_values=engine(prompt(1, 4)).past_key_values)


def test_several_caches_live_at_a_time(tmp_path: Path) -> None:
    """Texts in turns, each with a file of its own; then several threads on one engine."""
    engine = kv_on_disk(vanilla("gptj"), tmp_path)
    texts = [prompt(1, 6, seed) for seed in range(4)]
    expected = [greedy(fused("gptj"), text, 8) for text in texts]
    caches: list[KVCache | None] = [None] * 4
    new, generated = list(texts), list(texts)
    for _ in range(8):
        for index, cache in enumerate(caches):
            out = engine(new[index], past_key_values=cache)
            caches[index], new[index] = out.past_key_values, out.logits[:, -1:].argmax(-1)
            generated[index] = torch.cat((generated[index], new[index]), dim=1)
    assert all(map(torch.equal, generated, expected))

    def work(number: int) -> None:
        torch.set_num_threads(1)
        generated[number] = greedy(engine, texts[number], 8)

    generated = [torch.zeros(1)] * 4
    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(map(torch.equal, generated, expected))


def test_a_cache_ends_with_its_threads_and_its_file(tmp_path: Path) -> None:
    """The file has no name, so a killed process leaves nothing behind."""
    engine = kv_on_disk(vanilla("gpt2"), tmp_path)
    gc.collect()  # frees what errors of other tests keep alive, before threads are counted
    counts = [len(os.listdir(f"/proc/self/{kind}")) for kind in ("task", "fd")]
    cache = engine(prompt(1, 5)).past_key_values
    assert len(os.listdir("/proc/self/task")) == counts[0] + 2
    assert not list(tmp_path.iterdir())
    cache.reorder_cache(torch.tensor([0]))
    engine(prompt(1, 1), past_key_values=cache)
    cache.reserve(1, 900)
    engine(prompt(1, 1), past_key_values=cache)
    assert len(os.listdir("/proc/self/task")) == counts[0] + 2
    del cache
    assert [len(os.listdir(f"/proc/self/{kind}")) for kind in ("task", "fd")] == counts


def test_waits_are_stages_and_spans(tmp_path: Path) -> None:
    """Reads, waits, layers and writes are on one clock; a new file continues the spans of the previous one."""
    engine = kv_on_disk(vanilla("gpt2"), tmp_path)
    cache = greedy(engine, prompt(1, 4), 5, return_dict_in_generate=True).past_key_values
    stages = {(entry.phase, entry.stage) for entry in engine.stage_times()}
    assert {(Phase.PREFILL, Stage.FETCH_KV), (Phase.DECODE, Stage.FETCH_KV)} <= stages
    assert Stage.FETCH not in {stage for _, stage in stages}
    cache.reorder_cache(torch.tensor([0]))
    assert isinstance(cache.heads, HeadsOnDisk)
    spans = cache.heads.take_spans()
    counts = [sum(span.kind == kind for span in spans) for kind in ("wait", "compute", "write")]
    assert counts == [5 * LAYERS] * 3
    assert sum(span.kind == "read" for span in spans) >= 5 * LAYERS
    computed = [span for span in spans if span.kind == "compute"]
    assert all(before.end_ns <= after.begin_ns for before, after in pairwise(computed))
    assert not cache.heads.take_spans()


def test_a_profiler_sees_the_waits(tmp_path: Path) -> None:
    engine = kv_on_disk(vanilla("gpt2"), tmp_path)
    texts: list[Tensor] = []
    names = profiled(lambda: texts.append(greedy(engine, prompt(1, 4), 3)))
    assert torch.equal(texts[0], greedy(fused("gpt2"), prompt(1, 4), 3))
    fetched = [parsed.layer for name in names if (parsed := parse(name)) and parsed.stage == Stage.FETCH_KV]
    assert fetched == [*range(LAYERS)] * 3


def test_memory_for_the_cache_is_that_of_the_slots(tmp_path: Path) -> None:
    """Two of nine layers are in memory. The text and its growing cache continue as if all layers were."""
    model = small_model("gpt2", n_layer=9, n_positions=512)
    engine = kv_on_disk(model, tmp_path)
    cache = greedy(engine, prompt(2, 300), 20, return_dict_in_generate=True).past_key_values
    stream = kv_stream_of(cache)
    assert len(stream.memory(0)) * stream.slots == 2 * stream.slot_bytes
    assert stream.slot_bytes == cache.layer(0).keys.nbytes + cache.layer(0).values.nbytes
    assert 9 * stream.slot_bytes > 4 * stream.all_slots.numel()
    assert torch.equal(greedy(engine, prompt(2, 300), 20), greedy(labkit.init_inference(model), prompt(2, 300), 20))
