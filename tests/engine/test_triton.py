"""The engine with impl="triton": its decode step equals the vanilla model, with few kernels.

Triton's interpreter is a thousand times slower than a GPU, so the tests use few tokens and layers.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from helpers.kernels.gpus import INTERPRETED
from helpers.models.engines import error, greedy, prompt, result, shallow, vanilla
from helpers.models.small_models import small_model
from helpers.sweeps import sweep, swept
from transformers import set_seed

import labkit
from labkit.engine import InferenceEngine
from labkit.engine.runners.cuda_graph import Node
from labkit.kernels import gpu
from labkit.kernels.decode_step import STAGES_PER_LAYER
from labkit.kernels.tuned import Tile
from labkit.stages import Phase, Stage, message

pytestmark = INTERPRETED
TOLERANCE = 1e-4  # of the range of the logits, compared with transformers in float32
MASK = torch.tensor([[0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 0, 1], [1] * 6])
PADDED = prompt(3, 6).where(MASK.bool(), 0)

EMBED, HEAD = (("embed", "embed"),), (("head_argmax", "lm_head"), ("next_step", "sample"))
PROJECTED = (("embed", "embed"),) * 2 + (("gemm", "embed"),)
REST = (("attend_one", "attention"), ("gemm", "attn_out"), ("mlp_gemm", "mlp"), ("gemm", "mlp_out"))
FIVE = (("qkv_gemm", "qkv"), *REST)
HEAD_NORMS = (("gemm", "qkv"), ("finish_heads", "qkv"), *REST)
NORMED = (
    ("gemm", "attn_out"),
    ("add_normed", "mlp"),
    ("mlp_gemm", "mlp"),
    ("gemm", "mlp_out"),
    ("add_normed", "residual"),
)
SEVEN = (*FIVE[:2], *NORMED)
THREE = (("qkv_and_mlp", "qkv+mlp"), ("attend_one", "attention"), ("gemm", "attn_out+mlp_out"))
KERNELS = {  # (kernel, stage) before the layers, of a layer, after them
    "gpt2": (EMBED, FIVE, HEAD),
    "gptj": (EMBED, THREE, HEAD),
    "gpt-neo": (EMBED, FIVE, HEAD),
    "gpt-neox-parallel": (EMBED, THREE, HEAD),
    "bloom-normed-residual": (EMBED, FIVE, HEAD),
    "opt-post-norm": (PROJECTED, FIVE, (("gemm", "lm_head"), *HEAD)),
    "llama": (EMBED, FIVE, HEAD),
    "qwen3": (EMBED, HEAD_NORMS, HEAD),
    "gemma2": (EMBED, SEVEN, HEAD),
}


@cache
def engine_of(name: str, layers: int = 2) -> InferenceEngine:
    return labkit.init_inference(shallow(name, layers), impl="triton")


def expected_nodes(name: str) -> tuple[Node, ...]:
    before, of_layer, after = KERNELS[name]
    inner = [(kernel, Stage(stage), layer) for layer in range(2) for kernel, stage in of_layer]
    outside = [[(kernel, Stage(stage), None) for kernel, stage in part] for part in (before, after)]
    return tuple(
        Node(kernel, message(Phase.DECODE, stage, layer)) for kernel, stage, layer in (*outside[0], *inner, *outside[1])
    )


@pytest.mark.parametrize("name", swept(KERNELS.keys(), ["llama"]))
def test_greedy_tokens_of_a_padded_batch_equal_vanilla(name: str) -> None:
    """Three sequences of unequal length, for which four are computed; and the kernels of the step."""
    actual = greedy(engine_of(name), PADDED, 3, attention_mask=MASK)
    for row, visible in enumerate(MASK.bool()):
        assert torch.equal(actual[row, 6:], greedy(shallow(name, 2), PADDED[row, visible][None], 3)[0, -3:])
    assert engine_of(name).graph_nodes == expected_nodes(name)


@pytest.mark.parametrize("name", swept(["bloom-normed-residual", "opt", "qwen3", "gemma2"], []))
@pytest.mark.usefixtures("poisoned")
def test_logits_of_prompt_and_steps_equal_the_full_forward(name: str) -> None:
    model, text = engine_of(name).module, prompt(2, 7)
    cache = model.new_cache()
    logits = [result(model, text[:, :5], cache, keep=5)]
    logits += [result(model, text[:, index, None], cache, follows=True) for index in (5, 6)]
    with torch.no_grad():
        expected = shallow(name, 2)(text).logits
    assert error(torch.cat(logits, dim=1), expected) <= TOLERANCE


@pytest.mark.parametrize(
    ("name", "quant"),
    [
        ("gpt2", {"weight": {"q_groups": 4}, "lm_head": True}),
        pytest.param("gpt-neox-parallel", {}, marks=sweep),
    ],
)
def test_int8_equals_the_reference_on_the_same_weights(name: str, quant: dict[str, Any]) -> None:
    """They differ only by the rounding of rows and of the cache. The head of gpt2 is also its embedding."""
    logits = []
    for impl in ("reference", "triton"):
        model = labkit.init_inference(shallow(name, 2), dtype=torch.int8, quant=quant, impl=impl).module
        cache, text = model.new_cache(), prompt(2, 5)
        prefill = result(model, text[:, :4], cache, keep=4)
        logits.append(torch.cat((prefill, result(model, text[:, 4:], cache, follows=True)), dim=1))
    expected, actual = logits
    assert 0 < (actual - expected).square().mean().sqrt() / expected.std() < 5e-2


@sweep
def test_sampling_equals_vanilla() -> None:
    texts = []
    for model in (shallow("llama", 1), engine_of("llama", 1)):
        set_seed(3)
        texts.append(model.generate(prompt(2, 4), do_sample=True, top_k=20, max_new_tokens=3, pad_token_id=0))
    assert torch.equal(*texts)


@sweep
def test_beams_equal_vanilla() -> None:
    """Beams run op by op, on memory that moves with every choice."""
    options = {"num_beams": 2, "attention_mask": MASK[:2, 2:]}
    expected, actual = (
        greedy(model, PADDED[:2, 2:], 3, **options) for model in (shallow("gpt2", 1), engine_of("gpt2", 1))
    )
    assert torch.equal(actual, expected)


@sweep
def test_of_equal_logits_the_first_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """The equal logits are in one program, and in two: tokens 2 k and 2 k + 1 are equal, as are 66 + k and k."""
    monkeypatch.setattr(gpu, "default_tile", lambda *_: Tile(16, 64))
    model, ids = small_model("gpt2-untied", num_hidden_layers=1), prompt(2, 4)
    head = model.get_output_embeddings().weight
    with torch.no_grad():
        head[1:66:2] = head[0:66:2]
        head[66:] = head[:65]
    actual = greedy(labkit.init_inference(model, impl="triton"), ids, 3)
    assert torch.equal(actual, greedy(model, ids, 3))
    assert int(actual[:, 4:].max()) < 66
    assert not (actual[:, 4:] % 2).any()


@sweep
def test_logits_that_are_no_numbers_are_never_taken() -> None:
    engine, step = labkit.init_inference(shallow("gptj", 1), impl="triton"), prompt(1, 1)
    model, bias = engine.module, engine.module.runner.layer_range.weights.head.matrix.bias
    assert bias is not None
    cache = model.new_cache()
    result(model, prompt(1, 3), cache)
    best = int(result(model, step, cache, greedy=True, follows=True))
    for numbers in (slice(best, best + 1), slice(None)):
        with torch.inference_mode():
            bias[numbers] = float("nan")
        cache.crop(-1)
        token = int(result(model, step, cache, greedy=True, follows=True))
        assert token != best
    assert token == -1
    with pytest.raises(FloatingPointError, match="no logit is a number"):
        greedy(engine, prompt(1, 3), 2)


@sweep
def test_repeated_runs_are_bitwise_the_same() -> None:
    engine, ids, options = engine_of("gpt2", 1), prompt(1, 3), {"return_dict_in_generate": True, "output_logits": True}
    first, second = (greedy(engine, ids, 3, **options) for _ in range(2))
    assert all(torch.equal(*logits) for logits in zip(first.logits, second.logits, strict=True))
    for _ in range(18 if torch.cuda.is_available() else 3):  # Triton's interpreter runs programs one by one
        assert torch.equal(greedy(engine, ids, 3), first.sequences)


def profiled(run: Callable[[], object]) -> list[str]:
    """Stage ranges that torch.profiler records, by start."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        run()
    events = sorted(profiler.events(), key=lambda event: event.time_range.start)
    return [event.name for event in events if event.name.startswith(("prefill/", "decode/"))]


