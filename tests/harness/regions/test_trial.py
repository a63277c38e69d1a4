"""Trials of edited kernels: each usual mistake is reported in a sentence, and does no other harm."""

import os
import re
import shutil
from pathlib import Path

import pytest
from helpers.sweeps import swept

from labkit.harness.regions.trial import trial, try_kernel
from labkit.harness.regions.vocabulary import OP_OF
from labkit.kernels import build
from labkit.stages import Stage

RESIDUAL = "residual_add/cpp_impl.cpp"
SUM = "to[i] += sum + bias[i];"


@pytest.fixture
def edited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Copy of the kernel sources that the trial compiles."""
    folder = tmp_path / "kernels"
    shutil.copytree(build.SOURCES, folder, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setenv("LABKIT_KERNELS", str(folder))
    monkeypatch.setenv("LABKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("LABKIT_ISA", "portable")  # compiles fastest
    monkeypatch.setattr(build, "SOURCES", folder)  # for trials in this process; no other test gets these kernels
    monkeypatch.setattr(build, "ENTRY", folder / build.ENTRY.relative_to(build.ENTRY.parents[1]))
    monkeypatch.setattr(build, "_in_use", {})
    return folder


def replace(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


@pytest.mark.parametrize("region", swept(list(OP_OF), []))
def test_the_kernels_as_they_are_pass(region: str) -> None:
    result = trial(Stage(region), "float32", threads=2)
    assert result.problem is None
    assert result.fused_us is not None
    assert result.unfused_us is not None
    assert min(result.fused_us, result.unfused_us) > 0


@pytest.mark.parametrize(
    ("new", "message"),
    [
        ("to[i] += sum + bias[i]", "could not compile the kernels: .*residual_add/cpp_impl.cpp:.*error"),
        pytest.param(
            "to[i] += sum;",
            r"result 0 is \S+ at \[0, \d+\], expected \S+ \(tiny-gpt2, batch 1\)",
            marks=pytest.mark.sweep,
        ),
        pytest.param(
            "to[i] = 0.0f / 0.0f;",
            r"result 0 has nan at \[0, 0\]: not written, or computed from unwritten values",
            marks=pytest.mark.sweep,
        ),
        pytest.param(
            "{" + SUM + " out[-1] = 1.0f; }", "it wrote before the beginning of result 0", marks=pytest.mark.sweep
        ),
    ],
    ids=["no semicolon", "bias forgotten", "nan", "before the beginning"],
)
def test_a_mistake_is_told_in_words(edited: Path, new: str, message: str) -> None:
    replace(edited / RESIDUAL, SUM, new)
    problem = trial(Stage.RESIDUAL, "float32", threads=2).problem
    assert problem is not None
    assert re.search(message, problem), problem


@pytest.mark.parametrize(
    ("new", "message"),
    [
        pytest.param(
            "{" + SUM + " to[rows * out_stride] = 1.0f; }",
            "it wrote past the end of result 0|SIGSEGV",
            marks=pytest.mark.sweep,
        ),
        pytest.param(
            "{" + SUM + " to[rows * out_stride + 4096] = 1.0f; }",
            "read or wrote outside of its arguments .SIGSEGV",
            marks=pytest.mark.sweep,
        ),
    ],
    ids=["one past the end", "far past the end"],
)
def test_a_mistake_that_takes_its_process_down_is_too(edited: Path, new: str, message: str) -> None:
    replace(edited / RESIDUAL, SUM, new)
    problem = try_kernel("residual", threads=2).problem
    assert problem is not None
    assert re.search(message, problem), problem
    assert os.environ["LABKIT_KERNELS"] == str(edited)


@pytest.mark.parametrize("seconds", swept([1, 9], ["1"]))
def test_a_kernel_that_never_ends_is_stopped(edited: Path, monkeypatch: pytest.MonkeyPatch, seconds: int) -> None:
    """After 1 s the trial is still loading; after 9 s it is in the endless loop."""
    replace(edited / RESIDUAL, SUM, "for (volatile bool on = true; on;) {}")
    monkeypatch.setattr("labkit.harness.regions.trial.SECONDS", seconds)
    problem = try_kernel("residual", threads=1).problem
    assert problem is not None
    assert f"did not end within {seconds} s" in problem


def test_an_unknown_op_is_refused_with_the_known() -> None:
    with pytest.raises(
        ValueError, match="unknown op 'softmax'; expected one of qkv, attention, attn_out, mlp, residual"
    ):
        try_kernel("softmax")
    with pytest.raises(ValueError, match="unsupported dtype 'int4'"):
        try_kernel("qkv", dtype="int4")
