"""Kernels get their stage and step from their calls or from nodes of CUDA graphs; the coverage is right."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from helpers.sweeps import swept
from helpers.traces.nsys_databases import random_database
from helpers.traces.nsys_exports import GENERATIONS, START_END, Export, global_pid, global_tid

from labkit.nsys.analysis.attribution import attribute
from labkit.nsys.analysis.labelled import labelled, step_spans
from labkit.nsys.analysis.steps import steps
from labkit.nsys.reader.reading import read
from labkit.nsys.timeline.synthetic import decode_trace
from labkit.nsys.trace import Source, Trace
from labkit.stages import parse

PID, TID = global_pid(77), global_tid(77, 78)


class Model(Export):
    """An export whose domain 1 is labkit."""

    def __init__(self, generation: str = "2022.4") -> None:
        super().__init__(generation)
        self.create(0, TID, 1, "labkit")

    def opened(self, folder: Path) -> Trace:
        return read(self.write(folder / "made.sqlite"), cache=False)


def attribution_rows(trace: Trace) -> list[tuple[str, str, str]]:
    """Range and step of each operation, and the source of that attribution."""
    attribution = attribute(trace)
    names = np.append(trace.ranges["name"].astype(str).to_numpy(), "")
    columns = (names[attribution.range_of_operation], names[attribution.step_of_operation], attribution.how)
    return list(zip(*(list(column) for column in columns), strict=True))


@pytest.mark.parametrize("generation", GENERATIONS)
@pytest.mark.parametrize("seed", swept(range(6), ["0", "3"]))
def test_work_belongs_to_the_tightest_labelled_range_around_its_call(
    seed: int, generation: str, tmp_path: Path
) -> None:
    """Checks operations without graph nodes whose correlation has one call."""
    trace = read(random_database(tmp_path / "random.sqlite", 500 + seed, generation), cache=False)
    trace = relabelled(trace)
    attribution = attribute(trace)
    once = ~trace.calls.duplicated(["process", "correlation"], keep=False)
    calls = trace.calls[once].set_index(["process", "correlation"])
    stages = trace.ranges[np.array([parse(name) is not None for name in trace.ranges["name"]], bool)]
    checked = 0
    for row, operation in enumerate(trace.operations.itertuples()):
        key = (operation.process, operation.correlation)
        if operation.graph_node or (key not in calls.index and operation.correlation != 1_000_000):
            continue
        holders = stages.iloc[:0]
        if key in calls.index:
            call = calls.loc[key]
            holders = stages[(stages["process"] == operation.process) & (stages["tid"] == call["tid"])]
            holders = holders[(holders["start_ns"] <= call["start_ns"]) & (holders["end_ns"] >= call["end_ns"])]
        lengths = holders["end_ns"] - holders["start_ns"]
        expected = lengths.idxmin() if len(lengths) else -1
        assert attribution.range_of_operation[row] == expected
        assert attribution.how[row] == ("call" if expected >= 0 else "none")
        checked += 1
    assert checked > 10 or calls.empty


def relabelled(trace: Trace) -> Trace:
    """The same trace, with every range in labkit's domain."""
    domain = trace.ranges["domain"].cat.set_categories(["labkit"]).fillna("labkit")
    return Trace(trace.source, trace.ranges.assign(domain=domain), *list(trace.frames.values())[1:])


def test_only_ranges_of_labkit_that_name_a_stage_step_or_phase_count(tmp_path: Path) -> None:
    model = Model()
    model.create(0, TID, 2, "theirs")
    model.labelled(0, 1000, TID, "decode")
    model.labelled(10, 900, TID, "decode/step")
    model.labelled(20, 800, TID, "decode/layer.3/qkv")
    model.labelled(30, 700, TID, "my own note")
    model.range(40, 600, TID, text="decode/layer.3/mlp", domainId=2)
    model.range(45, 590, TID, text="decode/layer.3/mlp")  # without a domain
    model.call(50, 60, TID, 1)
    model.call(950, 960, TID, 2)
    model.call(2000, 2010, TID, 3)
    for correlation in (1, 2, 3, 9):
        model.kernel(3000 * correlation, 3000 * correlation + 100, PID, correlation)
    trace = model.opened(tmp_path)
    assert attribution_rows(trace) == [
        ("decode/layer.3/qkv", "decode/step", "call"),
        ("decode", "", "call"),
        ("", "", "none"),
        ("", "", "none"),
    ]
    assert attribute(trace).coverage == pytest.approx(1 / 4)


