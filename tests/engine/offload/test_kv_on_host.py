"""Engines with Triton kernels and an offloaded KV cache in host memory give the tokens of engines with a resident
cache.

Runs in Triton's interpreter, where a copy is done at once; the last tests need a GPU.
"""

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.kernels.gpus import interpreted, on_gpu
from helpers.models.engines import error, greedy, profiled, prompt, result, shallow, vanilla
from helpers.models.offloaded import least_resident_gb
from helpers.models.small_models import small_model
from helpers.sweeps import sweep, swept
from torch import Tensor
from transformers import DynamicCache

import labkit
from labkit.engine.engine import FusedEngine
from labkit.engine.memory import heads_on_host
from labkit.engine.memory.heads_on_host import HeadsOnHost
from labkit.engine.memory.kv_cache import KVCache
from labkit.engine.runners import step
from labkit.kernels.cache_stream.device import CacheSlots, DeviceCacheStream
from labkit.kernels.slot_stream.queues import CpuQueues
from labkit.stages import Stage, parse
from labkit.system.errors import UserError

LAYERS = 3  # one more than the slots for copies under way
SAME = 1e-4  # of the range of the logits
HOST: dict[str, Any] = {"device": "cpu"}


def on_host(model: Any, **options: Any) -> FusedEngine:
    engine = labkit.init_inference(model, impl="triton", **{"kv_offload": HOST} | options)
    assert isinstance(engine, FusedEngine)
    return engine


def with_streamed_weights(model: Any, **options: Any) -> FusedEngine:
    """Engine that also keeps as few layers on the device as possible."""
    offload = {"device": "cpu", "slots": 2}
    resident_gb = least_resident_gb(model, offload, impl="triton", **{"kv_offload": HOST} | options)
    engine = on_host(model, offload=offload | {"resident_gb": resident_gb}, **options)
    assert engine.streamed is not None
    assert len(engine.streamed.layers) == model.config.num_hidden_layers
    return engine


# Learned positions, rotation of neighbours and of halves, local layers, ALiBi, windows, norms of heads, caps.
ATTENTIONS = ("gpt2", "gptj", "llama", "gpt-neo", "bloom", "mistral", "qwen3", "gemma2")


def stream_of(cache: KVCache) -> DeviceCacheStream:
    assert isinstance(cache.stream, DeviceCacheStream)
    return cache.stream


def continued(engine: Any, cache: KVCache | None, ids: Tensor, **options: Any) -> Any:
    """Output of a step with enough tokens for torch's products, which the interpreter runs faster than the kernels."""
    assert ids.numel() > 16
    with torch.inference_mode():
        return engine(ids, past_key_values=cache, **options)


@interpreted
@pytest.mark.parametrize("name", swept(ATTENTIONS, ["llama"]))
def test_tokens_equal_vanilla(name: str) -> None:
    """For every kind of attention: padded prompts op by op, then steps with five kernels per layer or three. There are
    three sequences, for which the kernels compute four.
    """
    ids, mask, model = (
        prompt(3, 6),
        torch.ones(3, 6, dtype=torch.long),
        shallow(name, 4 if name == "gpt-neo" else LAYERS),
    )
    mask[0, :2] = 0
    ids[0, :2] = 0
    engine = on_host(model)
    output = greedy(engine, ids, 3, attention_mask=mask, return_dict_in_generate=True)
    assert torch.equal(output.sequences, greedy(model, ids, 3, attention_mask=mask))
    stream = stream_of(output.past_key_values)
    layers = model.config.num_hidden_layers
    assert stream.blocks_written == 3 * layers
    assert stream.bytes_written == (6 + 1 + 1) * layers * stream.host.shape.token_bytes


