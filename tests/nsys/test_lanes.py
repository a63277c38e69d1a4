"""Lanes hold every event once, in order, and the details of an event agree with the trace."""

import json

import numpy as np
import pytest
from helpers.traces.handmade import Recorder
from helpers.traces.random_traces import random_trace

from labkit.nsys.analysis.attribution import attribute
from labkit.nsys.tables.selection import Selection
from labkit.nsys.timeline.events import details, nearest, neighbour, search, short_name
from labkit.nsys.timeline.lanes import Lanes, build_lanes
from labkit.nsys.timeline.narrowing import narrowed
from labkit.nsys.timeline.shades import OTHER, SHADES, STEP
from labkit.nsys.timeline.strips import FRAMES, MAX_LEVELS
from labkit.nsys.timeline.synthetic import decode_trace, trace_of
from labkit.nsys.timeline.view import view
from labkit.nsys.trace import Trace, TraceError, typed
from labkit.stages import parse


@pytest.fixture(scope="module", params=range(6))
def trace(request: pytest.FixtureRequest) -> Trace:
    return random_trace(request.param) if request.param else decode_trace(steps=3, layers=2, ranks=3)


def frame_of(trace: Trace, lanes: Lanes, event: int) -> tuple[str, int]:
    return FRAMES[lanes.source[event] % len(FRAMES)], int(lanes.row[event])


def test_every_event_is_in_a_lane_once(trace: Trace) -> None:
    lanes = build_lanes(trace)
    assert lanes.left_out == 0
    for number, frame in enumerate(FRAMES):
        rows = lanes.row[lanes.source == number]
        assert sorted(rows) == list(range(len(getattr(trace, frame))))
        assert lanes.events_of(0, frame)[rows[0]] == np.flatnonzero(lanes.source == number)[0]


def test_an_event_is_what_its_row_says(trace: Trace) -> None:
    lanes = build_lanes(trace)
    for event in range(0, len(lanes), 37):
        frame, row = frame_of(trace, lanes, event)
        values = getattr(trace, frame).iloc[row]
        assert lanes.start[event] + lanes.zeros_ns[0] == values["start_ns"]
        assert lanes.end[event] + lanes.zeros_ns[0] == values["end_ns"]
        assert lanes.texts[lanes.name[event]] == values["name"]


def test_lanes_are_sorted_and_nothing_in_one_overlaps(trace: Trace) -> None:
    lanes = build_lanes(trace)
    assert np.all(np.diff(lanes.lane) >= 0)
    same = np.diff(lanes.lane) == 0
    assert np.all(lanes.end[:-1][same] <= lanes.start[1:][same])
    assert np.array_equal(lanes.bounds[:-1], np.flatnonzero(np.diff(lanes.lane, prepend=-1)))


def test_threads_stand_above_streams_in_each_process() -> None:
    lanes = build_lanes(decode_trace(steps=2, layers=1, ranks=2))
    assert [(strip.process, strip.kind) for strip in lanes.strips] == [
        (process, kind) for process in range(2) for kind in ("ranges", "api", "gpu")
    ]
    assert lanes.strips[0].lanes == 3  # phase, step, stage
    assert lanes.count == sum(strip.lanes for strip in lanes.strips)


def test_colours_are_those_of_the_attribution(trace: Trace) -> None:
    lanes, attribution = build_lanes(trace), attribute(trace)
    names = trace.ranges["name"].astype(str).to_numpy()
    for event in np.flatnonzero(lanes.source == FRAMES.index("operations"))[::5]:
        row = attribution.range_of_operation[lanes.row[event]]
        label = parse(names[row]) if row >= 0 else None
        if label and label.stage:
            assert SHADES[lanes.shade[event]] == label.stage


def test_steps_and_strangers_have_colours_of_their_own() -> None:
    recorder = Recorder()
    recorder.range("decode/step", 0, 100)
    recorder.range("decode/layer.0/mlp", 10, 50)
    recorder.range("mine", 20, 30, domain="")
    recorder.range("mine", 60, 70, domain="")
    lanes = build_lanes(recorder.trace())
    colours = {
        (int(start), str(lanes.texts[name])): SHADES[shade]
        for start, name, shade in zip(lanes.start, lanes.name, lanes.shade, strict=True)
    }
    assert colours == {
        (0, "decode/step"): STEP,
        (10_000, "decode/layer.0/mlp"): "mlp",
        (20_000, "mine"): "mlp",
        (60_000, "mine"): OTHER,
    }


def test_without_stages_kernels_and_operators_have_the_colours_of_what_they_do_and_ranges_of_their_names() -> None:
    recorder = Recorder()
    for number in range(8):
        recorder.range(f"phase {number}", 1000 * number, 1000 * number + 100 * (number + 1), domain="mine")
    recorder.operator("aten::linear", 10, 20)
    recorder.kernel(11, 12, 15, name="ampere_sgemm_128x64_tn")
    recorder.kernel(16, 17, 19, name="my_kernel")
    lanes = build_lanes(recorder.trace())
    colours = {str(lanes.texts[name]): lanes.shades[shade] for name, shade in zip(lanes.name, lanes.shade, strict=True)}
    longest = [f"phase {number}" for number in range(7, 1, -1)]
    assert lanes.shades[len(SHADES) :] == tuple(longest)
    assert colours == {
        **{f"phase {number}": f"phase {number}" if number > 1 else OTHER for number in range(8)},
        **{"aten::linear": "matrix multiplication", "ampere_sgemm_128x64_tn": "matrix multiplication"},
        **{"launch": OTHER, "my_kernel": OTHER},
    }


