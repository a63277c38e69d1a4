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
# Few large experts; many small ones and a shared one; biases and attention sinks.
MIXTRAL, QWEN_MOE, GPT_OSS = "mixtral-8x7b", "qwen1.5-moe-a2.7b", "gpt-oss-20b"
STEP = {
    "gpt-j-6b": ["embed", "qkv_and_mlp", "attend_one", "gemm", "head_argmax", "next_step"],
    "llama-2-7b": ["embed", "qkv_gemm", "attend_one", "gemm", "mlp_gemm", "gemm", "head_argmax", "next_step"],
    "gemma-2-9b": [
        "embed", "qkv_gemm", "attend_one", "gemm", "add_normed", "mlp_gemm", "gemm", "head_argmax", "next_step",
    ],
}  # fmt: skip
CHOICE, EXPERTS = ["route_logits", "choose_experts"], ["experts_up", "experts_down", "experts_sum"]
MIXTURES = {
    (MIXTRAL, 1): [*CHOICE, *EXPERTS],
    (GPT_OSS, 1): [*CHOICE, *EXPERTS],
    (QWEN_MOE, 1): [*CHOICE, *EXPERTS, "mlp_gemm", "gemm", "gemm", "add_gated"],
    (QWEN_MOE, 4): [*CHOICE, "sort_choices", *EXPERTS, "mlp_gemm", "gemm", "gemm", "add_gated"],
}
OPS = {1: {"qkv_gemm", "attend_one", "gemm", "mlp_gemm"}}
OPS[100] = {"finish_heads", "attend_many", "add_rows", "activate"}  # around torch's GEMM
OPS[2000] = {"finish_heads", "attend_many", "add_rows", "add_normed", "choose_experts", "sort_choices", *EXPERTS}
INT8_CACHE = ["embed", "gemm", "finish_heads", "attend_one", "gemm", "mlp_gemm", "gemm", "head_argmax", "next_step"]
PRODUCTS = {"qkv_gemm", "qkv_and_mlp", "gemm", "mlp_gemm", "head_argmax", "route_logits", "experts_up", "experts_down"}
WHOLE_ROW = 4096  # hidden sizes of the models here, as a power of two
SHARED = {80: 163 * 1024, 90: 227 * 1024}  # bytes that a program may use
STACK = {80: 8, 90: 16}  # bytes; Triton 3.7.1 spills up to four registers of a quantised product
Found = list[tuple[dict[str, Any], list[dict[str, Any]]]]


CODES = [[4, 32, 2], [4, 64, 1], [4, 128, 2], [4, 0, 2], [8, 32, 1], [8, 64, 2]]  # bits, inputs and numbers per group


def all_jobs() -> list[dict[str, Any]]:
    """Decode steps of each model: of 1 and 4 sequences, with int8 weights, with an int8 cache, and with PDL. For one
    model also single ops and an older GPU. Mixtures of experts have steps of both kinds, and a prompt of many rows.
    """
    jobs = []
    for base in ({"model": model, "capability": 90} for model in (THREE, FULL)):
        jobs += [base | {"dtype": "float16", "batch": batch} for batch in (1, 4)]
        jobs += [base | {"dtype": "float16", "int8_cache": True}]
        jobs += [base | {"dtype": "int8", "batch": 1, "codes": codes} for codes in CODES]
        jobs += [base | {"dtype": "int8", "batch": 1}, base | {"dtype": "float16", "pdl": True}]
    jobs += [base | {"dtype": "float16", "chooses": True}]
    jobs += [{"model": GEMMA, "capability": 90, "dtype": "float16", "batch": batch} for batch in (1, 4)]
    jobs += [base | {"dtype": "float16", "tokens": tokens} for tokens in (1, 100)]
    jobs += [base | {"dtype": "float16", "tokens": 100, "int8_cache": True}]
    jobs += [base | {"dtype": "float16", "capability": 80}]
    mixture = {"model": QWEN_MOE, "capability": 90}
    jobs += [{"model": model, "capability": 90, "dtype": "float16", "batch": batch} for model, batch in MIXTURES]
    jobs += [mixture | {"dtype": "int8", "codes": [4, 64, 1]}, mixture | {"dtype": "float16", "pdl": True}]
    jobs += [mixture | {"dtype": "float16", "tokens": 2000}]
    return [*jobs, mixture | {"dtype": "int8", "codes": [4, 32, 2], "tokens": 2000}]


def step_of(job: dict[str, Any]) -> list[str]:
    """The kernels of a job's step."""
    of_mixture = MIXTURES.get((job["model"], job.get("batch", 1)))
    if of_mixture is None:
        return STEP[job["model"]]
    return [*STEP[FULL][:4], *of_mixture, *STEP[FULL][-2:]]


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
            assert set(names) == OPS[tokens], job
        elif job.get("int8_cache"):
            assert names == INT8_CACHE
        elif job.get("chooses"):
            assert names == [*STEP[job["model"]][:-2], "gemm", "choose_token", "next_step"]
        else:
            assert names == step_of(job), job


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
            # Scales of groups leave room for fewer. A tile of whole rows is all that its program reads; a mixture
            # has shorter rows.
            few = "codes" in job or kernel["tile"]["depth"] == WHOLE_ROW
            least = 4 if job["model"] in (MIXTRAL, QWEN_MOE, GPT_OSS) else 8 if few else 16
            assert kernel["streaming_loads"]["128"] >= least, (job, kernel)
            checked += 1
    assert checked


def test_every_kernel_of_a_dependent_launch_waits_for_the_one_before(compiled: Found) -> None:
    chain = [kernel["dependent"] for _, kernel in kernels(compiled, pdl=True)]
    steps = [step_of(job) for job, _ in compiled if job.get("pdl")]
    assert chain == [["launch_dependents", "wait"]] * sum(map(len, steps))
    assert steps
    assert not any(kernel["dependent"] for _, kernel in kernels(compiled, pdl=None))