@sweep
@interpreted
@pytest.mark.parametrize("kv_dtype", swept({"own": None, "int8": torch.int8}, ["int8"]))
@pytest.mark.parametrize("dtype", swept([torch.float32, torch.bfloat16], ["float32"]))
def test_logits_are_those_of_the_resident_engine_in_every_type(
    dtype: torch.dtype, kv_dtype: torch.dtype | None
) -> None:
    """Logits of a prompt, and of a step with the kernels for few rows."""
    model, logits = shallow("llama", 3), []
    options: dict[str, Any] = {"kv_dtype": kv_dtype, "dtype": dtype}
    for engine in (on_host(model, **options), labkit.init_inference(model, impl="triton", **options)):
        first = continued(engine, None, prompt(2, 9))
        next_logits = result(engine.module, prompt(2, 1, seed=1), first.past_key_values, follows=True)
        logits.append((first.logits, next_logits))
    assert all(map(torch.equal, *logits))


@sweep
@interpreted
def test_weights_are_fetched_beside_keys_and_values() -> None:
    """All copies to the device go into the same queue, in the order of use."""
    model, ids = shallow("gptj", LAYERS), prompt(1, 5)
    engine = with_streamed_weights(model)
    queues, order = engine.streamed.stream._queues, []  # type: ignore[union-attr]
    copy = queues.copy

    def record_and_copy(to: Tensor, data: Tensor, after: Any) -> Any:
        order.append("weights" if to.dim() == 1 else "cache")
        return copy(to, data, after)

    queues.copy = record_and_copy  # type: ignore[method-assign]
    assert torch.equal(greedy(engine, ids, 3), greedy(model, ids, 3))
    assert order == ["weights"] * 2 + ["cache"] * 2 + ["cache", "weights"] * (3 * LAYERS)


