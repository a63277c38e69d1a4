"""Several steps in one call give the tokens, the cache, the draws and the times of steps one by one."""

from collections.abc import Callable
from itertools import accumulate
from time import sleep
from typing import Any

import pytest
import torch
from helpers.models.engines import error, greedy, prompt, vanilla
from helpers.models.layer_ranges import CutModel
from helpers.models.long_ropes import SHORT, long_rope_model
from helpers.models.small_models import VOCAB
from helpers.sweeps import swept
from transformers import PreTrainedModel, set_seed

import labkit
from labkit.engine.runners import one_call
from labkit.engine.runners.step import Ahead, StepInput
from labkit.kernels import DecodeStep
from labkit.kernels.reading import USUAL
from labkit.stages import Phase, Stage

MODELS = ("gpt2", "llama", "bloom", "mistral", "gemma2", "gptj", "opt", "qwen3")
each_model = pytest.mark.parametrize("name", swept(MODELS, ("gpt2", "llama", "bloom", "mistral")))


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Steps of each call that may have several."""
    steps: list[int] = []
    run_ahead = DecodeStep.run_ahead

    def counted(self: DecodeStep, *arguments: Any, **options: Any) -> torch.Tensor:
        tokens = run_ahead(self, *arguments, **options)
        steps.append(tokens.shape[1])
        return tokens

    monkeypatch.setattr(DecodeStep, "run_ahead", counted)
    monkeypatch.setattr(one_call, "CALL_NS", 1 << 60)  # on a busy machine one slow step would forbid several in a call
    return steps


def at_once(name: str) -> labkit.InferenceEngine:
    return at_once_of(vanilla(name))


def at_once_of(model: PreTrainedModel) -> labkit.InferenceEngine:
    """An engine that compares no ways to read the weights, which needs single steps."""
    engine = labkit.init_inference(model, impl="cpp")
    engine.module.runner.fast.readings.fix(USUAL)
    return engine


@each_model
@pytest.mark.usefixtures("poisoned")
def test_tokens_equal_vanilla(name: str, calls: list[int]) -> None:
    ids, mask = prompt(3, 9), torch.ones(3, 9, dtype=torch.int64)
    mask[0, :4] = mask[1, :1] = 0
    expected = greedy(vanilla(name), ids, 70, attention_mask=mask)
    assert torch.equal(greedy(at_once(name), ids, 70, attention_mask=mask), expected)
    assert max(calls) > 8
    assert sum(calls) + 1 == 70  # the prompt gives a token, too


@pytest.mark.parametrize("options", [{}, {"repetition_penalty": 1.2}], ids=["argmax", "rules"])
def test_a_call_ends_where_a_text_needs_another_rotation(options: dict[str, Any], calls: list[int]) -> None:
    model, ids = long_rope_model(), prompt(2, 5) % 128
    texts = [greedy(side, ids, SHORT + 40, **options) for side in (at_once_of(model), model)]
    assert torch.equal(*texts)
    assert SHORT - 5 in accumulate(calls)


@pytest.mark.parametrize("pad", [0, 5])
def test_rows_end_at_their_own_step(pad: int, calls: list[int]) -> None:
    ids = prompt(4, 6)
    texts = greedy(vanilla("gpt2"), ids, 40)
    ends = [int(texts[0, 15]), int(texts[1, 30])]
    options = {"do_sample": False, "max_new_tokens": 40, "pad_token_id": pad, "eos_token_id": ends}
    assert torch.equal(at_once("gpt2").generate(ids, **options), vanilla("gpt2").generate(ids, **options))
    assert calls


def test_what_is_cached_and_timed_is_that_of_single_steps(calls: list[int]) -> None:
    ids, engine = prompt(2, 7), at_once("llama")
    engine.module.runner.clock.reset()
    options = {"do_sample": False, "max_new_tokens": 30, "pad_token_id": 0, "return_dict_in_generate": True}
    output, expected = engine.generate(ids, **options), vanilla("llama").generate(ids, **options)
    assert torch.equal(output.sequences, expected.sequences)
    assert output.past_key_values.get_seq_length() == expected.past_key_values.get_seq_length() == 36
    assert calls
    assert {time.calls for time in engine.stage_times() if time.phase == "decode"} == {29}
    last = expected.sequences[:, -1:]
    with torch.no_grad():
        logits = vanilla("llama")(last, past_key_values=expected.past_key_values).logits
    assert error(engine(last, past_key_values=output.past_key_values).logits, logits) <= 1e-4


def test_a_call_takes_no_longer_than_an_interrupt_may_wait(calls: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_call, "CALL_NS", 1)
    assert torch.equal(greedy(at_once("gpt2"), prompt(1, 4), 20), greedy(vanilla("gpt2"), prompt(1, 4), 20))
    assert calls == []


def test_positions_end_where_the_table_does(calls: list[int]) -> None:
    engine, most = at_once("gpt2"), vanilla("gpt2").config.n_positions
    ids = prompt(1, most - 20)
    assert torch.equal(greedy(engine, ids, 20), greedy(vanilla("gpt2"), ids, 20))
    assert calls
    with pytest.raises(ValueError, match=f"{most + 1} tokens are more than the model's {most} positions"):
        greedy(engine, ids, 30)


def test_layers_of_a_pipeline_take_one_step_at_a_time(calls: list[int]) -> None:
    """The last of them have a head, and get rows instead of tokens."""
    model, ids = vanilla("llama"), prompt(2, 5)
    cut = CutModel(model, (0, 1, model.config.num_hidden_layers), "cpp")
    for runner in cut.runners:
        assert isinstance(runner, one_call.OneCallRunner)
        runner.readings.fix(USUAL)
    caches, ahead = cut.new_caches(30), Ahead(20, lambda vocabulary: torch.zeros(vocabulary), frozenset(), None)
    tokens, texts = ids, [ids]
    for follows in (False, *[True] * 10):
        step = StepInput(tokens, caches[0], greedy=True, follows=follows, ahead=ahead if follows else None)
        chosen = cut.step(step, caches).result
        assert chosen is not None
        tokens = chosen
        texts.append(tokens)
    assert torch.equal(torch.cat(texts, dim=1), greedy(vanilla("llama"), ids, 11))
    assert calls == []


def test_logits_that_are_no_numbers_are_an_error_in_any_step(calls: list[int]) -> None:
    engine, ids = at_once("llama"), prompt(1, 5)
    token = int(greedy(engine, ids, 12)[0, -1])
    with torch.inference_mode():
        engine.weights.embedding.table[token] = torch.nan
    with pytest.raises(FloatingPointError, match="no logit is a number"):
        greedy(engine, ids, 40)
    assert 1 < calls[-1] < 32


SAMPLING: dict[str, dict[str, Any]] = {
    "all": {"top_k": 0},
    "top-k and top-p": {"top_k": 20, "top_p": 0.9, "temperature": 0.7},
    "min-p": {"top_k": 0, "min_p": 0.05},
    "rules that change with the length": {
        "min_new_tokens": 30,
        "repetition_penalty": 1.3,
        "no_repeat_ngram_size": 2,
        "exponential_decay_length_penalty": (35, 1.02),
        "eos_token_id": [5, 17, 40],
    },
    "greedy": {"do_sample": False, "repetition_penalty": 1.2, "suppress_tokens": [1, 2, 3]},
    "ends": {"eos_token_id": list(range(3, 100, 9)), "top_k": 0},
}


@pytest.mark.parametrize("settings", SAMPLING.values(), ids=SAMPLING)
def test_choice_by_rules_equals_vanilla(settings: dict[str, Any], calls: list[int]) -> None:
    options = {"do_sample": True, "max_new_tokens": 50, "pad_token_id": 9, "eos_token_id": None} | settings
    texts, states = [], []
    for model in (at_once("gpt2"), vanilla("gpt2")):
        set_seed(5)
        texts.append(model.generate(prompt(3, 6), **options))
        states.append(torch.get_rng_state())
    assert torch.equal(*texts)
    assert torch.equal(*states)
    assert max(calls) > 4


def test_choices_that_rounding_decides_are_made_by_transformers(
    calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All tokens are equally likely, and the likeliest 50 have the probability p but for rounding."""
    options = {"do_sample": True, "max_new_tokens": 20, "pad_token_id": 0, "temperature": 1e30, "top_k": 0}
    options["top_p"] = 50 / VOCAB
    texts = []
    for model in (at_once("llama"), vanilla("llama")):
        set_seed(2)
        texts.append(model.generate(prompt(2, 6), **options))
    assert torch.equal(*texts)
    assert calls == [1] * 18  # each such choice ends its call, and the last step is alone