@pytest.mark.parametrize("generation", GENERATIONS)
def test_the_nodes_of_a_graph_lead_to_the_stages_of_its_capture(generation: str, tmp_path: Path) -> None:
    """Nodes 1 to 3 are captured, cloned twice, and replayed in a later step; node 4 is in no stage."""
    model = Model(generation)
    for node, text in enumerate(("decode/embed", "decode/layer.0/qkv", "decode/lm_head"), 1):
        model.labelled(100 * node, 100 * node + 90, TID, text)
        model.node(100 * node + 50, TID, node)
    for node in (1, 2, 3):
        model.node(1000, TID, 10 + node, original=node)
        model.node(1100, TID, 20 + node, original=10 + node)
    model.labelled(5000, 5500, TID, "decode/step")
    model.call(5100, 5200, TID, 1, "cudaGraphLaunch_v10000")
    for node in (1, 2, 3):
        model.kernel(6000 + 100 * node, 6010 + 100 * node, PID, 1, node=20 + node)
    model.kernel(6500, 6530, PID, 1, node=4)
    trace = model.opened(tmp_path)
    assert attribution_rows(trace) == [
        ("decode/embed", "decode/step", "graph"),
        ("decode/layer.0/qkv", "decode/step", "graph"),
        ("decode/lm_head", "decode/step", "graph"),
        ("decode/step", "decode/step", "call"),
    ]
    assert attribute(trace).coverage == pytest.approx(0.5)


def test_a_graph_instantiated_within_a_stage_does_not_belong_to_that_stage(tmp_path: Path) -> None:
    model = Model()
    model.labelled(100, 200, TID, "decode/layer.0/qkv")
    model.node(150, TID, 1)
    model.labelled(300, 400, TID, "decode/lm_head")
    model.node(350, TID, 2, original=1)
    model.kernel(500, 510, PID, None, node=2)
    assert attribution_rows(model.opened(tmp_path)) == [("decode/layer.0/qkv", "", "graph")]


def test_numbers_of_nodes_are_reused(tmp_path: Path) -> None:
    """Two captures use the number 1: a kernel belongs to the last one before it ran, in its own process."""
    model = Model()
    model.create(0, global_tid(99, 99), 1, "labkit")
    model.labelled(100, 200, TID, "decode/embed")
    model.node(150, TID, 1)
    model.labelled(1000, 1100, TID, "decode/sample")
    model.node(1050, TID, 1)
    model.labelled(150, 250, global_tid(99, 99), "decode/lm_head")
    model.node(200, global_tid(99, 99), 1)
    model.kernel(500, 510, PID, None, node=1)
    model.kernel(1500, 1510, PID, None, node=1)
    model.kernel(1600, 1610, global_pid(99), None, node=1)
    model.kernel(50, 60, PID, None, node=1)
    names = [name for name, _, _ in attribution_rows(model.opened(tmp_path))]
    assert names == ["", "decode/embed", "decode/sample", "decode/lm_head"]


def test_a_node_captured_outside_stages_leaves_its_work_to_the_launch(tmp_path: Path) -> None:
    model = Model()
    model.labelled(0, 90, TID, "decode/step")  # a node made in a step outside all stages has no stage
    model.node(50, TID, 1)
    model.labelled(100, 300, TID, "decode/step")
    model.labelled(110, 200, TID, "decode/layer.1/mlp")
    model.call(120, 130, TID, 1, "cudaGraphLaunch")
    model.kernel(400, 420, PID, 1, node=1)
    trace = model.opened(tmp_path)
    assert attribution_rows(trace) == [("decode/layer.1/mlp", "decode/step", "call")]
    assert attribute(trace).step_of_operation.tolist() == [1]


def test_a_circle_of_clones_ends(tmp_path: Path) -> None:
    model = Model()
    model.node(10, TID, 1, original=2)
    model.node(10, TID, 2, original=1)
    model.kernel(50, 60, PID, None, node=1)
    assert attribution_rows(model.opened(tmp_path)) == [("", "", "none")]


