"""The bench of what people wait for: its bars, its page, and every part on small models."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers.studies.comparisons import environment
from helpers.sweeps import sweep

from labkit.bench import waiting, waiting_parts
from labkit.bench.waiting import checks, page
from labkit.bench.waiting_parts import WaitingBench, attention_flops, outside_ms, tokens
from labkit.engine import init_inference
from labkit.engine.runners.stage_clock import StageTime
from labkit.harness import load_records
from labkit.harness.waiting_record import WaitingTime
from labkit.models.policies import model_config_of
from labkit.stages import Phase, Stage
from labkit.system.errors import UserError
from labkit.system.whole_file import write_whole
from labkit.weights.resolve import resolve


def record(part: str, samples: dict[str, tuple[float, ...]], **of: object) -> WaitingTime:
    fields = {"model": "smollm2-135m", "origin": "made up", "dtype": "bfloat16", "threads": 2, "unit": "s"} | of
    return WaitingTime(part=part, samples=samples, environment=environment(), **fields)  # type: ignore[arg-type]


RECORDS = {
    "load": record(
        "load", {"hf-eager": (0.1, 0.1), "bfloat16": (1.3, 1.3), "float32": (4.1,), "int8": (2.0,), "int4-64": (3.0,)}
    ),
    "step": record("attention of a step", {"attention": (30.0, 24.0), "probe": (40.0, 40.0)}, tokens=4000),
    "prompt": record("attention of a prompt", {"attention": (280.0,), "probe": (473.0,)}, tokens=2000),
    "fp32": record(
        "attention of a prompt", {"attention": (180.0,) * 2, "probe": (236.0,) * 2}, dtype="float32", tokens=2000
    ),
    "padding": record("padding", {"one batch": (1.0, 1.1), "one by one": (2.0, 2.2)}, batch=4),
    "choice": record("choice of a token", {"greedy": (0.05,), "top_p=0.9": (0.55,)}, unit="ms"),
}


@pytest.mark.parametrize(
    ("name", "met"),
    [
        ("load", [True, False, True, True]),
        ("step", [True]),
        ("prompt", [True]),
        ("fp32", [False]),
        ("padding", [True]),
        ("choice", [True, False]),
    ],
)
def test_each_figure_is_held_to_its_bar(name: str, met: list[bool]) -> None:
    assert [check.met for check in checks(RECORDS[name])] == met


def test_records_come_back_and_the_page_has_their_medians_and_missed_bars(tmp_path: Path) -> None:
    records = list(RECORDS.values())
    write_whole(tmp_path / "one.jsonl", "".join(of.model_dump_json() + "\n" for of in records))
    assert load_records(tmp_path) == records
    text = page(records)
    assert "**7 of 10 bars met**" in text
    assert "| smollm2-135m, bfloat16, 4000 tokens | attention | 27 | 24 to 30 |" in text
    assert "- choice of a token, batch 1, top_p=0.9: 0.55 ms (≤ 0.4 ms: missed)" in text


def test_flops_of_a_prompt_count_each_pair_that_is_seen() -> None:
    config = model_config_of(resolve("tiny-llama").hf_config)
    pairs = 5 * 6 // 2
    assert attention_flops(config, 5) == config.num_layers * 4 * pairs * config.num_heads * config.head_dim


def test_an_unknown_part_is_refused() -> None:
    with pytest.raises(UserError, match=r"got sleep, expected some of load, attention of a step"):
        waiting.main(only=["sleep"])


@sweep
@pytest.mark.parametrize("part", ["load", "padding", "choice of a token"])
def test_parts_measure_real_engines(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting_parts, "SMALL", "tiny-llama")
    monkeypatch.setattr(waiting_parts, "LOADED", "tiny-gpt2")
    drawn = tokens
    monkeypatch.setattr(waiting_parts, "tokens", lambda batch, length: drawn(batch, length) % 500)
    for of in waiting.PARTS[part](WaitingBench(environment(), threads=2, rounds=2)):
        assert all(len(samples) == 2 for samples in of.samples.values())  # type: ignore[union-attr]
        assert list(checks(of))


@sweep
def test_attention_is_sampled_next_to_the_probe() -> None:
    engine = init_inference(resolve("tiny-llama"), dtype=torch.bfloat16)
    turns = waiting_parts.AttentionTurns(engine, 512, 300, threads=2)
    waiting_parts.generate(engine, tokens(1, 300) % 500, 3 * waiting_parts.TURN + 1, streamer=turns)
    samples = turns.samples()
    assert [len(values) for values in samples.values()] == [2, 2]
    assert min(min(values) for values in samples.values()) > 0


def test_outside_is_what_a_longer_generation_adds_beyond_its_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    new: list[int] = []

    def generate(engine: object, prompt: object, tokens: int, **options: object) -> None:
        new.append(tokens)

    class Engine:
        def stage_times(self, *, reset: bool = True) -> list[StageTime]:
            took = [(Stage.MLP, 2.0), (Stage.SAMPLE, 0.5)]
            return [StageTime(Phase.DECODE, stage, None, 1, ms * sum(new[-1:])) for stage, ms in took]

    def seconds_of(call: Callable[[], object]) -> float:
        call()
        return (100 + 2.75 * new[-1]) / 1e3  # 100 ms of preparation

    monkeypatch.setattr(waiting_parts, "generate", generate)
    monkeypatch.setattr(waiting_parts, "seconds_of", seconds_of)
    outside = outside_ms(Engine(), tokens(1, 3), {"do_sample": False}, resolve("tiny-llama"))  # type: ignore[arg-type]
    assert outside == pytest.approx(0.75)
    assert new == [waiting_parts.SHORT, waiting_parts.LONG]