@sweep
@interpreted
def test_a_long_prompt_passes_each_layer_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks pass a layer one after the other; then another text follows, for which the cache grows."""
    model = shallow("llama", LAYERS)
    ids, mask = prompt(1, 54), torch.ones(1, 54, dtype=torch.long)
    mask[0, :4] = 0
    with torch.no_grad():
        expected = model(ids, attention_mask=mask).logits
    engine = on_host(model)
    monkeypatch.setattr(step, "CHUNK_ROWS", 20)
    first = continued(engine, None, ids[:, :37], attention_mask=mask[:, :37])
    cache = first.past_key_values
    assert stream_of(cache).blocks_written == LAYERS
    assert stream_of(cache).bytes_read == 2 * 37 * stream_of(cache).host.shape.token_bytes  # for the next pass
    second = continued(engine, cache, ids[:, 37:], attention_mask=mask)
    logits = torch.cat((first.logits, second.logits), dim=1)
    assert float((logits - expected)[mask.bool()].abs().max() / expected.std()) <= SAME


@sweep
@interpreted
def test_beams_go_on_with_their_own_keys_and_values() -> None:
    model, ids = shallow("gpt2", 3), prompt(1, 5)
    texts = greedy(on_host(model), ids, 3, num_beams=2, num_return_sequences=2)
    assert torch.equal(texts, greedy(model, ids, 3, num_beams=2, num_return_sequences=2))


@sweep
@interpreted
def test_caches_of_transformers_are_gone_on_with_and_filled() -> None:
    model, ids, cache = shallow("gpt2", 3), prompt(2, 16), DynamicCache()
    with torch.no_grad():
        expected = model(ids).logits[:, 6:]
        model(ids[:, :6], past_key_values=cache)
        assert error(continued(on_host(model), cache, ids[:, 6:]).logits, expected) <= SAME
        assert cache.get_seq_length() == 16
        vanilla_logits = model(ids[:, :1], past_key_values=cache).logits
        assert error(vanilla_logits, model(torch.cat((ids, ids[:, :1]), dim=1)).logits[:, -1:]) <= SAME


@interpreted
def test_the_device_holds_a_few_layers_and_the_host_all_of_them() -> None:
    """One layer for the kernels, and two under way; each slot has exactly the room of a layer."""
    cache = on_host(shallow("gpt2", LAYERS), kv_dtype=torch.int8).module.new_cache()
    cache.reserve(1, 128)
    slots, stream = cache.slots.heads, stream_of(cache)
    assert isinstance(slots, CacheSlots)
    work = slots.work
    assert work.key_scales is not None
    layer, words = 2 * (work.keys.nbytes + work.key_scales.nbytes), 8 * 128  # at most 8 bytes of padding per token
    assert layer <= slots.memory.nbytes / 2 == stream.host.bytes / LAYERS < layer + words


@sweep
@interpreted
def test_waits_are_stages_and_spans() -> None:
    engine = on_host(shallow("gpt2", LAYERS))
    outputs: list[Any] = []
    names = profiled(lambda: outputs.append(greedy(engine, prompt(1, 17), 2, return_dict_in_generate=True)))
    fetched = [parsed.layer for name in names if (parsed := parse(name)) and parsed.stage == Stage.FETCH_KV]
    assert fetched == [*range(LAYERS)] * 2
    heads = outputs[0].past_key_values.heads
    assert isinstance(heads, HeadsOnHost)
    spans = heads.take_spans()
    for kind, prefetched in (("wait", 0), ("compute", 0), ("write", 0), ("copy", 2)):
        assert [span.layer for span in spans if span.kind == kind] == [*range(LAYERS)] * 2 + [*range(prefetched)]
    assert not heads.take_spans()


@interpreted
def test_memory_is_pinned_and_where_that_is_refused_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[int] = []
    monkeypatch.setattr(CpuQueues, "pin", lambda queues, memory: pinned.append(memory.nbytes))
    engine = on_host(shallow("gpt2", 3))
    cache = continued(engine, None, prompt(1, 17)).past_key_values
    assert pinned == [stream_of(cache).host.bytes // 3] * 3

    def refuse(queues: CpuQueues, memory: Tensor) -> None:
        raise UserError(f"{memory.nbytes} bytes can't be pinned")

    monkeypatch.setattr(CpuQueues, "pin", refuse)
    for past_cache in (None, cache):
        with pytest.raises(ValueError, match=r"\d+ bytes can't be pinned"):
            continued(engine, past_cache, prompt(1, 150 if past_cache else 17))
    monkeypatch.undo()
    assert cache.length == 17
    cache.reserve(1, 167)


@interpreted
def test_too_little_memory_of_the_host_is_said_in_bytes_and_takes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a new cache, a growing one, and a copied one; the text continues once there is room."""
    engine = on_host(shallow("gpt2", 3))
    cache = continued(engine, None, prompt(1, 17)).past_key_values
    token_bytes, pinned = stream_of(cache).host.shape.token_bytes, []
    monkeypatch.setattr(heads_on_host.psutil, "virtual_memory", lambda: SimpleNamespace(available=1000))
    monkeypatch.setattr(CpuQueues, "pin", lambda queues, memory: pinned.append(memory))
    words = "kv_offload: keys and values of 1 x {} tokens need {} bytes of the host's memory, which has 1000 available"
    with pytest.raises(ValueError, match=words.format(20, 3 * 20 * token_bytes)):
        continued(engine, None, prompt(1, 20))
    with pytest.raises(ValueError, match=words.format(167, (4 * 167 - 3 * 17) * token_bytes)):
        continued(engine, cache, prompt(1, 150))
    for change in (copy.deepcopy, lambda cache: cache.batch_repeat_interleave(2)):
        with pytest.raises(ValueError, match=r"has 1000 available; give fewer tokens or sequences, or kv_dtype=torch"):
            change(cache)
    assert not pinned
    monkeypatch.undo()
    assert cache.length == 17
    copy.deepcopy(cache).reserve(1, 167)


