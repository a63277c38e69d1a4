"""Regions of a layer on Triton kernels: all sides compute the same, and a record tells launches from work.

The kernels run in the interpreter with one or two layers of tiny shapes, so that times mean nothing.
"""

from dataclasses import replace
from io import StringIO
from typing import Any

import pytest
import torch
from helpers.studies.comparisons import environment
from helpers.studies.drawn import subtitle, words
from rich.console import Console

from labkit.figures import ladder_figure, regions_figure, roofline_figure
from labkit.harness.regions.case import layer_case, shape_of
from labkit.harness.regions.clocks import RegionClock
from labkit.harness.regions.layer_stack import LayerStack, layer_stack
from labkit.harness.regions.measure import LayerBench
from labkit.harness.regions.on_gpu import GpuCalls
from labkit.harness.regions.records import LadderMeasurement, LayerCase, RegionMeasurement
from labkit.harness.regions.sides import FUSED, GRAPH, OWN_GEMM, TITLES, UNFUSED
from labkit.harness.regions.table import region_table
from labkit.harness.regions.vocabulary import REGIONS, RUNGS
from labkit.stages import FUSED_REGIONS, Stage
from labkit.studies.kernels import KernelStudy

TOLERANCES = {"float32": 1e-5, "float16": 5e-3, "int8": 3e-2}
SHAPES = {"tiny-gptj": "float32", "tiny-llama": "float16", "tiny-bloom": "int8"}
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="made for the interpreter"),
]


def stack_of(name: str, **case: Any) -> LayerStack:
    return layer_stack(shape_of(name), layer_case(name, impl="triton", threads=1, **case))


@pytest.mark.parametrize(("name", "dtype"), SHAPES.items(), ids=SHAPES)
def test_all_sides_compute_the_same(name: str, dtype: str) -> None:
    stack = stack_of(name, dtype=dtype, context=11, layers=1)
    with torch.inference_mode():
        outputs = {side.name: side.step(RegionClock().around).float() for side in stack.sides}
    for side, hidden in outputs.items():
        assert float((hidden - outputs[UNFUSED]).norm() / outputs[UNFUSED].norm()) < TOLERANCES[dtype], side


def test_every_region_of_every_layer_is_called() -> None:
    stack = stack_of("tiny-llama", context=3, layers=2)
    calls = GpuCalls(stack.side(FUSED))
    assert {region: len(entries) for region, entries in calls.calls.items()} == dict.fromkeys(REGIONS, 2)
    times = calls.times()
    assert list(times) == [FUSED]  # without a GPU no CUDA graph is replayed
    assert all(time_us > 0 for samples in times[FUSED].values() for time_us in samples)


@pytest.mark.sweep
def test_a_bench_of_triton_kernels_measures_regions_and_ladder() -> None:
    bench = LayerBench(layer_case("tiny-gptj", impl="triton", context=4, threads=1, layers=1))
    rows = bench.regions(rounds=2)
    assert [row.region for row in rows] == list(FUSED_REGIONS)
    assert all(row.case.impl == "triton" and UNFUSED in row.rounds_us and FUSED in row.rounds_us for row in rows)
    ladder = bench.ladder(rounds=2)
    assert ladder.rungs == (*RUNGS, FUSED + GRAPH)
    assert "interpreted on the CPU" in text_of(rows)


def test_a_gpus_record_has_a_column_for_calls_and_one_for_graphs() -> None:
    row = measured({UNFUSED: 40.0, OWN_GEMM: 36.0, FUSED: 20.0, UNFUSED + GRAPH: 30.0, FUSED + GRAPH: 25.0})
    assert row.ratio().value == pytest.approx(2.0)
    assert row.ratio(*row.in_engine).value == pytest.approx(1.2)
    assert row.floor_share(FUSED + GRAPH) == pytest.approx(row.bytes / 4000 / 1e3 / 25)
    figures = row.as_dict()
    assert (figures["fused_us"], figures["graph_reference_us"], figures["graph_fused_us"]) == (20.0, 30.0, 25.0)
    assert figures["one_call_us"] is None
    text = text_of([row])
    assert "both in a graph" in text
    assert "one-call" not in text


def test_a_cpus_record_has_no_graphs() -> None:
    figures = measured({UNFUSED: 40.0, FUSED: 20.0, "one call": 16.0}).as_dict()
    assert figures["graph_fused_us"] is None
    assert figures["engine_ratio"] == pytest.approx(2.5)


def test_an_impl_that_is_unknown_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown impl 'cuda'; expected one of cpp, triton"):
        layer_case(impl="cuda")


def measured(medians: dict[str, float]) -> RegionMeasurement:
    case: dict[str, Any] = {"model": "gpt2", "dtype": "float16", "batch": 1, "context": 128, "threads": 1, "layers": 8}
    return RegionMeasurement(
        region=Stage.QKV,
        case=LayerCase(impl="triton", **case),
        environment=environment().model_copy(update={"gpu": "NVIDIA H200"}),
        ops=("addmm", "add"),
        unfused_bytes=10**6,
        bytes=10**6,
        flops=10**6,
        rounds_us={side: (time_us,) * 4 for side, time_us in medians.items()},
        warm_us={},
        bandwidth_gb_s=(4000.0,) * 4,
    )


def text_of(rows: Any) -> str:
    console = Console(width=160, record=True, file=StringIO())
    console.print(region_table(rows))
    return console.export_text()


def test_the_figures_take_a_gpus_record() -> None:
    row = measured({UNFUSED: 40.0, OWN_GEMM: 36.0, FUSED: 20.0, UNFUSED + GRAPH: 30.0, FUSED + GRAPH: 25.0})
    rungs = {name: (time_us,) * 4 for name, time_us in zip((*RUNGS, FUSED + GRAPH), range(90, 20, -10), strict=True)}
    shared = {"case": row.case, "environment": row.environment, "bandwidth_gb_s": row.bandwidth_gb_s}
    study = KernelStudy((row,), LadderMeasurement(bytes=10**6, rounds_us=rungs, **shared), (), 800_000.0)
    assert "in a CUDA graph against unfused torch ops: 3.00x" in study.headline
    two_regions = replace(study, regions=(row, row.model_copy(update={"region": Stage.MLP})))
    text = subtitle(regions_figure(two_regions))
    assert "qkv, mlp: not trustworthy, for the reasons that stand with the result" in text
    assert text.count("not trustworthy") == 1
    (bars,) = regions_figure(study).data
    assert [words(name) for name in bars.y] == [TITLES[side] for side in row.rounds_us]
    assert [words(name) for name in ladder_figure(study).data[0].y] == list(rungs)
    _, *points = roofline_figure(study).data
    assert [point.y[0] for point in points] == [row.flops / time_us / 1e3 for time_us in (30.0, 25.0)]
