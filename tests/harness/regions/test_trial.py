"""Trials of edited kernels: each usual mistake is reported in a sentence, and does no other harm."""

import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from helpers.sweeps import swept

from labkit.harness.judge import judged_process
from labkit.harness.regions.trial import Trial, try_kernel
from labkit.harness.regions.vocabulary import OP_OF
from labkit.kernels import build

RESIDUAL = "residual_add/cpp_impl.cpp"
FIRST = "if (rows * hidden < kWorthATeam) threads = 1;"
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


def tried(region: str = "residual", **options: Any) -> Trial:
    return try_kernel(region, **{"threads": 2, "seed": 0, "timed": False} | options)


@pytest.mark.parametrize("dtype", swept(["float32", "bfloat16", "float16", "int8"], ["float32"]))
@pytest.mark.parametrize("region", list(OP_OF))
def test_the_kernels_as_they_are_pass(region: str, dtype: str) -> None:
    for seed in range(3):
        assert tried(region, dtype=dtype, seed=seed).problem is None


@pytest.mark.parametrize("region", swept(list(OP_OF), ["residual"]))
def test_a_right_kernel_is_timed(region: str) -> None:
    """On a busy machine a kernel may seem impossibly fast, or take more processor time than its threads have."""
    result = tried(region, timed=True)
    assert result.problem is None or re.search("impossible|processor time", result.problem)
    if result.problem is not None:
        return
    assert result.fused_us is not None
    assert result.unfused_us is not None
    assert min(result.fused_us, result.unfused_us) > 0


@pytest.mark.parametrize(
    ("new", "message"),
    [
        ("to[i] += sum + bias[i]", "could not compile the kernels: .*residual_add/cpp_impl.cpp:.*error"),
        pytest.param(
            "to[i] += sum;",
            r"result 0 at \[0, \d+\] is \S+, expected \S+; .* numbers are wrong \(call 1 of 64\)",
            marks=pytest.mark.sweep,
        ),
        pytest.param(
            "to[i] = 0.0f / 0.0f;",
            r"result 0 at \[0, 0\] is nan: not written, or computed from unwritten values",
            marks=pytest.mark.sweep,
        ),
        pytest.param(
            "{" + SUM + " out[-1] = 1.0f; }",
            "it wrote outside of a result of shape .*, before its beginning",
            marks=pytest.mark.sweep,
        ),
    ],
    ids=["no semicolon", "bias forgotten", "nan", "before the beginning"],
)
def test_a_mistake_is_told_in_words(edited: Path, new: str, message: str) -> None:
    replace(edited / RESIDUAL, SUM, new)
    problem = tried().problem
    assert problem is not None
    assert re.search(message, problem), problem


@pytest.mark.parametrize(
    ("new", "message"),
    [
        pytest.param(
            "{" + SUM + " to[rows * out_stride] = 1.0f; }",
            "it wrote outside of a result of shape .*, past its end|SIGSEGV",
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
    problem = tried().problem
    assert problem is not None
    assert re.search(message, problem), problem
    assert os.environ["LABKIT_KERNELS"] == str(edited)


def test_a_kernel_that_never_ends_is_stopped(edited: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replace(edited / RESIDUAL, SUM, "for (volatile bool on = true; on;) {}")
    monkeypatch.setattr(judged_process, "ROUND_S", 1.0)
    problem = tried(threads=1).problem
    assert problem is not None
    assert "did not end in time: is there an endless loop" in problem


@pytest.mark.parametrize(
    ("new", "message"),
    [
        ("static int calls = 0; if (++calls > 40) return 0;", "is nan: not written"),
        pytest.param("std::_Exit(0);", "ended the process with exit code 0", marks=pytest.mark.sweep),
    ],
    ids=["right at first", "ends with success"],
)
def test_cheats_are_caught(edited: Path, new: str, message: str) -> None:
    """They passed while the kernel shared a process with its verdict, and while its first result alone was compared."""
    replace(edited / RESIDUAL, FIRST, new + FIRST)
    problem = tried().problem
    assert problem is not None
    assert message in problem


def test_timed_results_are_compared_too(edited: Path) -> None:
    replace(edited / RESIDUAL, FIRST, "if (hidden == 768) return 0;" + FIRST)
    assert tried().problem is None
    problem = tried(timed=True).problem
    assert problem is not None
    assert "is nan: not written" in problem


def test_an_unknown_op_is_refused_with_the_known() -> None:
    with pytest.raises(
        ValueError, match="unknown op 'softmax'; expected one of qkv, attention, attn_out, mlp, residual"
    ):
        try_kernel("softmax")
    with pytest.raises(ValueError, match="unsupported dtype 'int4'"):
        try_kernel("qkv", dtype="int4")
