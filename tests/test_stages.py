"""Messages parse to the labels that made them; steps nest in phases; nothing is announced within `unwatched`."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from labkit import stages
from labkit.stages import Label, Phase, Stage, StepRanges, message, parse, phase_of, step_message, unwatched


@pytest.mark.parametrize("phase", Phase)
def test_a_message_parses_to_what_it_was_made_of(phase: Phase) -> None:
    for stage in Stage:
        assert parse(message(phase, stage)) == Label(phase, stage)
        assert parse(message(phase, stage, 31)) == Label(phase, stage, 31)
    assert parse(step_message(phase)) == Label(phase, step=True)
    assert parse(phase) == Label(phase)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "decode/",
        "decode/layer.3",
        "decode/layer.3/step",
        "decode/layer.x/qkv",
        "decode/lunch",
        "Decode/qkv",
        "train",
    ],
)
def test_any_other_text_is_no_label(text: str) -> None:
    assert parse(text) is None


def test_only_one_token_on_top_of_others_is_a_decode_step() -> None:
    assert phase_of(0, 1) is phase_of(0, 7) is phase_of(7, 2) is Phase.PREFILL
    assert phase_of(7, 1) is Phase.DECODE


@pytest.fixture
def nvtx_calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Calls of NVTX as "+name" and "-", as if a tool listened."""
    calls: list[str] = []
    monkeypatch.setattr(stages, "nvtx_listening", lambda: True)
    monkeypatch.setattr(stages, "push", lambda text: calls.append(f"+{text}"))
    monkeypatch.setattr(stages, "pop", lambda: calls.append("-"))
    return calls


def run_steps(*phases: Phase) -> None:
    with StepRanges() as steps:
        for phase in phases:
            steps.begin(phase)


def test_steps_nest_in_the_phases_that_they_make_up(nvtx_calls: list[str]) -> None:
    run_steps(Phase.PREFILL, Phase.DECODE, Phase.DECODE)
    prefill = ["+prefill", "+prefill/step", "-", "-"]
    assert nvtx_calls == [*prefill, "+decode", "+decode/step", "-", "+decode/step", "-", "-"]


def test_an_error_closes_every_range(nvtx_calls: list[str]) -> None:
    with suppress(KeyError), StepRanges() as steps:
        steps.begin(Phase.DECODE)
        raise KeyError
    assert nvtx_calls == ["+decode", "+decode/step", "-", "-"]


@pytest.fixture
def watched() -> Iterator[list[tuple[Phase, bool]]]:
    phases: list[tuple[Phase, bool]] = []

    def watch(phase: Phase, begins: bool) -> None:
        phases.append((phase, begins))

    stages.PHASE_WATCHERS.append(watch)
    yield phases
    stages.PHASE_WATCHERS.remove(watch)


def test_watchers_hear_of_phases_before_their_ranges_open_and_after_they_close(
    nvtx_calls: list[str], watched: list[tuple[Phase, bool]]
) -> None:
    run_steps(Phase.PREFILL, Phase.DECODE, Phase.DECODE)
    assert watched == [(phase, begins) for phase in Phase for begins in (True, False)]


def test_nothing_is_said_within_unwatched(nvtx_calls: list[str], watched: list[tuple[Phase, bool]]) -> None:
    with unwatched():
        run_steps(Phase.PREFILL, Phase.DECODE)
        with stages.stage(Phase.DECODE, Stage.QKV, 0):
            assert not stages.listening()
    assert not nvtx_calls
    assert not watched
    run_steps(Phase.DECODE)
    assert nvtx_calls
    assert watched


def test_nobody_is_asked_within_unwatched(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run within `unwatched` must not differ from a run without any announcements."""
    queries: list[str] = []
    for name in ("nvtx_listening", "torch_profiler_listening", "_step_times"):
        monkeypatch.setattr(stages, name, lambda name=name: queries.append(name))
    with unwatched():
        run_steps(Phase.PREFILL, Phase.DECODE)
        with stages.stage(Phase.DECODE, Stage.QKV, 0):
            assert not stages.listening()
    assert queries == []
    run_steps(Phase.DECODE)
    assert set(queries) == {"nvtx_listening", "torch_profiler_listening", "_step_times"}


def test_step_times_are_written_when_the_process_ends(tmp_path: Path) -> None:
    program = """
from labkit.stages import Phase, StepRanges, unwatched
with unwatched(), StepRanges() as steps:
    steps.begin(Phase.DECODE)
for _ in range(2):
    with StepRanges() as steps:
        for phase in (Phase.PREFILL, Phase.DECODE, Phase.DECODE):
            steps.begin(phase)
"""
    file = tmp_path / "steps.jsonl"
    environment = os.environ | {stages.STEP_TIMES: str(file)}
    subprocess.run([sys.executable, "-P", "-c", program], env=environment, check=True)
    written = [json.loads(line) for line in file.read_text().splitlines()]
    assert {entry["phase"]: len(entry["step_ms"]) for entry in written} == {"prefill": 2, "decode": 4}
    assert all(ms >= 0 for entry in written for ms in entry["step_ms"])
