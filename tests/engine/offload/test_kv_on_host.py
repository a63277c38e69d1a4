"""Engines with Triton kernels whose keys and values lie in the host's memory give the tokens of those that hold them
beside the kernels. In Triton's interpreter, where a copy is done when it is handed on; the last tests need a GPU.
"""

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engines import error, greedy, profiled, prompt, result, shallow, vanilla
from gpus import interpreted, on_gpu
from offloaded import LEAST
from small_models import SMALL_CONFIGS, small_model
from sweeps import sweep, swept
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

LAYERS = 3  # one more than there are slots for what is on its way
SAME = 1e-4  # of the range of the logits
HOST: dict[str, Any] = {"device": "cpu"}


def on_host(model: Any, **options: Any) -> FusedEngine:
    engine = labkit.init_inference(model, impl="triton", **{"kv_offload": HOST} | options)
    assert isinstance(engine, FusedEngine)
    return engine


def with_streamed_weights(model: Any, **options: Any) -> FusedEngine:
    """And as few layers on the device as possible."""
    offload = {"device": "cpu", "slots": 2}
    with pytest.raises(ValueError, match=LEAST) as refused:
        on_host(model, offload=offload | {"resident_gb": 0}, **options)
    found = LEAST.search(str(refused.value))
    assert found is not None
    engine = on_host(model, offload=offload | {"resident_gb": float(found[1])}, **options)
    assert engine.streamed is not None
    assert len(engine.streamed.layers) == model.config.num_hidden_layers
    return engine


def stream_of(cache: KVCache) -> DeviceCacheStream:
    assert isinstance(cache.stream, DeviceCacheStream)
    return cache.stream


def go_on(engine: Any, cache: KVCache | None, ids: Tensor, **options: Any) -> Any:
    """A step of so many tokens that it takes torch's products, which are faster than kernels in the interpreter."""
    assert ids.numel() > 16
    with torch.inference_mode():
        return engine(ids, past_key_values=cache, **options)


@interpreted
@pytest.mark.parametrize("name", swept(list(SMALL_CONFIGS), ["llama"]))
def test_tokens_equal_vanilla(name: str) -> None:
    """For every row of the policies: padded prompts op by op, then steps of five kernels in a layer or three, of three
    sequences, for which the kernels compute four.
    """
    ids, mask, model = (
        prompt(3, 6),
        torch.ones(3, 6, dtype=torch.long),
        shallow(name, 4 if name == "gpt-neo" else LAYERS),
    )
    mask[0, :2] = 0
    ids[0, :2] = 0
    engine = on_host(model)
    found = greedy(engine, ids, 3, attention_mask=mask, return_dict_in_generate=True)
    assert torch.equal(found.sequences, greedy(model, ids, 3, attention_mask=mask))
    stream = stream_of(found.past_key_values)
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
    """Of a prompt, and of a step with the kernels for few rows."""
    model, found = shallow("llama", 3), []
    options: dict[str, Any] = {"kv_dtype": kv_dtype, "dtype": dtype}
    for engine in (on_host(model, **options), labkit.init_inference(model, impl="triton", **options)):
        first = go_on(engine, None, prompt(2, 9))
        next_one = result(engine.module, prompt(2, 1, seed=1), first.past_key_values, follows=True)
        found.append((first.logits, next_one))
    assert all(map(torch.equal, *found))


@sweep
@interpreted
def test_weights_are_fetched_beside_keys_and_values() -> None:
    """All copies to the device are handed to the same queue, in the order of their use."""
    model, ids = shallow("gptj", LAYERS), prompt(1, 5)
    engine = with_streamed_weights(model)
    queues, order = engine.streamed.stream._queues, []  # type: ignore[union-attr]
    copied = queues.copy

    def noting(to: Tensor, data: Tensor, after: Any) -> Any:
        order.append("weights" if to.dim() == 1 else "cache")
        return copied(to, data, after)

    queues.copy = noting  # type: ignore[method-assign]
    assert torch.equal(greedy(engine, ids, 3), greedy(model, ids, 3))
    assert order == ["weights"] * 2 + ["cache"] * 2 + ["cache", "weights"] * (3 * LAYERS)


