"""llama.cpp as a side: found where the user says, refused with a reason, and as greedy as the others where it is."""

import stat
from pathlib import Path

import pytest
import torch

from labkit.harness.compare import peers
from labkit.harness.compare.plan import Schedule
from labkit.harness.compare.versus import compare, compare_with_each, comparison_case

here = pytest.mark.skipif(peers.unavailable() is not None, reason="llama.cpp is not installed")


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


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
    (folder / peers.CONVERTER).touch()
    return folder


def test_it_is_found_through_the_interpreter_and_the_sources_that_the_user_names(
    interpreter: Path, sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(peers.PYTHON, str(interpreter))
    monkeypatch.setenv(peers.SOURCES, str(sources))
    assert peers.unavailable() is None


def test_an_interpreter_without_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(peers.PYTHON, "/no/such/python")
    reason = peers.unavailable()
    assert reason is not None
    assert reason.startswith("/no/such/python does not import llama_cpp")
    assert peers.PYTHON in reason


@pytest.mark.parametrize("where", [None, "/no/such/folder"])
def test_a_missing_converter_is_named(interpreter: Path, where: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(peers.PYTHON, str(interpreter))
    monkeypatch.delenv(peers.SOURCES, raising=False)
    if where:
        monkeypatch.setenv(peers.SOURCES, where)
    reason = peers.unavailable()
    assert reason is not None
    assert peers.CONVERTER in reason
    assert (where or "is not set") in reason


def test_a_converter_that_fails_is_reported_with_its_last_words(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(peers.SOURCES, str(sources))
    with (
        pytest.raises(RuntimeError, match=r"could not convert tiny-gpt2 in float32.*\n(.*\n)*.*No module named"),
        peers.converted(peers.LLAMA_CPP, "tiny-gpt2", dtype="float32", seed=0),
    ):
        pass


def test_a_comparison_without_it_is_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(peers.PYTHON, "/no/such/python")
    with pytest.raises(ValueError, match="does not import llama_cpp"):
        compare(peers.LLAMA_CPP, "fused", model="tiny-gpt2", output=None)


@here
@pytest.mark.parametrize("model", ["tiny-gpt2", "tiny-bloom", "tiny-llama"])
def test_its_float32_tokens_are_those_of_the_other_sides(model: str) -> None:
    case = comparison_case(model=model, dtype="float32", batch=1, prompt=20, new=12, threads=1)
    found = compare_with_each(("hf-eager", peers.LLAMA_CPP), "fused", case, Schedule(rounds=2, stages=False))
    assert [comparison.baseline.name for comparison in found] == ["hf-eager", peers.LLAMA_CPP]
    assert found[0].candidate == found[1].candidate
    assert all(comparison.tokens_equal for comparison in found)


def test_a_batch_is_refused() -> None:
    model = object.__new__(peers.LlamaCpp)
    with pytest.raises(ValueError, match="got a batch of 2, expected 1"):
        model.generate(torch.zeros(2, 3, dtype=torch.long), streamer=None, max_new_tokens=2)  # type: ignore[arg-type]