def test_calls_of_the_system_have_lanes_of_their_own() -> None:
    recorder = Recorder()
    recorder.kernel(10, 20, 30)
    recorder.calls.append(
        {"start_ns": 0, "end_ns": 50_000, "process": 0, "tid": 1, "kind": "os", "name": "poll", "correlation": 0}
    )
    lanes = build_lanes(recorder.trace())
    assert [(strip.kind, strip.title) for strip in lanes.strips] == [
        ("api", "thread (1): CUDA calls"),
        ("os", "system calls"),
        ("gpu", "GPU 0, stream 7"),
    ]


def test_a_part_of_a_timeline_has_the_requested_events_and_links_only_to_them(trace: Trace) -> None:
    lanes = build_lanes(trace)
    window = (int(trace.ranges["start_ns"].min()), int(trace.ranges["end_ns"].max()) // 2 + 1)
    part = narrowed(lanes, Selection(window_ns=window))
    kept = (lanes.start + lanes.zeros_ns[0] < window[1]) & (
        np.maximum(lanes.end, lanes.start + 1) + lanes.zeros_ns[0] > window[0]
    )
    assert np.array_equal(part.start, lanes.start[kept])
    assert np.array_equal(part.row, lanes.row[kept])
    assert sum(strip.lanes for strip in part.strips) == part.count == len(np.unique(part.lane))
    for event in range(0, len(part), max(len(part) // 20, 1)):
        info = details(part, event)
        assert all(0 <= other["event"] < len(part) for other in (*info["parents"], *info["linked"]))


def test_the_work_of_a_graph_has_the_stage_of_its_making() -> None:
    recorder = Recorder()
    recorder.range("decode/layer.0/mlp", 0, 10)
    recorder.range("decode/step", 100, 200)
    recorder.kernel(110, 120, 130, graph_node=5)
    nodes = {"node": [5], "original": [0], "start_ns": [4_000], "process": [0], "tid": [1]}
    trace = recorder.trace()
    lanes = build_lanes(
        Trace(trace.source, trace.ranges, trace.operations, trace.calls, typed("graph_nodes", nodes), trace.processes)
    )
    event = int(np.flatnonzero(lanes.source == FRAMES.index("operations")).item())
    assert SHADES[lanes.shade[event]] == "mlp"
    info = details(lanes, event)
    assert (info["stage"], info["layer"], info["phase"]) == ("mlp", 0, "decode")
    assert "CUDA graph" in info["facts"]["stage known by"]
    assert [parent["name"] for parent in info["parents"]] == ["decode/step"]


def test_details_of_a_kernel_lead_to_its_call_and_back() -> None:
    lanes = build_lanes(decode_trace(steps=2, layers=2, kernels_per_stage=2))
    event = int(search(lanes, "gemv2T")[3])
    info = details(lanes, event)
    assert info["kind"] == "kernel"
    assert info["short"] == "gemv2T_kernel_val"
    assert info["facts"]["grid"] == "108 x 1 x 1"
    assert info["stage"] in ("attn_out", "mlp_out")
    assert [parent["name"] for parent in info["parents"]][:2] == ["decode", "decode/step"]
    (call,) = info["linked"]
    back = details(lanes, call["event"])
    assert back["kind"] == "CUDA call"
    assert [other["event"] for other in back["linked"]] == [event]
    assert back["parents"] == info["parents"]
    assert (back["stage"], back["layer"]) == (info["stage"], info["layer"])
    assert parse(info["parents"][-1]["name"]) == parse(f"{info['phase']}/layer.{info['layer']}/{info['stage']}")


def test_details_can_be_sent_as_json(trace: Trace) -> None:
    lanes = build_lanes(trace)
    for event in range(0, len(lanes), 29):
        info = json.loads(json.dumps(details(lanes, event), allow_nan=False))
        assert info["duration_ns"] == info["end_ns"] - info["start_ns"] >= 0
        for parent in info["parents"]:
            assert parent["event"] != event
            assert lanes.lane[event] != parent["lane"]


def test_the_search_finds_names_in_any_case_in_the_order_of_time(trace: Trace) -> None:
    lanes = build_lanes(trace)
    matches = search(lanes, "LaYeR.1/")
    assert set(matches) == {event for event in range(len(lanes)) if "layer.1/" in lanes.texts[lanes.name[event]]}
    assert np.all(np.diff(lanes.start[matches]) >= 0)
    assert len(search(lanes, "")) == len(search(lanes, "no such name")) == 0


def test_the_nearest_is_what_is_there_or_closest(trace: Trace) -> None:
    lanes = build_lanes(trace)
    lane = int(lanes.lane[len(lanes) // 2])
    first, end = lanes.bounds[lane : lane + 2]
    rows = np.arange(first, end)
    for time in np.linspace(lanes.span[0] - 5, lanes.span[1] + 5, 60).astype(int):
        distance = np.maximum(np.maximum(lanes.start[rows] - time, time - lanes.end[rows]), 0)
        assert distance[nearest(lanes, lane, time) - first] == distance.min()
    assert neighbour(lanes, first, -1) == first
    assert neighbour(lanes, end - 1, 1) == end - 1


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("void at::native::reduce_kernel<4, at::native::Add<float>, std::array<char*, 3>>(int, Add)", "reduce_kernel"),
        ("ampere_sgemm_32x32_sliced1x4_tn", "ampere_sgemm_32x32_sliced1x4_tn"),
        ("void (anonymous namespace)::softmax<float>(float*, int)", "softmax"),
        ("std::enable_if<!(false), void>::type gemv<int, 128>(Params)", "gemv"),
        ("HtoD", "HtoD"),
        ("", ""),
    ],
)  # fmt: skip
def test_a_kernels_name_is_shortened(name: str, short: str) -> None:
    assert short_name(name) == short


def test_what_nests_too_deep_is_left_out_and_counted() -> None:
    recorder = Recorder()
    for depth in range(MAX_LEVELS + 5):
        recorder.range("mine", depth, 200 - depth)
    lanes = build_lanes(recorder.trace())
    assert lanes.left_out == 5
    assert lanes.count == MAX_LEVELS
    assert lanes.events_of(0, "ranges")[MAX_LEVELS + 1] == -1


def test_a_negative_interval_has_zero_length() -> None:
    recorder = Recorder()
    recorder.range("decode/embed", 10, 5)
    recorder.kernel(6, 9, 7)
    lanes = build_lanes(recorder.trace())
    assert np.all(lanes.end >= lanes.start)


@pytest.mark.parametrize("frames", [("ranges",), ("calls",), ("operations",), ("calls", "operations")])
def test_a_trace_may_lack_frames(frames: tuple[str, ...]) -> None:
    whole = decode_trace(steps=2, layers=1)
    lanes = build_lanes(Trace(whole.source, **{name: whole.frames[name] for name in frames}))
    assert len(lanes) == sum(len(whole.frames[name]) for name in frames)
    for event in range(0, len(lanes), 7):
        assert details(lanes, event)["linked"] == [] or len(frames) == 2


def test_several_traces_that_do_not_all_decode_begin_with_their_captures() -> None:
    recorder = Recorder()
    recorder.range("mine", 50, 90, domain="")
    lanes = build_lanes({"one": decode_trace(steps=2, layers=1), "other": recorder.trace()})
    assert lanes.aligned == "start of the capture"
    assert lanes.start[lanes.source < 3].min() == lanes.start[lanes.source >= 3].min() == 0


@pytest.mark.parametrize("traces", [{}, []])
def test_no_trace_is_refused(traces: dict[str, Trace]) -> None:
    with pytest.raises(TraceError, match="expected one"):
        build_lanes(traces)


def test_steps_are_a_view_of_their_own() -> None:
    lanes = build_lanes({"long": decode_trace(steps=5, layers=2), "short": decode_trace(steps=4, layers=1)})
    first, last = view(lanes, None, range(1, 3))
    long = np.flatnonzero((lanes.texts[lanes.name] == "decode/step") & (lanes.source < 3))
    short = np.flatnonzero((lanes.texts[lanes.name] == "decode/step") & (lanes.source >= 3))
    assert first <= lanes.start[short[1]] < lanes.start[long[1]]
    assert lanes.end[long[2]] <= last < lanes.end[long[3]]
    assert view(lanes, (0.5, 1.25)) == (500_000, 1_250_000)


@pytest.mark.parametrize(
    ("window", "steps", "message"),
    [
        ((1, 2), 3, "a window and steps"),
        ((2, 1), None, "its begin and its later end"),
        (None, 3, "expected some of its 2"),
        (None, 0, "got decode steps none"),
        (None, range(-1, 1), "expected some of its 2"),
    ],
)
def test_a_view_of_nothing_is_refused(
    window: tuple[float, float] | None, steps: int | range | None, message: str
) -> None:
    with pytest.raises(TraceError, match=message):
        view(build_lanes(decode_trace(steps=2, layers=1)), window, steps)


def test_a_synthetic_trace_has_the_requested_number_of_events() -> None:
    trace = trace_of(5_000, layers=2)
    count = sum(len(frame) for frame in (trace.ranges, trace.calls, trace.operations))
    assert 5_000 <= count < 5_100
    assert attribute(trace).coverage == 1.0


def test_ranges_are_coloured_by_names_without_their_numbers() -> None:
    recorder = Recorder()
    for number in range(20):
        recorder.range(f"load, seq = {number}, op_id = {number}", 10 * number, 10 * number + 5, domain="")
        recorder.range(f"ProfilerStep#{number}", 10 * number + 5, 10 * number + 9, domain="")
    lanes = build_lanes(recorder.trace())
    assert sorted({lanes.shades[shade] for shade in lanes.shade}) == ["ProfilerStep", "load"]
