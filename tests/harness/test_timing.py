"""Times of one generation, and `measure_latency` on a vanilla model."""

import gc
from time import sleep
from typing import Any

import pytest
import torch
from helpers.models.small_models import VOCAB, small_model
from tokenizers import Tokenizer, models
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

from labkit.engine import team_size
from labkit.harness import measure_latency
from labkit.harness.timing import timed_generate

ARGS = {"do_sample": False, "min_new_tokens": 6, "max_new_tokens": 6}


class Metronome:
    """Generates a token after each of the pauses `pauses_ms`; the first pause is that of the prompt."""

    def __init__(self, *pauses_ms: float) -> None:
        self.pauses_ms = pauses_ms
        self.collector_ran = True

    def generate(self, input_ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        streamer = kwargs["streamer"]
        streamer.put(input_ids)
        for pause in self.pauses_ms:
            sleep(pause / 1e3)
            streamer.put(torch.zeros(len(input_ids), dtype=torch.long))
        self.collector_ran = gc.isenabled()
        streamer.end()
        return torch.zeros(len(input_ids), input_ids.shape[1] + len(self.pauses_ms), dtype=torch.long)


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with one token per letter."""
    letters = {letter: index for index, letter in enumerate(sorted(ByteLevel.alphabet())[:VOCAB])}
    core = Tokenizer(models.BPE(vocab=letters, merges=[]))
    core.pre_tokenizer = ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    return PreTrainedTokenizerFast(tokenizer_object=core)


def test_first_token_and_steps_are_told_apart() -> None:
    metronome = Metronome(40, 5, 5, 10)
    times, sequences = timed_generate(metronome, torch.zeros(2, 3, dtype=torch.long))
    assert sequences.shape == (2, 7)
    assert len(times.decode_ms) == 3
    assert times.ttft_ms >= 40
    assert all(step >= pause for step, pause in zip(times.decode_ms, (5, 5, 10), strict=True))
    assert times.ttft_ms + sum(times.decode_ms) <= times.end_to_end_ms


def test_no_garbage_is_collected_during_a_run_and_the_collector_is_left_as_it_was() -> None:
    metronome = Metronome(1, 1)
    timed_generate(metronome, torch.zeros(1, 1, dtype=torch.long))
    assert not metronome.collector_ran
    assert gc.isenabled()


def test_one_token_has_no_time_per_token() -> None:
    with pytest.raises(ValueError, match="got 1 new token"):
        timed_generate(Metronome(1), torch.zeros(1, 1, dtype=torch.long))


def test_a_run_begins_and_ends_with_the_gpus_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """The simulated GPU needs another 20 ms after the call returns."""
    waits: list[int] = []

    def synchronize() -> None:
        waits.append(len(waits))
        sleep(0.02)

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    times, _ = timed_generate(Metronome(1, 1), torch.zeros(1, 1, dtype=torch.long))
    assert waits == [0, 1]
    assert times.ttft_ms < 20
    assert times.end_to_end_ms >= 20


def test_a_vanilla_model_has_all_samples_and_a_share_of_the_limit(tokenizer: PreTrainedTokenizerFast) -> None:
    measured = measure_latency(small_model("gpt2"), tokenizer, "abcde", ARGS, runs=3, warmup=1)
    case = measured.case
    assert (case.batch, case.prompt_tokens, case.new_tokens, case.dtype) == (1, 5, 6, "float32")
    assert {metric: len(samples) for metric, samples in measured.samples_ms.items()} == {
        "ttft": 3,
        "per_token": 15,
        "end_to_end": 3,
    }
    assert measured.work is not None
    if measured.read_bandwidth_gb_s is not None:
        assert measured.floor_share is not None
        assert 0 < measured.floor_share < 1
    assert "n too small" in str(measured)
    assert str(measured).startswith("P95 latency (ms) - ")


def test_a_vanilla_model_is_timed_on_the_threads_of_the_engine_and_the_record_names_them(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that may use one processor gives PyTorch eight threads."""
    before, seen, model = torch.get_num_threads(), set(), small_model("gpt2")
    monkeypatch.setattr(team_size, "usable_processors", lambda: 1)
    monkeypatch.setattr(team_size, "_usable", 1)
    monkeypatch.setattr(team_size, "_asked_again_at", 0.0)
    model.register_forward_pre_hook(lambda *_: seen.add(torch.get_num_threads()))
    torch.set_num_threads(8)
    try:
        measured = measure_latency(model, tokenizer, "abcde", ARGS, runs=1, warmup=1)
        assert torch.get_num_threads() == 8
    finally:
        torch.set_num_threads(before)
    assert seen == {1}
    assert measured.case.threads == measured.environment.threads == 1


def test_the_case_counts_the_prompts_of_a_batch(tokenizer: PreTrainedTokenizerFast) -> None:
    measured = measure_latency(small_model("llama"), tokenizer, ["abc", "def"], ARGS, runs=1, warmup=0)
    assert measured.case.batch == 2


@pytest.mark.parametrize(
    ("prompt", "changes", "message"),
    [
        ("", {}, "empty prompt"),
        ([], {}, "empty prompt"),
        (["abc", ""], {}, "empty prompt"),
        (["abc", "de"], {}, "without a pad token"),
        ("abc", {"num_beams": 2}, "got num_beams=2, expected 1"),
        ("abc", {"min_new_tokens": 1, "max_new_tokens": 1}, "at least 2"),
    ],
)
def test_what_has_no_latency_is_refused(
    tokenizer: PreTrainedTokenizerFast, prompt: str | list[str], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        measure_latency(small_model("gpt2"), tokenizer, prompt, {**ARGS, **changes}, runs=1, warmup=0)


def test_measure_latency_needs_a_run(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(ValueError, match="got runs = 0, expected at least 1"):
        measure_latency(small_model("gpt2"), tokenizer, "abc", ARGS, runs=0)
