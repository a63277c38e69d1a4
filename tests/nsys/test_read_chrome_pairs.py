"""Begins and ends of Chrome traces: each pair is one range, in any order of the file."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit.nsys.reader.reading import read
from labkit.nsys.trace import Trace, TraceError


def opened(folder: Path, events: object) -> Trace:
    path = folder / "trace.json"
    path.write_text(json.dumps(events))
    return read(path, cache=False)


def rows(frame: pd.DataFrame) -> list[tuple]:
    return list(frame.itertuples(index=False, name=None))


def test_begins_and_ends_are_paired_by_thread(tmp_path: Path) -> None:
    begin: dict[str, object] = {"ph": "B", "name": "outer", "ts": 1, "pid": 1, "tid": 1, "args": {"a": 1}}
    inner, end = begin | {"name": "inner", "ts": 2, "args": None}, {"ph": "E", "pid": 1, "tid": 1}
    of_other_thread = begin | {"name": "other", "tid": 2, "ts": 1.5, "cat": "x"}
    events = [begin, of_other_thread, inner, end | {"ts": "3.5"}, end | {"ts": 9}, end | {"ts": 4, "tid": 2}]
    trace = opened(tmp_path, [*events, end | {"ts": 10}, begin | {"ts": 11}])
    assert rows(trace.ranges[["name", "start_ns", "end_ns", "tid"]]) == [
        ("outer", 1000, 9000, 1), ("other", 1500, 4000, 2), ("inner", 2000, 3500, 1),
    ]  # fmt: skip
    assert trace.source.skipped == ("2 events with a begin or an end only: left out",)
    assert trace.source.profiler == "a Chrome trace"


@settings(max_examples=60, deadline=None)
@given(st.randoms(use_true_random=False), st.integers(1, 12), st.booleans())
def test_begins_and_ends_in_any_order_are_the_nested_ranges(order: Random, count: int, named: bool) -> None:
    """The format lets a recorder write events in any order. Two names serve for all of the ranges."""
    ranges = nested(order, count)
    halves = [
        {"ph": phase, "ts": time, "pid": 1, "tid": tid} | ({"name": name} if phase == "B" or named else {})
        for name, begin, end, tid in ranges
        for phase, time in (("B", begin), ("E", end))
    ]
    order.shuffle(halves)
    alone = {"ph": "E", "ts": 0, "pid": 1, "tid": 1}
    with TemporaryDirectory() as folder:
        trace = opened(Path(folder), [*halves, alone])
    expected = [(name, begin * 1000, end * 1000, tid) for name, begin, end, tid in ranges]
    assert sorted(rows(trace.ranges[["name", "start_ns", "end_ns", "tid"]])) == sorted(expected)
    assert trace.source.skipped == ("1 events with a begin or an end only: left out",)


def nested(order: Random, count: int) -> list[tuple[str, int, int, int]]:
    """Ranges of two threads, as (name, begin, end, thread): each is beside another one, or within it."""
    opened: dict[int, list[tuple[str, int]]] = {1: [], 2: []}
    done, time = [], 0
    while count or any(opened.values()):
        time += 1
        tid = order.choice([1, 2])
        if count and order.random() < 0.5:
            opened[tid].append((order.choice("ab"), time))
            count -= 1
        elif opened[tid]:
            name, begin = opened[tid].pop()
            done.append((name, begin, time, tid))
    return done


def test_an_end_with_a_name_closes_the_innermost_begin_of_this_name(tmp_path: Path) -> None:
    """Ranges of one thread may overlap; an end of an unknown name closes nothing."""
    halves = [("B", "a", 1), ("B", "a", 2), ("B", "b", 3), ("E", "a", 4), ("E", "c", 5), ("E", "", 6), ("E", "", 7)]
    events = [{"ph": phase, "name": name, "ts": ts, "pid": 1, "tid": 1} for phase, name, ts in halves]
    trace = opened(tmp_path, events)
    assert rows(trace.ranges[["name", "start_ns", "end_ns"]]) == [
        ("a", 1000, 7000),
        ("a", 2000, 4000),
        ("b", 3000, 6000),
    ]
    assert trace.source.skipped == ("1 events with a begin or an end only: left out",)


@pytest.mark.parametrize("phase", ["B", "E"])
def test_an_error_of_a_begin_or_end_names_its_element(phase: str, tmp_path: Path) -> None:
    whole = {"ph": "X", "cat": "cpu_op", "name": "a", "ts": 0, "dur": 1, "pid": 1, "tid": 1}
    with pytest.raises(TraceError, match='element 2 is no event: got ts = "soon"'):
        opened(tmp_path, [whole, {"ph": phase, "name": "a", "ts": "soon", "pid": 1, "tid": 1}])
    kernel = {"cat": "kernel", "name": "a", "pid": 1, "tid": 1, "args": {"device": "x"}}
    halves = [kernel | {"ph": "E", "ts": 5}, kernel | {"ph": "B", "ts": 3}]
    with pytest.raises(TraceError, match="element 3 is no event: got device = x"):
        opened(tmp_path, [whole, *halves])
