"""llama.cpp as a side: found where the user says, refused with a reason, and as greedy as the others where it is."""

import stat
from pathlib import Path

import pytest
import torch

from labkit.harness.compare import interleave
from labkit.harness.compare.peers.conversion import converted
from labkit.harness.compare.peers.llama_cpp import CONVERTER, LLAMA_CPP, PYTHON, SOURCES, LlamaCpp
from labkit.harness.compare.plan import Schedule
from labkit.harness.compare.versus import compare, compare_with_each, comparison_case

MISSING = LlamaCpp().unavailable()


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No peer is installed, and the user names none."""
    monkeypatch.setenv("LABKIT_CACHE", str(tmp_path / "cache"))
    for name in (PYTHON, SOURCES):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def interpreter(tmp_path: Path) -> Path:
    """Answers like an interpreter that finds the package `llama_cpp`."""
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\necho /somewhere/llama_cpp/__init__.py\n")
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return script


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / CONVERTER).touch()
    return folder


@pytest.mark.usefixtures("elsewhere")
def test_it_is_found_through_the_interpreter_and_the_sources_that_the_user_names(
    interpreter: Path, sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PYTHON, str(interpreter))
    monkeypatch.setenv(SOURCES, str(sources))
    assert LlamaCpp().unavailable() is None
    assert LlamaCpp().packages() == Path("/somewhere")


@pytest.mark.usefixtures("elsewhere")
def test_what_is_neither_installed_nor_named_says_how_to_install_it() -> None:
    reason = LlamaCpp().unavailable()
    assert reason is not None
    assert "labkit peers install llama.cpp" in reason


def test_an_interpreter_without_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PYTHON, "/no/such/python")
    reason = LlamaCpp().unavailable()
    assert reason is not None
    assert reason.startswith("/no/such/python does not import llama_cpp")
    assert PYTHON in reason


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("where", [None, "/no/such/folder"])
def test_a_missing_converter_is_named(interpreter: Path, where: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PYTHON, str(interpreter))
    if where:
        monkeypatch.setenv(SOURCES, where)
    reason = LlamaCpp().unavailable()
    assert reason is not None
    assert CONVERTER in reason
    assert (where or "is not set") in reason


def test_a_converter_that_fails_is_reported_in_one_line(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SOURCES, str(sources))
    with (
        pytest.raises(RuntimeError, match=r"^llama.cpp could not convert tiny-gpt2 in float32: .*No module named.*$"),
        converted(LLAMA_CPP, "tiny-gpt2", dtype="float32", seed=0),
    ):
        pass


def test_a_comparison_without_it_is_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PYTHON, "/no/such/python")
    with pytest.raises(ValueError, match="does not import llama_cpp"):
        compare(LLAMA_CPP, "fused", model="tiny-gpt2", output=None)


def test_a_batch_is_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LlamaCpp, "unavailable", lambda peer: None)
    monkeypatch.setattr(interleave, "wait_until_quiet", lambda *_, **__: pytest.fail("it waited"))
    with pytest.raises(ValueError, match="got a batch of 2, expected 1"):
        compare(LLAMA_CPP, "fused", model="tiny-gpt2", batch=2, wait_quiet_s=5, output=None)


@pytest.mark.sweep
@pytest.mark.skipif(MISSING is not None, reason=MISSING or "")
@pytest.mark.parametrize("model", ["tiny-gpt2", "tiny-bloom", "tiny-llama"])
def test_its_float32_tokens_are_those_of_the_other_sides(model: str) -> None:
    case = comparison_case(model=model, dtype="float32", batch=1, prompt=20, new=12, threads=1)
    found = compare_with_each(("hf-eager", LLAMA_CPP), "fused", case, Schedule(rounds=2, stages=False))
    assert [comparison.baseline.name for comparison in found] == ["hf-eager", LLAMA_CPP]
    assert found[0].candidate == found[1].candidate
    assert all(comparison.tokens_equal for comparison in found)


@pytest.mark.skipif(MISSING is not None, reason=MISSING or "")
def test_a_model_that_it_does_not_know_is_refused_in_one_line() -> None:
    with (
        pytest.raises(RuntimeError, match=r"^llama.cpp could not convert tiny-gptj in float32: .*GPTJForCausalLM.*$"),
        converted(LLAMA_CPP, "tiny-gptj", dtype="float32", seed=0),
    ):
        pass