@sweep
@interpreted
def test_a_long_prompt_passes_each_layer_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """In chunks that go through a layer one after the other; then another text behind it, which grows the cache."""
    model = shallow("llama", LAYERS)
    ids, mask = prompt(1, 54), torch.ones(1, 54, dtype=torch.long)
    mask[0, :4] = 0
    with torch.no_grad():
        want = model(ids, attention_mask=mask).logits
    engine = on_host(model)
    monkeypatch.setattr(step, "CHUNK_ROWS", 20)
    first = go_on(engine, None, ids[:, :37], attention_mask=mask[:, :37])
    cache = first.past_key_values
    assert stream_of(cache).blocks_written == LAYERS
    assert stream_of(cache).bytes_read == 2 * 37 * stream_of(cache).host.shape.token_bytes  # of the next pass
    second = go_on(engine, cache, ids[:, 37:], attention_mask=mask)
    found = torch.cat((first.logits, second.logits), dim=1)
    assert float((found - want)[mask.bool()].abs().max() / want.std()) <= SAME


@sweep
@interpreted
def test_beams_go_on_with_their_own_keys_and_values() -> None:
    model, ids = shallow("gpt2", 3), prompt(1, 5)
    found = greedy(on_host(model), ids, 3, num_beams=2, num_return_sequences=2)
    assert torch.equal(found, greedy(model, ids, 3, num_beams=2, num_return_sequences=2))


@sweep
@interpreted
def test_caches_of_transformers_are_gone_on_with_and_filled() -> None:
    model, ids, cache = shallow("gpt2", 3), prompt(2, 16), DynamicCache()
    with torch.no_grad():
        want = model(ids).logits[:, 6:]
        model(ids[:, :6], past_key_values=cache)
        assert error(go_on(on_host(model), cache, ids[:, 6:]).logits, want) <= SAME
        assert cache.get_seq_length() == 16
        after = model(ids[:, :1], past_key_values=cache).logits
        assert error(after, model(torch.cat((ids, ids[:, :1]), dim=1)).logits[:, -1:]) <= SAME


@interpreted
def test_the_device_holds_a_few_layers_and_the_host_all_of_them() -> None:
    """One layer for the kernels, and two on their way; each slot has as much room as a layer takes."""
    cache = on_host(shallow("gpt2", LAYERS), kv_dtype=torch.int8).module.new_cache()
    cache.reserve(1, 128)
    slots, stream = cache.slots.heads, stream_of(cache)
    assert isinstance(slots, CacheSlots)
    work = slots.work
    assert work.key_scales is not None
    layer, words = 2 * (work.keys.nbytes + work.key_scales.nbytes), 8 * 128  # in which a token ends
    assert layer <= slots.memory.nbytes / 2 == stream.host.bytes / LAYERS < layer + words


@sweep
@interpreted
def test_waits_are_stages_and_spans() -> None:
    engine = on_host(shallow("gpt2", LAYERS))
    found: list[Any] = []
    names = profiled(lambda: found.append(greedy(engine, prompt(1, 17), 2, return_dict_in_generate=True)))
    fetched = [parsed.layer for name in names if (parsed := parse(name)) and parsed.stage == Stage.FETCH_KV]
    assert fetched == [*range(LAYERS)] * 2
    heads = found[0].past_key_values.heads
    assert isinstance(heads, HeadsOnHost)
    spans = heads.take_spans()
    for kind, ahead in (("wait", 0), ("compute", 0), ("write", 0), ("copy", 2)):
        assert [span.layer for span in spans if span.kind == kind] == [*range(LAYERS)] * 2 + [*range(ahead)]
    assert not heads.take_spans()