@sweep
@interpreted
def test_a_step_that_fails_leaves_the_cache_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step fails half-way through the layers; the next step begins with the first layer."""
    model, ids = shallow("gpt2", LAYERS), prompt(1, 34)
    engine = on_host(model)
    cache = continued(engine, None, ids[:, :17]).past_key_values
    layer = engine.module.layers[1]

    def fails(*arguments: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(layer, "forward", fails)
        with pytest.raises(KeyboardInterrupt):
            continued(engine, cache, ids[:, 17:])
    assert cache.length == 17
    with torch.no_grad():
        expected = model(ids).logits[:, 17:]
    assert error(continued(engine, cache, ids[:, 17:]).logits, expected) <= SAME


@interpreted
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kv_offload": {}}, r"got device='disk' with a GPU, .*: use device='cpu', or impl='cpp'"),
        ({"enable_cuda_graph": True}, "got kv_offload with enable_cuda_graph or dependent_launch"),
        ({"dependent_launch": True}, "got kv_offload with enable_cuda_graph or dependent_launch"),
        ({"kv_offload": HOST | {"path": "x"}}, "got path with device='cpu', which writes nothing; leave one"),
    ],
    ids=str,
)
def test_options_that_contradict_each_other_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        on_host(vanilla("gpt2"), **options)


@interpreted
def test_a_cache_elsewhere_is_another_engine_s() -> None:
    model = shallow("gpt2", 3)
    engine, resident = on_host(model), labkit.init_inference(model)
    with pytest.raises(ValueError, match=r"made by another engine: it holds .* on the CPU, .* keeps .* on the host"):
        engine(prompt(1, 1), past_key_values=resident(prompt(1, 4)).past_key_values)


def large(name: str) -> Any:
    """Model with some MB of keys and values per layer, so that copies and kernels are long enough to overlap."""
    return small_model(name, num_hidden_layers=8, hidden_size=1152, num_attention_heads=6, max_position_embeddings=2048)


@on_gpu
@pytest.mark.parametrize("slots", [2, 3])
@pytest.mark.parametrize("make", [on_host, with_streamed_weights])
@pytest.mark.parametrize("kv_dtype", [None, torch.int8], ids=["own", "int8"])
@pytest.mark.parametrize("name", ["llama"])
def test_tokens_of_a_gpu_equal_those_of_the_resident_engine(
    name: str, make: Callable[..., FusedEngine], kv_dtype: torch.dtype | None, slots: int
) -> None:
    """Repeatedly, for a prompt in several chunks and the steps after it."""
    model, ids = large(name), prompt(3, 1500).cuda()
    resident = labkit.init_inference(model, impl="triton", enable_cuda_graph=False, kv_dtype=kv_dtype)
    engine, expected = make(model, kv_offload=HOST | {"slots": slots}, kv_dtype=kv_dtype), greedy(resident, ids, 20)
    for _ in range(5):
        assert torch.equal(greedy(engine, ids, 20), expected)


@on_gpu
def test_a_gpu_holds_a_few_layers_of_the_cache() -> None:
    engine, allocated = on_host(large("llama")), torch.cuda.memory_allocated()
    cache = greedy(engine, prompt(2, 1500).cuda(), 2, return_dict_in_generate=True).past_key_values
    layer = stream_of(cache).host.bytes / 8
    assert torch.cuda.memory_allocated() - allocated <= 1.2 * 3 * layer + (32 << 20)


@on_gpu
def test_copies_keep_their_order_on_the_clock_of_the_gpu() -> None:
    """To a microsecond: a layer arrives before it is computed, and leaves its slot before the next one arrives."""
    engine = on_host(large("llama"))
    cache = greedy(engine, prompt(2, 1500).cuda(), 4, return_dict_in_generate=True).past_key_values
    slots, spans = stream_of(cache).slots, stream_of(cache).take_spans()
    copies, computed, written = ([span for span in spans if span.kind == kind] for kind in ("copy", "compute", "write"))
    assert len(computed) == len(written) == 4 * 8
    for turn, layer_span in enumerate(computed):
        assert copies[turn].layer == layer_span.layer == written[turn].layer
        assert copies[turn].end_ns <= layer_span.begin_ns + 1000
        assert layer_span.end_ns <= written[turn].begin_ns + 1000
        if turn + slots < len(copies):
            assert written[turn].end_ns <= copies[turn + slots].begin_ns + 1000
