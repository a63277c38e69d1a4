"""A real capture of a GPU: gpt2 in float16 on an H100, by nsys 2023.4, from cudaProfilerStart to cudaProfilerStop."""

from pathlib import Path

import pytest

from labkit.nsys.analysis.attribution import attribute
from labkit.nsys.analysis.stage_table import StageTable, stage_table
from labkit.nsys.reader.reading import read
from labkit.nsys.trace import Trace
from labkit.stages import Phase, Stage, parse

CAPTURE = Path(__file__).parents[2] / "profiles/captures/gpt2-fused-h100.sqlite"
LAYERS, STEPS = 12, 7
KERNELS = {
    Stage.QKV: "qkv_gemm_kernel",
    Stage.ATTENTION: "_attend_one",
    Stage.ATTN_OUT: "_gemm",
    Stage.MLP: "mlp_gemm_kernel",
    Stage.MLP_OUT: "_gemm",
}


@pytest.fixture(scope="module")
def trace() -> Trace:
    return read([CAPTURE], cache=False)


@pytest.fixture(scope="module")
def table(trace: Trace) -> StageTable:
    return stage_table(trace, ("phase", "stage"))


def test_nearly_all_of_the_gpus_time_has_a_stage(table: StageTable) -> None:
    assert table.clock == "GPU"
    assert table.step_count == {"prefill": 1, "decode": STEPS}
    assert table.coverage > 0.97


@pytest.mark.parametrize("stage", KERNELS)
def test_each_region_of_a_decode_step_is_one_kernel_in_every_layer(table: StageTable, stage: Stage) -> None:
    row = table.frame[(table.frame.phase == "decode") & (table.frame.stage == stage)].iloc[0]
    assert row["count"] == LAYERS * STEPS
    assert row["operations"] == LAYERS
    assert row["gpu_busy_ms"] > 0


def test_kernels_belong_to_the_stages_that_launched_them(trace: Trace) -> None:
    launched = attribute(trace).range_of_operation
    kernels = trace.operations["name"].astype(str).to_numpy()
    messages = trace.ranges["name"].astype(str).to_numpy()
    decode = [
        (label.stage, kernel)
        for kernel, place in zip(kernels, launched, strict=True)
        if place >= 0 and (label := parse(messages[place])) is not None and label.phase == Phase.DECODE
    ]
    for stage, kernel in KERNELS.items():
        assert {name for of, name in decode if of == stage} == {kernel}
