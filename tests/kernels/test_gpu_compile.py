"""Machine code of a decode step at the sizes of two published models, compiled for GPUs that need not be present."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.sweeps import sweep

pytest.importorskip("triton")
pytestmark = [sweep, pytest.mark.timeout(1200)]  # the fixture compiles every kernel
COMPILER = Path(__file__).parent / "gpu_compiler.py"
FULL, THREE, GEMMA = "llama-2-7b", "gpt-j-6b", "gemma-2-9b"  # sequential and parallel residual; normed outputs
STEP = {
    "gpt-j-6b": ["embed", "qkv_and_mlp", "attend_one", "gemm", "head_argmax", "next_step"],
    "llama-2-7b": ["embed", "qkv_gemm", "attend_one", "gemm", "mlp_gemm", "gemm", "head_argmax", "next_step"],
    "gemma-2-9b": [
        "embed", "qkv_gemm", "attend_one", "gemm", "add_normed", "mlp_gemm", "gemm", "head_argmax", "next_step",
    ],
}  # fmt: skip
OPS = {1: {"qkv_gemm", "attend_one", "gemm", "mlp_gemm"}}
OPS[100] = {"finish_heads", "attend_many", "add_rows", "activate"}  # around torch's GEMM
INT8_CACHE = ["embed", "gemm", "finish_heads", "attend_one", "gemm", "mlp_gemm", "gemm", "head_argmax", "next_step"]
PRODUCTS = {"qkv_gemm", "qkv_and_mlp", "gemm", "mlp_gemm", "head_argmax"}
WHOLE_ROW = 4096  # hidden sizes of the models here, as a power of two
SHARED = {80: 163 * 1024, 90: 227 * 1024}  # bytes that a program may use
STACK = {80: 8, 90: 16}  # bytes; Triton 3.7.1 spills up to four registers of a quantised product
Found = list[tuple[dict[str, Any], list[dict[str, Any]]]]


CODES = [[4, 32, 2], [4, 64, 1], [4, 128, 2], [4, 0, 2], [8, 32, 1], [8, 64, 2]]  # bits, inputs and numbers per group


def all_jobs() -> list[dict[str, Any]]:
    """Decode steps of each model: of 1 and 4 sequences, with int8 weights, with an int8 cache, and with PDL. For one
    model also single ops and an older GPU.
    """
    jobs = []
    for base in ({"model": model, "capability": 90} for model in (THREE, FULL)):
        jobs += [base | {"dtype": "float16", "batch": batch} for batch in (1, 4)]
        jobs += [base | {"dtype": "float16", "int8_cache": True}]
        jobs += [base | {"dtype": "int8", "batch": 1, "codes": codes} for codes in CODES]
        jobs += [base | {"dtype": "int8", "batch": 1}, base | {"dtype": "float16", "pdl": True}]
    jobs += [base | {"dtype": "float16", "chooses": True}]
    jobs += [{"model": GEMMA, "capability": 90, "dtype": "float16", "batch": batch} for batch in (1, 4)]
    jobs += [base | {"dtype": "float16", "tokens": tokens} for tokens in OPS]
    jobs += [base | {"dtype": "float16", "tokens": 100, "int8_cache": True}]
    return [*jobs, base | {"dtype": "float16", "capability": 80}]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """Each job with its kernels, compiled by a process with an empty cache."""
    folder, jobs = tmp_path_factory.mktemp("compiled"), all_jobs()
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(folder / "cache")
    command: list[str | Path] = [sys.executable, "-P", COMPILER, folder / "found", json.dumps(jobs)]
    process = subprocess.run(command, env=environment, stderr=subprocess.PIPE, text=True, check=False)
    assert process.returncode == 0, process.stderr
    return list(zip(jobs, json.loads((folder / "found").read_text()), strict=True))


def kernels(compiled: Found, **fields: object) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """(job, kernel) for the jobs with these fields."""
    for job, job_kernels in compiled:
        if all(job.get(name) == value for name, value in fields.items()):
            for kernel in job_kernels:
                yield job, kernel


def test_all_kernels_of_a_layer_are_compiled(compiled: Found) -> None:
    for job, job_kernels in compiled:
        names = [kernel["kernel"] for kernel in job_kernels]
        if tokens := job.get("tokens"):
            assert set(names) == OPS[tokens]
        elif job.get("int8_cache"):
            assert names == INT8_CACHE
        elif job.get("chooses"):
            assert names == [*STEP[job["model"]][:-2], "gemm", "choose_token", "next_step"]
        else:
            assert names == STEP[job["model"]]


def test_what_a_program_keeps_fits_into_registers_and_shared_memory(compiled: Found) -> None:
    for job, kernel in kernels(compiled):
        assert kernel["stack"] <= STACK[job["capability"]], (job, kernel)
        assert kernel["shared"] <= SHARED[job["capability"]], (job, kernel)


def test_weights_are_read_in_whole_vectors_that_leave_the_caches_first(compiled: Found) -> None:
    """With one row of activations, a program takes as long as reading its weights."""
    checked = 0
    for job, kernel in kernels(compiled):
        if kernel["kernel"] in PRODUCTS and job.get("batch", 1) == 1 and job.get("tokens", 1) == 1:
            assert set(kernel["streaming_loads"]) == {"128"}, (job, kernel)
            # Scales of groups leave room for fewer. A tile of whole rows is all that its program reads.
            least = 8 if "codes" in job or kernel["tile"]["depth"] == WHOLE_ROW else 16
            assert kernel["streaming_loads"]["128"] >= least, (job, kernel)
            checked += 1
    assert checked


def test_every_kernel_of_a_dependent_launch_waits_for_the_one_before(compiled: Found) -> None:
    chain = [kernel["dependent"] for _, kernel in kernels(compiled, pdl=True)]
    models = [job["model"] for job, _ in compiled if job.get("pdl")]
    assert chain == [["launch_dependents", "wait"]] * sum(len(STEP[model]) for model in models)
    assert models
    assert not any(kernel["dependent"] for _, kernel in kernels(compiled, pdl=None))
