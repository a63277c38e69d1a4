"""The engine on a GPU: CUDA graphs, dependent launches, tensors on two devices."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from helpers.kernels.gpus import ON_GPU
from helpers.models.engines import FEW, error, greedy, prompt, result, vanilla
from torch import Tensor
from torch.autograd import DeviceType
from transformers import set_seed

import labkit
from labkit.engine import InferenceEngine

TOLERANCE = 1e-4  # of the range of the logits, compared with transformers in float32 on the CPU
MASK = torch.tensor([[0, 0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0, 1], [1] * 7])
PADDED = prompt(3, 7).where(MASK.bool(), 0)
NAMES = [*FEW, "bloom-normed-residual", "gpt-neox-parallel", "qwen3", "mixtral", "qwen2-moe", "qwen3-moe"]
pytestmark = ON_GPU


@cache
def on_gpu(name: str, **options: Any) -> InferenceEngine:
    return labkit.init_inference(vanilla(name), impl="triton", **options)


def needs_dependent_launch() -> None:
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("needs compute capability 9.0")


def steps(engine: InferenceEngine, text: Tensor, count: int = 4) -> Tensor:
    """Logits [B, count, V] of the last tokens, from a step for each."""
    model, start = engine.module, text.shape[1] - count
    cache = model.new_cache()
    result(model, text[:, :start], cache)
    indices = range(start, text.shape[1])
    logits = [result(model, text[:, index, None], cache, follows=True) for index in indices]
    return torch.cat(logits, dim=1).cpu()


def test_auto_is_triton_where_a_gpu_is() -> None:
    engine = labkit.init_inference(vanilla("gpt2"))
    assert engine.impl == "triton"
    assert engine.device.type == "cuda"


@pytest.mark.parametrize("name", NAMES)
def test_greedy_tokens_equal_vanilla(name: str) -> None:
    """Also for a padded batch, for more sequences than one pass takes, and for a cache that grows."""
    for ids, options in ((PADDED, {"attention_mask": MASK}), (prompt(19, 5), {}), (prompt(1, 9), {})):
        actual = greedy(on_gpu(name), ids, 20, **options)
        assert actual.device == ids.device
        assert torch.equal(actual, greedy(vanilla(name), ids, 20, **options))


@pytest.mark.parametrize("name", NAMES)
def test_logits_of_steps_equal_vanilla(name: str) -> None:
    text = prompt(3, 12)
    with torch.no_grad():
        expected = vanilla(name)(text).logits[:, -4:]
    assert error(steps(on_gpu(name), text), expected) <= TOLERANCE


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int8])
def test_narrow_weights_give_logits_near_those_of_the_cpu(dtype: torch.dtype) -> None:
    """int8 weights are the same on both devices, and everything else is bfloat16."""
    for name in ("gptj", "llama"):
        logits = []
        for impl in ("reference", "triton"):
            engine = labkit.init_inference(vanilla(name), dtype=dtype, impl=impl)
            logits.append(steps(engine, prompt(3, 12)) if impl == "triton" else engine(prompt(3, 12)).logits[:, -4:])
        assert (logits[1] - logits[0]).square().mean().sqrt() / logits[0].std() < 5e-2


@pytest.mark.parametrize("name", NAMES)
def test_a_graph_plays_what_was_launched_bitwise(name: str) -> None:
    launched = labkit.init_inference(vanilla(name), impl="triton", enable_cuda_graph=False)
    assert torch.equal(steps(on_gpu(name), prompt(3, 12)), steps(launched, prompt(3, 12)))
    assert torch.equal(greedy(on_gpu(name), PADDED, 12), greedy(launched, PADDED, 12))


@pytest.mark.parametrize("dependent", [False, True], ids=["", "dependent"])
@pytest.mark.parametrize("name", ["gptj", "llama", "qwen3", "qwen2-moe"])
def test_repeated_runs_are_bitwise_the_same(name: str, dependent: bool) -> None:
    if dependent:
        needs_dependent_launch()
    engine = on_gpu(name, dependent_launch=dependent)
    first = steps(engine, prompt(4, 30), 20)
    tokens = greedy(engine, prompt(4, 9), 40)
    for _ in range(20):
        assert torch.equal(steps(engine, prompt(4, 30), 20), first)
        assert torch.equal(greedy(engine, prompt(4, 9), 40), tokens)


@pytest.mark.parametrize("name", ["gptj", "llama"])
def test_a_dependent_launch_changes_no_bit(name: str) -> None:
    needs_dependent_launch()
    dependent, apart = (on_gpu(name, dependent_launch=early) for early in (True, False))
    assert torch.equal(steps(dependent, prompt(4, 30), 20), steps(apart, prompt(4, 30), 20))


def kernels_of(run: Callable[[], object]) -> list[str]:
    """Names of the kernels that the GPU runs, in order."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    events = sorted(profiler.events(), key=lambda event: event.time_range.start)
    kernels = [event.name for event in events if event.device_type == DeviceType.CUDA]
    return [name.lstrip("_").removesuffix("_kernel") for name in kernels]


@pytest.mark.parametrize("name", NAMES)
def test_the_nodes_of_a_graph_are_its_kernels(name: str) -> None:
    engine = on_gpu(name)
    greedy(engine, prompt(3, 5), 4)
    recording = engine.module.runner.decoder.last
    assert recording is not None
    assert recording.graph is not None
    assert kernels_of(recording.graph.replay) == [node.kernel for node in engine.graph_nodes]


def test_a_profiled_run_computes_the_same() -> None:
    texts: list[Tensor] = []
    with torch.profiler.profile():
        texts.append(greedy(on_gpu("llama"), prompt(2, 5), 12))
    assert torch.equal(texts[0], greedy(on_gpu("llama"), prompt(2, 5), 12))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_sampling_runs_where_the_prompt_is(device: str) -> None:
    ids, options = prompt(3, 5).to(device), {"do_sample": True, "top_k": 20, "repetition_penalty": 1.2}
    texts = []
    for _ in range(2):
        set_seed(3)
        texts.append(on_gpu("llama").generate(ids, max_new_tokens=9, eos_token_id=4, pad_token_id=0, **options))
    assert texts[0].device.type == device
    assert torch.equal(*texts)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_beams_equal_vanilla(device: str) -> None:
    options: dict[str, Any] = {"num_beams": 3}
    expected = greedy(vanilla("gpt2"), PADDED, 8, attention_mask=MASK, **options)
    actual = greedy(on_gpu("gpt2"), PADDED.to(device), 8, attention_mask=MASK.to(device), **options)
    assert torch.equal(actual.cpu(), expected)


def test_caches_in_turn_play_the_same_graph() -> None:
    engine = labkit.init_inference(vanilla("gpt2"), impl="triton")
    for seed in range(3):
        assert torch.equal(greedy(engine, prompt(1, 6, seed), 9), greedy(vanilla("gpt2"), prompt(1, 6, seed), 9))
    (slots,) = engine.module.runner.layer_range.pool.free
    assert len(slots.recordings) == 1


def test_weights_on_the_gpu_are_those_of_the_source() -> None:
    """Compares tensors in memory with the model itself as the source."""

    class Tensors:
        hf_config = vanilla("llama").config

        def names(self) -> set[str]:
            return set(vanilla("llama").state_dict())

        def get(self, name: str, dtype: torch.dtype | None = None, cut: object = None) -> Tensor:
            return vanilla("llama").state_dict()[name].to(dtype)

    engine = labkit.init_inference(Tensors(), impl="triton")
    assert torch.equal(steps(engine, prompt(2, 9)), steps(on_gpu("llama"), prompt(2, 9)))
