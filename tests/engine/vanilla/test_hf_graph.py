"""The step that is captured on a GPU, run op by op: its tokens equal transformers' own `generate`."""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from helpers.models.small_models import VOCAB, small_model
from torch.overrides import TorchFunctionMode

from labkit.engine.vanilla.hf_graph import GraphedModel, NumbersOnDevice, StaticStep
from labkit.harness.timing import TokenClock

NEW = 12
MODELS = ["gpt2", "gptj", "bloom", "llama", "opt"]


def prompt(length: int, batch: int = 2) -> torch.Tensor:
    return torch.randint(1, VOCAB, (batch, length), generator=torch.Generator().manual_seed(length))


def vanilla(model: Any, input_ids: torch.Tensor, new: int = NEW, **options: Any) -> torch.Tensor:
    with torch.inference_mode():
        return model.generate(input_ids, max_new_tokens=new, min_new_tokens=new, do_sample=False, **options)


@pytest.mark.parametrize("name", [*MODELS, "mistral", "gpt-neox-parallel", "qwen3"])
def test_tokens_are_those_of_generate(name: str) -> None:
    model, input_ids = small_model(name), prompt(9)
    assert torch.equal(
        GraphedModel(model, graph=False).generate(input_ids, max_new_tokens=NEW), vanilla(model, input_ids)
    )


@pytest.mark.parametrize("name", MODELS)
def test_padding_on_the_left_is_not_seen_and_does_not_stay(name: str) -> None:
    """The second prompt is shorter, so it lies where the padding of the first one was in the cache."""
    model, input_ids = small_model(name), prompt(9)
    mask = torch.ones_like(input_ids)
    mask[1, :4] = 0
    graphed = GraphedModel(model, graph=False)
    tokens = graphed.generate(input_ids, max_new_tokens=NEW, attention_mask=mask)
    assert torch.equal(tokens, vanilla(model, input_ids, attention_mask=mask))
    shorter, new = prompt(2), NEW + 7
    assert torch.equal(graphed.generate(shorter, max_new_tokens=new), vanilla(model, shorter, new))


def test_a_step_is_kept_for_calls_of_its_size_and_made_anew_for_others() -> None:
    model = small_model("llama")
    graphed = GraphedModel(model, graph=False)
    steps = []
    for input_ids in (prompt(5), prompt(5) + 1, prompt(6), prompt(5, batch=1)):
        assert torch.equal(
            graphed.generate(input_ids % VOCAB, max_new_tokens=4), vanilla(model, input_ids % VOCAB, new=4)
        )
        steps.append(graphed._step)
    assert steps[0] is steps[1]
    assert len({id(step) for step in steps}) == 3
    assert steps[2] is not None
    assert steps[2].shape == (2, 6 + 4 - 1)


class NothingFromTheHost(TorchFunctionMode):
    """Refuses operations that a graph cannot capture: tensors made from numbers of the host, or stored on the host."""

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **kwargs or {})
        assert func not in (torch.tensor, torch.as_tensor, torch.from_numpy)
        assert not isinstance(result, torch.Tensor) or result.is_meta, func
        return result


@pytest.mark.parametrize("name", [*MODELS, "llama-yarn", "mistral", "qwen3-biased"])
def test_a_step_neither_reads_a_number_nor_brings_one(name: str) -> None:
    """Tensors on the meta device have no numbers to read."""
    with torch.inference_mode():
        step = StaticStep(small_model(name).to("meta"), batch=2, slots=20)
        step.launch()  # allocates the memory of the cache
        with NothingFromTheHost():
            step.launch()


def test_a_number_is_filled_in_where_it_is_wanted() -> None:
    with NothingFromTheHost(), NumbersOnDevice():
        half = torch.tensor(1.5, dtype=torch.float16, device="meta")
        with pytest.raises(AssertionError):
            torch.tensor([1, 2], device="meta")
    assert (half.dtype, half.shape) == (torch.float16, ())
    with NumbersOnDevice():
        assert torch.equal(torch.tensor(3), torch.full((), 3))


class PlainStream:
    """Fake stream and fake graph, which run all work at once."""

    def wait_stream(self, stream: "PlainStream") -> None:
        return

    def replay(self) -> None:
        raise AssertionError("replaced below")


@pytest.mark.parametrize(("length", "new"), [(9, NEW), (1, 2), (3, 1)])
def test_nothing_stays_of_the_recording(length: int, new: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("Stream", "current_stream", "CUDAGraph"):
        monkeypatch.setattr(torch.cuda, name, PlainStream)
    for name in ("stream", "graph"):
        monkeypatch.setattr(torch.cuda, name, lambda stream: nullcontext())
    model = small_model("bloom")
    graphed = GraphedModel(model)
    step = graphed._step_for(batch=2, slots=length + new - 1)
    monkeypatch.setattr(step, "_replay", step.launch)
    assert torch.equal(graphed.generate(prompt(length), max_new_tokens=new), vanilla(model, prompt(length), new))


def test_the_streamer_gets_the_prompt_and_then_each_token() -> None:
    clock = TokenClock()
    GraphedModel(small_model("llama"), graph=False).generate(prompt(4), max_new_tokens=3, streamer=clock)
    assert len(clock.stamps_ns) == 3


@pytest.mark.parametrize("options", [{"do_sample": True}, {"num_beams": 2}])
def test_only_greedy_search_is_done(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"expected greedy search; use hf-eager"):
        GraphedModel(small_model("llama"), graph=False).generate(prompt(4), max_new_tokens=3, **options)


def test_a_model_without_a_static_cache_is_refused() -> None:
    with pytest.raises(ValueError, match=r"got a GPTNeoForCausalLM, expected .* static cache; use hf-eager"):
        GraphedModel(small_model("gpt-neo"), graph=False)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("name", [*MODELS, "mistral", "gpt-neox-parallel", "qwen3"])
def test_replays_give_the_tokens_of_launches(name: str) -> None:
    """Twice with different prompts, because the cache of the first one must not remain."""
    model = small_model(name).cuda()
    recorded, launched = GraphedModel(model), GraphedModel(model, graph=False)
    for shift in (0, 1):
        input_ids = ((prompt(9) + shift) % VOCAB).cuda()
        tokens = recorded.generate(input_ids, max_new_tokens=NEW)
        assert torch.equal(tokens, launched.generate(input_ids, max_new_tokens=NEW))
        assert torch.equal(tokens, vanilla(model, input_ids))