@pytest.mark.parametrize("name", swept(["gpt2", "gptj"], ["gpt2"]))
def test_torch_profiler_sees_the_stages_of_every_layer(name: str) -> None:
    """A step ends with a separate stage for the work of the last kernel, before the loop reads the token."""
    messages = profiled(lambda: greedy(engine_of(name), prompt(1, 4), 2))
    prefill = [message(Phase.PREFILL, Stage(stage), layer) for layer in range(2) for stage in STAGES_PER_LAYER]
    step = dict.fromkeys(node.stage for node in expected_nodes(name))
    first = ["prefill/step", "prefill/embed", *prefill, "prefill/lm_head", "prefill/sample"]
    assert messages == [*first, "decode/step", *step, "decode/sample"]


def test_without_a_gpu_and_an_interpreter_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu.unavailable.cache_clear()
    monkeypatch.setattr(gpu, "interpreted", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    try:
        with pytest.raises(ValueError, match=r"needs an NVIDIA GPU .*; use impl='cpp', or set TRITON_INTERPRET=1"):
            labkit.init_inference(vanilla("gpt2"), impl="triton")
        assert labkit.init_inference(vanilla("gpt2")).impl in ("cpp", "reference")
    finally:
        gpu.unavailable.cache_clear()


@pytest.mark.parametrize(
    ("name", "sizes", "head_dim"), [("llama", {"head_dim": 258}, 258), ("gpt2", {"n_embd": 63}, 21)]
)
def test_heads_of_other_sizes_are_refused(name: str, sizes: dict[str, Any], head_dim: int) -> None:
    limits = f"head_dim is {head_dim}; the triton kernels take even sizes up to 256, impl 'cpp' any up to 512"
    model = small_model(name, **sizes)
    with pytest.raises(ValueError, match=limits):
        labkit.init_inference(model, impl="triton")


def test_use_triton_asks_for_it() -> None:
    assert labkit.init_inference(vanilla("gpt2"), use_triton=True).impl == "triton"
    with pytest.raises(ValueError, match="use_triton asks for impl='triton', got impl='cpp' too; leave one"):
        labkit.init_inference(vanilla("gpt2"), use_triton=True, impl="cpp")


@pytest.mark.parametrize("option", ["enable_cuda_graph", "dependent_launch"])
@pytest.mark.parametrize("impl", ["cpp", "reference", "triton"])
def test_what_only_a_gpu_can_do_is_refused(impl: str, option: str) -> None:
    with pytest.raises(ValueError, match=r"enable_cuda_graph and dependent_launch .*; leave them out"):
        labkit.init_inference(vanilla("gpt2"), {"impl": impl, option: True})
