"""Engines with Triton kernels that stream their layers, from host memory or through it from a file, give the tokens of
engines with resident layers.

Runs in Triton's interpreter, where a copy is done at once; the last tests need a GPU.
"""

import gc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.kernels.gpus import INTERPRETED, interpreted, marked, on_gpu
from helpers.models.engines import error, greedy, profiled, prompt, result, shallow, vanilla
from helpers.models.offloaded import flip_byte, least_resident_gb
from helpers.models.small_models import small_model
from helpers.sweeps import sweep, swept
from torch import Tensor

import labkit
from labkit.engine.engine import FusedEngine
from labkit.engine.offload import host, room
from labkit.engine.runners import step
from labkit.kernels.decode_step import StreamedLayers
from labkit.kernels.layer_stream import LayerStream
from labkit.kernels.layer_stream.device import DeviceStream, HeldBlocks
from labkit.kernels.slot_stream.queues import CpuQueues
from labkit.stages import Stage, parse
from labkit.system.errors import UserError

LAYERS = 3  # one more than there are slots
TOLERANCE = 1e-4  # of the range of the logits, compared with transformers in float32
MODELS = ("llama", "gptj", "gpt2", "opt-post-norm", "bloom-normed-residual", "qwen3", "gpt-neo")
WHERE = ("cpu", "disk")
CASES = {f"{store}-{name}": (store, name) for store in WHERE for name in MODELS}
INT8: dict[str, Any] = {"quant": {"weight": {"q_groups": 4}, "lm_head": True}}
PRECISIONS: dict[str, dict[str, Any]] = {
    "float16": {"dtype": torch.float16},
    "int8": INT8,
    "int4": {"quant": {"weight": {"num_bits": 4, "q_groups": 2, "q_type": "asymmetric"}}},
}
STORED = {f"{name}-{store}": (options, store) for name, options in PRECISIONS.items() for store in WHERE}


def offload_to(store: str, folder: Path) -> dict[str, Any]:
    return {"device": store, "slots": 2} | ({"path": folder} if store == "disk" else {})


def streamed(model: Any, store: str, folder: Path, more_layers: int = 0, **options: Any) -> FusedEngine:
    """Engine with as few layers on the device as possible, plus `more_layers`."""
    offload = offload_to(store, folder)
    resident_gb = least_resident_gb(model, offload, impl="triton", **options)
    if more_layers:
        probe = labkit.init_inference(model, impl="triton", offload=offload | {"resident_gb": resident_gb}, **options)
        resident_gb += more_layers * layers_of(probe).stream.slot_bytes / 1e9
    engine = labkit.init_inference(model, impl="triton", offload=offload | {"resident_gb": resident_gb}, **options)
    assert isinstance(engine, FusedEngine)
    return engine


def logits(engine: Any) -> Tensor:
    """Logits of a prompt long enough for torch's products, which the interpreter runs faster than the kernels."""
    with torch.inference_mode():
        return engine(prompt(1, 17)).logits


def layers_of(engine: Any) -> StreamedLayers:
    assert engine.streamed is not None
    return engine.streamed


@interpreted
@pytest.mark.parametrize("case", swept(CASES, []))
def test_tokens_equal_vanilla(case: tuple[str, str], tmp_path: Path) -> None:
    """A padded prompt op by op, then steps with five kernels per layer or three; each step fetches a layer once."""
    (store, name), ids, mask = case, prompt(2, 10), torch.ones(2, 10, dtype=torch.long)
    mask[0, :2] = 0
    ids[0, :2] = 0
    model = shallow(name, 4 if name == "gpt-neo" else LAYERS)
    engine = streamed(model, store, tmp_path)
    assert torch.equal(greedy(engine, ids, 3, attention_mask=mask), greedy(model, ids, 3, attention_mask=mask))
    layers = layers_of(engine)
    assert isinstance(layers.stream, DeviceStream)
    assert isinstance(layers.stream.host, HeldBlocks if store == "cpu" else LayerStream)
    count = model.config.num_hidden_layers
    assert layers.layers == tuple(range(count))
    assert 3 * count <= layers.stream.blocks_read <= 3 * count + layers.stream.slots
    assert store == "disk" or not any(tmp_path.iterdir())


@interpreted
@pytest.mark.parametrize("case", swept(STORED, []))
def test_logits_are_those_of_the_resident_engine_in_every_precision(
    case: tuple[dict[str, Any], str], tmp_path: Path
) -> None:
    (options, store), model = case, shallow("llama", LAYERS)
    resident = labkit.init_inference(model, impl="triton", **options)
    assert torch.equal(logits(streamed(model, store, tmp_path, **options)), logits(resident))


@interpreted
@pytest.mark.parametrize("store", swept(WHERE, []))
def test_with_more_memory_more_layers_stay(store: str, tmp_path: Path) -> None:
    """If all layers fit, nothing is streamed."""
    model = shallow("gpt2", LAYERS + 1)
    partly = streamed(model, store, tmp_path, more_layers=1)
    assert len(layers_of(partly).layers) == LAYERS
    offload = offload_to(store, tmp_path) | {"resident_gb": 1}
    whole = labkit.init_inference(model, impl="triton", offload=offload)
    assert isinstance(whole, FusedEngine)
    assert whole.streamed is None
    expected = logits(labkit.init_inference(model, impl="triton"))
    assert torch.equal(logits(partly), expected)
    assert torch.equal(logits(whole), expected)