def test_without_step_ranges_a_step_begins_with_its_embedding(tmp_path: Path) -> None:
    model = Model()
    texts = ["prefill/embed", "prefill/layer.0/qkv", "prefill/lm_head"]
    texts += ["decode/embed", "decode/embed", "decode/layer.0/qkv", "decode/lm_head"] * 2  # the embedding has two parts
    for index, text in enumerate(texts):
        model.labelled(100 * index, 100 * index + 90, TID, text)
        model.call(100 * index + 10, 100 * index + 20, TID, index + 1)
        model.kernel(5000 + 100 * index, 5050 + 100 * index, PID, index + 1)
    model.call(2000, 2010, TID, 50)
    model.kernel(9000, 9001, PID, 50)
    trace = model.opened(tmp_path)
    assert attribute(trace).step_of_operation.tolist() == [0] * 3 + [3] * 4 + [7] * 4 + [-1]
    spans = step_spans(labelled(trace))
    assert spans[["range", "start_ns", "end_ns"]].to_numpy().tolist() == [[0, 0, 300], [3, 300, 700], [7, 700, 1090]]


@pytest.mark.parametrize("seed", swept(range(20), [str(seed) for seed in range(0, 20, 4)]))
def test_steps_begin_where_the_table_of_steps_has_them(seed: int, tmp_path: Path) -> None:
    """The stages come in any order, and some are missing."""
    random = np.random.default_rng(seed)
    texts = ["prefill/embed", "prefill/lm_head", "decode/embed", "decode/layer.0/qkv", "decode/sample"]
    chosen = random.choice(texts, random.integers(1, 6), replace=False)
    model = Model()
    for index in range(int(random.integers(1, 25))):
        model.labelled(100 * index, 100 * index + int(random.integers(5, 100)), TID, str(random.choice(chosen)))
    trace = model.opened(tmp_path)
    spans, table = step_spans(labelled(trace)), steps(trace)
    assert spans["range"].tolist() == table["range"].tolist()
    assert spans["end_ns"].tolist() == table["range_end_ns"].tolist()


def test_a_phase_without_embeddings_begins_steps_with_its_first_stage(tmp_path: Path) -> None:
    model = Model()
    for index, text in enumerate(["decode/layer.0/qkv", "decode/layer.1/qkv", "decode/sample"] * 2):
        model.labelled(100 * index, 100 * index + 90, TID, text)
    assert step_spans(labelled(model.opened(tmp_path)))["start_ns"].tolist() == [0, 300]


def test_the_same_thread_number_in_another_process_is_another_thread(tmp_path: Path) -> None:
    model = Model()
    model.create(0, global_tid(99, 78), 1, "labkit")
    model.labelled(0, 100, TID, "decode/embed")
    model.labelled(0, 100, global_tid(99, 78), "decode/sample")
    for pid in (77, 99):
        model.call(10, 20, global_tid(pid, 78), 1)
        model.kernel(100 + pid, 110 + pid, global_pid(pid), 1)
    assert [name for name, _, _ in attribution_rows(model.opened(tmp_path))] == ["decode/embed", "decode/sample"]


def test_coverage_without_a_gpu_is_the_share_of_the_steps_within_stages(tmp_path: Path) -> None:
    model = Model()
    model.labelled(0, 2000, TID, "decode")
    model.labelled(0, 1000, TID, "decode/step")
    model.labelled(0, 600, TID, "decode/layer.0/qkv")
    model.labelled(500, 700, TID, "decode/layer.0/mlp")  # overlapping time counts once
    model.labelled(1000, 1100, TID, "decode/layer.0/qkv")  # in no step
    assert attribute(model.opened(tmp_path)).coverage == pytest.approx(0.7)


def test_a_synthetic_decode_is_covered_and_every_kernel_has_its_step() -> None:
    trace = decode_trace(steps=3, layers=2)
    attribution = attribute(trace)
    assert attribution.coverage == 1.0
    assert (attribution.how == "call").all()
    steps = trace.ranges["name"].to_numpy()[attribution.step_of_operation]
    assert set(steps) == {"decode/step"}
    assert len(np.unique(attribution.step_of_operation)) == 3


def test_traces_without_ranges_or_work_have_no_coverage(tmp_path: Path) -> None:
    assert attribute(Trace(Source("nsys", "", ()))).coverage == 0.0
    export = Export()
    export.kernel(0, 10, PID, 1)
    attribution = attribute(read(export.write(tmp_path / "kernels.sqlite"), cache=False))
    assert (attribution.coverage, attribution.range_of_operation.tolist(), list(attribution.how)) == (
        0.0,
        [-1],
        ["none"],
    )
    open_range = Model()
    open_range.range(0, None, TID, text="decode/embed", eventType=START_END, domainId=1)
    assert attribute(open_range.opened(tmp_path)).coverage == 0.0