def test_time_of_choosing_is_a_stage(calls: list[int]) -> None:
    engine = at_once("llama")
    engine.stage_times(reset=True)
    engine.generate(prompt(2, 6), do_sample=True, max_new_tokens=40, pad_token_id=0)
    times = {time.phase: time for time in engine.stage_times() if time.stage == Stage.SAMPLE}
    assert {phase: time.calls for phase, time in times.items()} == {Phase.PREFILL: 1, Phase.DECODE: 39}
    assert all(time.total_ms > 0 for time in times.values())
    assert calls


@pytest.mark.parametrize("kv_dtype", [None, torch.int8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
def test_every_type_gives_the_tokens_of_single_steps(
    dtype: torch.dtype, kv_dtype: torch.dtype | None, calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, ids = labkit.init_inference(vanilla("llama"), dtype=dtype, kv_dtype=kv_dtype), prompt(2, 6)
    engine.module.runner.fast.readings.fix(USUAL)
    several = greedy(engine, ids, 40)
    assert calls
    monkeypatch.setattr(one_call, "MOST_STEPS", 1)
    assert torch.equal(greedy(engine, ids, 40), several)


class Streamer:
    """Keeps the new tokens of each step. then: called with the number of steps so far."""

    def __init__(self, then: Callable[[int], object] = lambda step: None) -> None:
        self.then, self.steps, self.ended = then, list[torch.Tensor](), False

    def put(self, value: torch.Tensor) -> None:
        if value.ndim == 1:  # the prompt comes first, in 2-D
            self.steps.append(value.clone())
            self.then(len(self.steps))

    def end(self) -> None:
        self.ended = True


CHOICES: dict[str, dict[str, Any]] = {"greedy": {"do_sample": False}, "sampled": {"do_sample": True, "top_p": 0.9}}
each_choice = pytest.mark.parametrize("choice", CHOICES.values(), ids=CHOICES)


@each_choice
@pytest.mark.parametrize("batch", [1, 3])
def test_a_streamer_gets_the_tokens_of_vanilla(batch: int, choice: dict[str, Any], calls: list[int]) -> None:
    ids, streamers, texts = prompt(batch, 4), [], []
    ends = greedy(vanilla("gpt2"), ids, 40)[:, 20].tolist()
    for model in (at_once("gpt2"), vanilla("gpt2")):
        set_seed(3)
        streamers.append(Streamer())
        options = choice | {"max_new_tokens": 40, "pad_token_id": 3, "eos_token_id": ends}
        texts.append(model.generate(ids, streamer=streamers[-1], **options))
    ours, theirs = streamers
    assert torch.equal(*texts)
    assert torch.equal(torch.stack(ours.steps), torch.stack(theirs.steps))
    assert ours.ended
    assert max(calls) > 1


@each_choice
@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_no_step_follows_the_one_at_which_a_streamer_raises(
    choice: dict[str, Any], error: type[BaseException], calls: list[int]
) -> None:
    def fail(step: int) -> None:
        if step == 11:
            raise error("no more")

    engine, streamer = at_once("llama"), Streamer(fail)
    cache = engine.module.new_cache()
    with pytest.raises(error, match="no more"):
        engine.generate(
            prompt(2, 6), streamer=streamer, past_key_values=cache, max_new_tokens=40, pad_token_id=0, **choice
        )
    assert len(streamer.steps) == 11
    assert cache.length == 6 + 10  # the last token is not read yet
    assert not streamer.ended
    assert calls[-1] > 1


@each_choice
def test_a_streamer_may_use_the_engine(choice: dict[str, Any], calls: list[int]) -> None:
    """It generates from a larger batch, which replaces the workspace, and draws random numbers."""
    texts = []
    for model in (at_once("gpt2"), vanilla("gpt2")):

        def generate_more(step: int, model: Any = model) -> None:
            if step % 7 == 0:
                texts.append(model.generate(prompt(step, 5), do_sample=True, max_new_tokens=9, pad_token_id=0))

        set_seed(4)
        options = choice | {"max_new_tokens": 30, "pad_token_id": 0}
        texts.append(model.generate(prompt(1, 6), streamer=Streamer(generate_more), **options))
    for ours, theirs in zip(texts[: len(texts) // 2], texts[len(texts) // 2 :], strict=True):
        assert torch.equal(ours, theirs)
    assert max(calls) > 4


def test_time_of_a_streamer_is_time_of_choosing(calls: list[int]) -> None:
    engine = at_once("llama")
    engine.stage_times(reset=True)
    greedy(engine, prompt(1, 6), 20, streamer=Streamer(lambda step: sleep(0.01)))
    times = [time for time in engine.stage_times() if time.phase == Phase.DECODE]
    chosen = sum(time.total_ms for time in times if time.stage == Stage.SAMPLE)
    assert chosen >= 19 * 10
    assert sum(time.total_ms for time in times) - chosen < 19 * 10
    assert {time.calls for time in times} == {19}
    assert max(calls) > 4
