"""Ranges that profilers see, and the clocks that run without a profiler."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import pytest
import torch
from helpers.models.engines import FEW, IMPLS, fused, greedy, profiled, prompt, vanilla

import labkit
from labkit import stages
from labkit.engine import InferenceEngine, StageTime
from labkit.kernels.decode_step import STAGES_PER_LAYER
from labkit.stages import Phase, Stage, message, parse, step_message

NEW = 4


def expected_messages(phase: Phase, layers: int) -> list[str]:
    """Messages of one forward pass, in the order of execution."""
    inner = [message(phase, Stage(stage), layer) for layer in range(layers) for stage in STAGES_PER_LAYER]
    return [message(phase, Stage.EMBED), *inner, message(phase, Stage.LM_HEAD)]


def expected_run(layers: int) -> list[str]:
    """Messages of a prompt and NEW - 1 steps; each step ends with the choice of a token."""

    def step(phase: Phase) -> list[str]:
        return [step_message(phase), *expected_messages(phase, layers), message(phase, Stage.SAMPLE)]

    return ["prefill", *step(Phase.PREFILL), "decode", *step(Phase.DECODE) * (NEW - 1)]


@pytest.fixture
def nvtx(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Messages of the NVTX ranges, in order. A phase contains steps, a step contains stages, and a stage nothing."""
    messages: list[str] = []
    depth: list[str] = []

    def push(text: str) -> None:
        label = parse(text)
        assert label is not None
        parents = [label.phase] if label.step else [label.phase, step_message(label.phase)] if label.stage else []
        assert depth == parents, f"{text} opened inside {depth}"
        messages.append(text)
        depth.append(text)

    monkeypatch.setattr(stages, "push", push)
    monkeypatch.setattr(stages, "pop", depth.pop)
    return messages


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("name", FEW)
def test_torch_profiler_sees_every_stage_of_every_layer(name: str, impl: str) -> None:
    engine = fused(name, impl)
    messages = profiled(lambda: greedy(engine, prompt(2, 5), NEW))
    assert messages == expected_run(engine.model_config.num_layers)


@pytest.mark.parametrize("impl", IMPLS)
def test_nvtx_sees_the_same_ranges(impl: str, nvtx: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "nvtx_listening", lambda: True)
    greedy(fused("gpt2", impl), prompt(2, 5), NEW)
    assert nvtx == expected_run(3)


def test_nothing_is_announced_when_nobody_listens(nvtx: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "nvtx_listening", lambda: False)
    entered: list[str] = []
    monkeypatch.setattr(torch.autograd.profiler, "record_function", entered.append)
    for impl in IMPLS:
        greedy(fused("gpt2", impl), prompt(2, 5), NEW)
    assert nvtx == []
    assert entered == []


def test_a_profiled_run_computes_the_same() -> None:
    engine, ids = fused("llama"), prompt(2, 5)
    texts: list[Any] = []
    profiled(lambda: texts.append(greedy(engine, ids, 12)))
    assert torch.equal(texts[0], greedy(engine, ids, 12))


def times_of(engine: InferenceEngine, run: Callable[[], object]) -> tuple[list[StageTime], float]:
    engine.stage_times(reset=True)
    start = perf_counter()
    run()
    return engine.stage_times(), (perf_counter() - start) * 1e3


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", FEW)
def test_stage_times_are_complete_and_add_up(name: str, threads: int) -> None:
    torch.set_num_threads(threads)
    engine = fused(name)
    times, wall_ms = times_of(engine, lambda: greedy(engine, prompt(2, 5), NEW))
    forwards = {Phase.PREFILL: 1, Phase.DECODE: NEW - 1}
    layers = engine.model_config.num_layers
    assert [message(time.phase, time.stage, time.layer) for time in times] == [
        text for phase in forwards for text in [*expected_messages(phase, layers), message(phase, Stage.SAMPLE)]
    ]
    assert all(time.calls == forwards[time.phase] for time in times)
    assert all(time.total_ms >= 0 for time in times)
    assert 0 < sum(time.total_ms for time in times) <= wall_ms


def test_stage_times_start_over_only_on_reset() -> None:
    engine = labkit.init_inference(vanilla("gpt2"))
    assert engine.stage_times() == []
    engine(prompt(1, 5))
    first = engine.stage_times(reset=False)
    engine(prompt(1, 5))
    total = engine.stage_times(reset=True)
    assert [time.calls for time in first] == [1] * len(first)
    assert [time.calls for time in total] == [2] * len(first)
    assert all(after.total_ms >= before.total_ms for before, after in zip(first, total, strict=True))
    assert engine.stage_times() == []


@pytest.mark.parametrize("impl", IMPLS)
def test_model_times_hold_one_entry_per_model_step(impl: str) -> None:
    engine = labkit.init_inference(vanilla("gpt2"), impl=impl)
    with pytest.raises(RuntimeError, match=r"call profile_model_time\(\) first"):
        engine.model_times()
    engine.profile_model_time()
    engine(prompt(2, 5))
    start = perf_counter()
    greedy(engine, prompt(2, 5), NEW)
    wall_ms = (perf_counter() - start) * 1e3
    times = engine.model_times()
    assert len(times) == 1 + NEW
    assert all(time > 0 for time in times)
    assert sum(times[1:]) <= wall_ms
    assert engine.model_times() == []
    greedy(engine, prompt(2, 5), NEW, num_beams=2)
    assert len(engine.model_times()) == NEW


@pytest.mark.parametrize("variable", [None, *stages.INJECTED])
def test_a_process_under_an_nvtx_tool_is_listened_to(variable: str | None) -> None:
    program = "import sys; from labkit.stages import listening; print(listening(), 'torch' in sys.modules)"
    environment = {name: value for name, value in os.environ.items() if name not in stages.INJECTED}
    if variable:
        environment[variable] = "/no/such/tool.so" if "PATH" in variable else "1"
    process = subprocess.run(
        [sys.executable, "-P", "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    assert process.stdout.split() == [str(variable is not None), "False"]


def test_a_trace_file_holds_the_ranges(tmp_path: Path) -> None:
    with torch.profiler.profile() as profiler:
        greedy(fused("gpt2"), prompt(1, 5), NEW)
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    assert '"decode/layer.2/mlp_out"' in (tmp_path / "trace.json").read_text()
