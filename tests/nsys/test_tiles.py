"""Tiles and rectangles show every event at its place and with its length, at every scale."""

import numpy as np
import pytest
from helpers.traces.handmade import Recorder
from helpers.traces.random_traces import random_trace

from labkit.nsys.timeline.lanes import Lanes, build_lanes
from labkit.nsys.timeline.rectangles import rectangles
from labkit.nsys.timeline.shades import SHADES
from labkit.nsys.timeline.synthetic import decode_trace
from labkit.nsys.timeline.tiles import COLUMNS, FAINTEST, WIDE, Tiles, TimelineTile
from labkit.stages import Stage


@pytest.fixture(scope="module", params=range(4))
def lanes(request: pytest.FixtureRequest) -> Lanes:
    return build_lanes(random_trace(request.param))


def edges_of(tiles: Tiles, level: int, index: int) -> np.ndarray:
    width = 1 << (tiles.exponent - level)
    return tiles.origin + (index * COLUMNS + np.arange(COLUMNS + 1)) * width


def busy_ns(lanes: Lanes, events: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Time of the events within each column, in ns."""
    start, end = lanes.start[events, None], lanes.end[events, None]
    return np.maximum(np.minimum(end, edges[1:]) - np.maximum(start, edges[:-1]), 0)


def check_columns(lanes: Lanes, tile: TimelineTile, edges: np.ndarray) -> None:
    """Asserts that fill and shade of every lane agree with its events."""
    width = edges[1] - edges[0]
    for lane in range(lanes.count):
        events = np.flatnonzero(lanes.lane == lane)
        busy = busy_ns(lanes, events, edges)
        touched = (busy > 0) | ((lanes.start[events, None] >= edges[:-1]) & (lanes.start[events, None] < edges[1:]))
        if lane not in tile.lanes:
            assert not touched.any()
            continue
        row = tile.lanes.tolist().index(lane)
        assert np.array_equal(tile.fill[row] > 0, touched.any(axis=0))
        expected = np.clip(busy.sum(axis=0) * 255 // width, FAINTEST, 255)
        assert np.array_equal(tile.fill[row][touched.any(axis=0)], expected[touched.any(axis=0)])
        time = np.zeros((len(lanes.shades), COLUMNS))
        np.add.at(time, lanes.shade[events], busy)
        chosen = time[tile.shade[row], np.arange(COLUMNS)]
        assert np.all(chosen >= time.max(axis=0) - len(events))  # events of zero length count a nanosecond each


@pytest.mark.parametrize("level", [0, 1, 3, 5, 8])
def test_a_tile_is_what_its_events_make_it(lanes: Lanes, level: int) -> None:
    tiles = Tiles(lanes)
    last = (lanes.span[1] - lanes.span[0]) // (COLUMNS << (tiles.exponent - level))
    for index in sorted({0, last // 2, last}):
        tile, edges = tiles.tile(level, index), edges_of(tiles, level, index)
        check_columns(lanes, tile, edges)
        long_enough = lanes.end - lanes.start >= WIDE * (edges[1] - edges[0])
        within = (lanes.end > edges[0]) & (lanes.start < edges[-1])
        assert sorted(tile.events) == np.flatnonzero(long_enough & within).tolist()


def test_a_tile_has_a_few_rectangles_for_each_column_and_lane(lanes: Lanes) -> None:
    tiles = Tiles(lanes)
    for level in range(tiles.levels):
        tile = tiles.tile(level, 0)
        assert tile.fill.shape == tile.shade.shape == (len(tile.lanes), COLUMNS)
        assert np.bincount(lanes.lane[tile.events], minlength=1).max(initial=0) <= COLUMNS / WIDE + 2
        assert np.all(np.diff(lanes.shade[tile.events].astype(int)) >= 0)


def test_levels_end_where_a_column_is_a_nanosecond(lanes: Lanes) -> None:
    tiles = Tiles(lanes)
    whole = lanes.span[1] - lanes.span[0]
    assert COLUMNS << tiles.exponent > whole >= COLUMNS << max(tiles.exponent - 1, 0)
    edges = edges_of(tiles, tiles.levels - 1, 0)
    assert edges[1] - edges[0] == 1


@pytest.mark.parametrize(("level", "index"), [(-1, 0), (99, 0), (1, 2), (1, -1)])
def test_a_tile_that_is_not_there_is_refused(lanes: Lanes, level: int, index: int) -> None:
    with pytest.raises(ValueError, match="expected a level below"):
        Tiles(lanes).tile(level, index)


def test_an_event_of_no_length_is_seen() -> None:
    recorder = Recorder()
    recorder.range("decode/embed", 5, 5)
    recorder.range("decode/sample", 900, 901)
    lanes = build_lanes(recorder.trace())
    tile = Tiles(lanes).tile(0, 0)
    assert tile.fill[0][0] == FAINTEST
    assert SHADES[tile.shade[0][0]] == Stage.EMBED


@pytest.mark.parametrize("columns", [1, 13, 200, 3_000])
@pytest.mark.parametrize("part", [(0.0, 1.0), (0.3, 0.31), (0.9, 1.2)])
def test_rectangles_hold_every_event_once(lanes: Lanes, columns: int, part: tuple[float, float]) -> None:
    first, last = lanes.span
    begin, end = (round(first + share * (last - first)) for share in part)
    boxes = rectangles(lanes, begin, end, columns)
    column_ns = max((end - begin) / columns, 1)
    inside = (lanes.start < end) & (lanes.end >= begin)
    wide = lanes.end - lanes.start >= column_ns
    assert boxes.events.sum() == inside.sum()
    assert set(np.flatnonzero(inside & wide)) <= set(boxes.event)
    merged = boxes.event < 0
    assert np.all(boxes.events[merged] > 1)
    assert np.all((boxes.busy > 0) | merged)
    assert np.all(boxes.busy <= 1)
    total = (boxes.busy * (boxes.end - boxes.start)).sum()
    assert total == pytest.approx((lanes.end - lanes.start)[inside].sum(), rel=1e-9)


@pytest.mark.parametrize("columns", [13, 200])
def test_rectangles_of_a_lane_do_not_overlap_and_are_few(lanes: Lanes, columns: int) -> None:
    boxes = rectangles(lanes, *lanes.span, columns)
    for lane in range(lanes.count):
        rows = np.flatnonzero(boxes.lane == lane)
        rows = rows[np.lexsort((boxes.end[rows], boxes.start[rows]))]
        assert np.all(boxes.end[rows][:-1] <= boxes.start[rows][1:])
        assert len(rows) <= 2 * columns + 2


def test_two_traces_have_a_zero_each() -> None:
    lanes = build_lanes({"one": decode_trace(steps=2, layers=1), "two": decode_trace(steps=3, layers=2, seed=9)})
    assert lanes.aligned == "first decode step"
    for trace in range(2):
        steps = (lanes.texts[lanes.name] == "decode/step") & (lanes.source // 3 == trace)
        assert lanes.start[steps].min() == 0
    assert [strip.trace for strip in lanes.strips] == sorted(strip.trace for strip in lanes.strips)