@sweep
@interpreted
def test_a_long_prompt_fetches_each_layer_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks pass a layer one after the other; each attends to the tokens of earlier chunks in the cache."""
    model = shallow("llama", LAYERS)
    ids, mask = prompt(2, 30), torch.ones(2, 30, dtype=torch.long)
    mask[0, :4] = 0
    with torch.no_grad():
        expected = model(ids, attention_mask=mask).logits
    engine = streamed(model, "cpu", tmp_path)
    monkeypatch.setattr(step, "CHUNK_ROWS", 20)
    actual = engine(ids, attention_mask=mask).logits
    assert float((actual - expected)[mask.bool()].abs().max() / expected.std()) <= 1e-4
    stream = layers_of(engine).stream
    assert LAYERS <= stream.blocks_read <= LAYERS + stream.slots


@sweep
@interpreted
def test_a_model_that_is_consumed_is_empty_afterwards(tmp_path: Path) -> None:
    model = small_model("gpt2", num_hidden_layers=LAYERS)
    engine = streamed(model, "cpu", tmp_path)
    offload = offload_to("cpu", tmp_path) | {"resident_gb": 1.001 * layers_of(engine).resident_bytes / 1e9}
    consumed = labkit.init_inference(model, impl="triton", offload=offload, consume_model=True)
    assert layers_of(consumed).layers == tuple(range(LAYERS))
    assert not sum(parameter.numel() for parameter in model.parameters())
    assert torch.equal(logits(consumed), logits(engine))


@interpreted
@pytest.mark.parametrize("options", swept({"float32": {}, "int8": INT8}, []))
def test_a_checkpoint_of_a_triton_engine_is_streamed_as_it_is(options: dict[str, Any], tmp_path: Path) -> None:
    """Nothing is written; a checkpoint for the C++ kernels has another layout and is packed again."""
    model = shallow("gpt2", LAYERS)
    for impl in ("triton", "cpp"):
        labkit.init_inference(model, impl=impl, save_mp_checkpoint_path=tmp_path / impl, **options)
    expected = logits(labkit.init_inference(model, impl="triton", **options))
    for impl, files in (("triton", 0), ("cpp", 1)):
        engine = streamed(labkit.resolve(str(tmp_path / impl)), "disk", tmp_path / f"of {impl}")
        assert torch.equal(logits(engine), expected)
        assert len(list((tmp_path / f"of {impl}").rglob("*.safetensors"))) == files


@sweep
@interpreted
def test_a_file_that_is_altered_is_noticed_and_the_engine_goes_on_when_it_is_whole(tmp_path: Path) -> None:
    """The step fails after earlier steps, and leaves the cache unchanged."""
    model, ids = shallow("gptj", LAYERS), prompt(1, 24)
    engine = streamed(model, "disk", tmp_path)
    (file,) = tmp_path.rglob("*.safetensors")
    offset = layers_of(engine).stream.blocks[1].offset + 8
    cache = engine.module.new_cache()
    with torch.no_grad():
        expected = model(ids).logits

    def next_logits() -> Tensor:
        """Logits of the token that follows the cache."""
        length = cache.length
        return result(engine.module, ids[:, length : length + 1], cache, follows=True)

    def three_steps() -> None:
        for _ in range(3):
            next_logits()

    result(engine.module, ids[:, :20], cache)
    assert error(next_logits(), expected[:, 20:21]) <= TOLERANCE
    flip_byte(file, offset)
    with pytest.raises(RuntimeError, match=r"layer 1 of .* was altered"):
        three_steps()  # layers that were prefetched before the change are intact
    flip_byte(file, offset)
    assert error(next_logits(), expected[:, cache.length - 1 : cache.length]) <= TOLERANCE


@sweep
@interpreted
def test_a_profiler_sees_the_fetches(tmp_path: Path) -> None:
    engine = streamed(shallow("gpt2", LAYERS), "cpu", tmp_path)
    names = profiled(lambda: greedy(engine, prompt(1, 17), 2))
    fetched = [parsed.layer for name in names if (parsed := parse(name)) and parsed.stage == Stage.FETCH]
    assert fetched == [*range(LAYERS)] * 2


@marked(INTERPRETED)
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"offload": {}, "enable_cuda_graph": True}, "got offload with enable_cuda_graph or dependent_launch"),
        ({"offload": {}, "dependent_launch": True}, "got offload with enable_cuda_graph or dependent_launch"),
        ({"offload": {"device": "cpu", "path": "x"}}, "got path with device='cpu', which writes nothing; leave one"),
    ],
    ids=str,
)
def test_options_that_contradict_each_other_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        labkit.init_inference(vanilla("gpt2"), impl="triton", **options)


@marked(INTERPRETED)
@pytest.mark.parametrize("store", WHERE)
def test_the_memory_that_layers_are_copied_from_is_pinned(
    store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All layers in host memory, or the slots of a file; if pinning is refused, the error says so."""
    pinned: list[tuple[int, int]] = []

    def pin(queues: CpuQueues, memory: Tensor) -> None:
        pinned.append((memory.data_ptr(), memory.nbytes))

    monkeypatch.setattr(CpuQueues, "pin", pin)
    model = shallow("gpt2", LAYERS)
    stream = layers_of(streamed(model, store, tmp_path)).stream
    assert isinstance(stream, DeviceStream)
    slots = [stream.host.memory(turn) for turn in range(stream.host.slots)]
    for slot in slots:
        begin, end = slot.data_ptr(), slot.data_ptr() + slot.nbytes
        assert any(start <= begin and end <= start + size for start, size in pinned)
    assert sum(size for _, size in pinned) == sum(slot.nbytes for slot in slots)

    def refuse(queues: CpuQueues, memory: Tensor) -> None:
        raise UserError(f"{memory.nbytes} bytes can't be pinned")

    monkeypatch.setattr(CpuQueues, "pin", refuse)
    with pytest.raises(ValueError, match=r"\d+ bytes can't be pinned"):
        streamed(model, store, tmp_path)