@interpreted
def test_memory_is_pinned_and_where_that_is_refused_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[int] = []
    monkeypatch.setattr(CpuQueues, "pin", lambda queues, memory: pinned.append(memory.nbytes))
    engine = on_host(shallow("gpt2", 3))
    cache = go_on(engine, None, prompt(1, 17)).past_key_values
    assert pinned == [stream_of(cache).host.bytes // 3] * 3

    def refuse(queues: CpuQueues, memory: Tensor) -> None:
        raise UserError(f"{memory.nbytes} bytes can't be pinned")

    monkeypatch.setattr(CpuQueues, "pin", refuse)
    for given in (None, cache):
        with pytest.raises(ValueError, match=r"\d+ bytes can't be pinned"):
            go_on(engine, given, prompt(1, 150 if given else 17))
    monkeypatch.undo()
    assert cache.length == 17
    cache.reserve(1, 167)


@interpreted
def test_too_little_memory_of_the_host_is_said_in_bytes_and_takes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a new cache, one that grows, and one that is copied; the text goes on once there is room."""
    engine = on_host(shallow("gpt2", 3))
    cache = go_on(engine, None, prompt(1, 17)).past_key_values
    token_bytes, made = stream_of(cache).host.shape.token_bytes, []
    monkeypatch.setattr(heads_on_host.psutil, "virtual_memory", lambda: SimpleNamespace(available=1000))
    monkeypatch.setattr(CpuQueues, "pin", lambda queues, memory: made.append(memory))
    said = "kv_offload: keys and values of 1 x {} tokens need {} bytes of the host's memory, which has 1000 available"
    with pytest.raises(ValueError, match=said.format(20, 3 * 20 * token_bytes)):
        go_on(engine, None, prompt(1, 20))
    with pytest.raises(ValueError, match=said.format(167, (4 * 167 - 3 * 17) * token_bytes)):
        go_on(engine, cache, prompt(1, 150))
    for change in (copy.deepcopy, lambda cache: cache.batch_repeat_interleave(2)):
        with pytest.raises(ValueError, match=r"has 1000 available; give fewer tokens or sequences, or kv_dtype=torch"):
            change(cache)
    assert not made
    monkeypatch.undo()
    assert cache.length == 17
    copy.deepcopy(cache).reserve(1, 167)


@sweep
@interpreted
def test_a_step_that_fails_leaves_the_cache_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half-way through the layers; the next one begins with the first layer."""
    model, ids = shallow("gpt2", LAYERS), prompt(1, 34)
    engine = on_host(model)
    cache = go_on(engine, None, ids[:, :17]).past_key_values
    layer = engine.module.layers[1]

    def fails(*given: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(layer, "forward", fails)
        with pytest.raises(KeyboardInterrupt):
            go_on(engine, cache, ids[:, 17:])
    assert cache.length == 17
    with torch.no_grad():
        want = model(ids).logits[:, 17:]
    assert error(go_on(engine, cache, ids[:, 17:]).logits, want) <= SAME


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
    """With keys and values of some MB in each layer, so that copies and kernels take long enough to meet."""
    return small_model(name, num_hidden_layers=8, hidden_size=1152, num_attention_heads=6, max_position_embeddings=2048)


@on_gpu
@pytest.mark.parametrize("slots", [2, 3])
@pytest.mark.parametrize("make", [on_host, with_streamed_weights])
@pytest.mark.parametrize("kv_dtype", [None, torch.int8], ids=["own", "int8"])
@pytest.mark.parametrize("name", ["llama"])
def test_tokens_of_a_gpu_equal_those_of_the_resident_engine(
    name: str, make: Callable[..., FusedEngine], kv_dtype: torch.dtype | None, slots: int
) -> None:
    """Again and again, of a prompt in several chunks and the steps behind it."""
    model, ids = large(name), prompt(3, 1500).cuda()
    resident = labkit.init_inference(model, impl="triton", enable_cuda_graph=False, kv_dtype=kv_dtype)
    engine, want = make(model, kv_offload=HOST | {"slots": slots}, kv_dtype=kv_dtype), greedy(resident, ids, 20)
    for _ in range(5):
        assert torch.equal(greedy(engine, ids, 20), want)


@on_gpu
def test_a_gpu_holds_a_few_layers_of_the_cache() -> None:
    engine, before = on_host(large("llama")), torch.cuda.memory_allocated()
    cache = greedy(engine, prompt(2, 1500).cuda(), 2, return_dict_in_generate=True).past_key_values
    layer = stream_of(cache).host.bytes / 8
    assert torch.cuda.memory_allocated() - before <= 1.2 * 3 * layer + (32 << 20)


@on_gpu
def test_copies_keep_their_order_on_the_clock_of_the_gpu() -> None:
    """To a microsecond: a layer is there before it is computed, and out of its slot before the next one comes in."""
    engine = on_host(large("llama"))
    cache = greedy(engine, prompt(2, 1500).cuda(), 4, return_dict_in_generate=True).past_key_values
    slots, spans = stream_of(cache).slots, stream_of(cache).take_spans()
    copies, computed, written = ([each for each in spans if each.kind == kind] for kind in ("copy", "compute", "write"))
    assert len(computed) == len(written) == 4 * 8
    for turn, used in enumerate(computed):
        assert copies[turn].layer == used.layer == written[turn].layer
        assert copies[turn].end_ns <= used.begin_ns + 1000
        assert used.end_ns <= written[turn].begin_ns + 1000
        if turn + slots < len(copies):
            assert written[turn].end_ns <= copies[turn + slots].begin_ns + 1000