@marked(INTERPRETED)
def test_too_little_memory_of_the_host_is_said_in_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, offload = shallow("gpt2", LAYERS), offload_to("cpu", tmp_path)
    resident_gb = least_resident_gb(model, offload, impl="triton")
    monkeypatch.setattr(host.psutil, "virtual_memory", lambda: SimpleNamespace(available=1000))
    words = rf"the {LAYERS} layers that don't stay on the GPU take \d+ bytes .* has 1000 available; use device='disk'"
    with pytest.raises(ValueError, match=words):
        labkit.init_inference(model, impl="triton", offload=offload | {"resident_gb": resident_gb})


def test_more_memory_than_a_gpu_has_free_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(room, "free_on_gpu", lambda device: 70_000_000_000)
    with pytest.raises(ValueError, match=r"got resident_gb = 80.0, and the GPU has 70 GB free; pass less"):
        room.room_for_weights(room.Offload(device="cpu", resident_gb=80), 4, gpu)
    assert room.room_for_weights(room.Offload(device="cpu", resident_gb=60), 4, gpu) == 60e9
    assert room.room_for_weights(room.Offload(device="cpu"), 4, gpu) == pytest.approx(49e9)


def large(name: str) -> Any:
    """Model with layers of some MB, so that copies and kernels are long enough to overlap."""
    sizes: dict[str, Any] = {"hidden_size": 1152, "num_attention_heads": 6, "max_position_embeddings": 1024}
    sizes |= {"llama": {"intermediate_size": 4096}, "gptj": {"n_inner": 4096}}[name]
    return small_model(name, num_hidden_layers=8, **sizes)


@on_gpu
@pytest.mark.parametrize("store", WHERE)
@pytest.mark.parametrize("name", ["llama", "gptj"])
@pytest.mark.parametrize("options", [{}, INT8], ids=["float32", "int8"])
def test_tokens_of_a_gpu_equal_those_of_the_resident_engine(
    options: dict[str, Any], name: str, store: str, tmp_path: Path
) -> None:
    """Repeatedly, for a prompt in several chunks and the steps after it."""
    model, ids = large(name), prompt(3, 700).cuda()
    resident = labkit.init_inference(model, impl="triton", enable_cuda_graph=False, **options)
    engine, expected = streamed(model, store, tmp_path, **options), greedy(resident, ids, 20)
    for _ in range(5):
        assert torch.equal(greedy(engine, ids, 20), expected)


@on_gpu
@pytest.mark.parametrize("store", WHERE)
def test_the_weights_on_a_gpu_take_no_more_than_what_was_given(store: str, tmp_path: Path) -> None:
    gc.collect()  # engines of earlier tests
    model, before = large("llama"), requested_bytes()
    engine = streamed(model, store, tmp_path, more_layers=2)
    gc.collect()  # what the error with the least memory refers to
    vectors = 8 * 64 * 1024  # bytes for the vectors of the streamed layers
    assert requested_bytes() - before <= layers_of(engine).resident_bytes + vectors


def requested_bytes() -> int:
    """Bytes of all tensors on the GPU, without what PyTorch's allocator adds to them."""
    return torch.cuda.memory_stats()["requested_bytes.all.current"]


@on_gpu
def test_a_slot_is_filled_behind_its_use_and_used_when_it_is_filled(tmp_path: Path) -> None:
    """By the GPU's own clock, to a microsecond."""
    engine = streamed(large("llama"), "cpu", tmp_path)
    greedy(engine, prompt(1, 5), 4)
    stream = layers_of(engine).stream
    spans = stream.take_spans()
    copies, computed = ([span for span in spans if span.kind == kind] for kind in ("copy", "compute"))
    for turn, layer_span in enumerate(computed):
        assert copies[turn].layer == layer_span.layer
        assert copies[turn].end_ns <= layer_span.begin_ns + 1000
        if turn + stream.slots < len(copies):
            assert copies[turn + stream.slots].begin_ns >= layer_span.end_ns - 1000
