"""Levels for intervals, on which intervals do not overlap, and the innermost interval around another."""

from __future__ import annotations

import heapq

import numpy as np
from numpy.typing import NDArray

from labkit.nsys.arrays import Ints


def stable_order(codes: NDArray[np.integer]) -> Ints:
    """A stable argsort. Numbers that fit in 16 bits are sorted in linear time."""
    small = len(codes) > 0 and codes.min() >= 0 and codes.max() < 1 << 15
    return np.argsort(codes.astype(np.int16) if small else codes, kind="stable")


def order_by_nesting(start: Ints, end: Ints, group: Ints) -> Ints:
    """The order by group, then by start, then from the longest to the shortest."""
    order = np.lexsort((start, group)) if np.any(start[1:] < start[:-1]) else stable_order(group)
    s, e, g = start[order], end[order], group[order]
    if np.any((g[1:] == g[:-1]) & (s[1:] == s[:-1]) & (e[1:] > e[:-1])):
        return np.lexsort((-end, start, group))
    return order


def levels(start: Ints, end: Ints, group: Ints) -> NDArray[np.int32]:
    """A level for each interval, from 0, such that no two intervals of a group overlap on a level.

    In a group whose intervals nest, the level is the number of intervals around this one. In any other group it is the
    lowest level that is free. An interval of no length counts as one nanosecond.
    """
    level = np.zeros(len(start), np.int32)
    if not len(start):
        return level
    order = order_by_nesting(start, end, group)
    span = int(end.max() - start.min()) + 2
    base = group[order] * span - start.min()
    begins, ends = base + start[order], base + np.maximum(end, start + 1)[order]
    ended = np.searchsorted(np.sort(ends), begins, side="right")
    depth = (np.arange(len(order)) - ended).astype(np.int32)
    for colliding in _colliding(begins, ends, depth, group[order]):
        within = np.flatnonzero(group[order] == colliding)
        depth[within] = _packed(begins[within], ends[within])
    level[order] = depth
    return level


def _colliding(begins: Ints, ends: Ints, depth: NDArray[np.int32], group: Ints) -> Ints:
    """The groups in which two intervals of the same depth overlap."""
    row = group * (int(depth.max()) + 1) + depth
    rows = stable_order(row)
    same = row[rows][1:] == row[rows][:-1]
    return np.unique(group[rows][1:][same & (begins[rows][1:] < ends[rows][:-1])])


def _packed(begins: Ints, ends: Ints) -> list[int]:
    """The lowest free level for each interval, in the order of their starts."""
    free: list[int] = []
    busy: list[tuple[int, int]] = []
    used, lowest = 0, []
    for begin, end in zip(begins.tolist(), ends.tolist(), strict=True):
        while busy and busy[0][0] <= begin:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if free:
            level = heapq.heappop(free)
        else:
            level, used = used, used + 1
        heapq.heappush(busy, (end, level))
        lowest.append(level)
    return lowest


def innermost(start: Ints, end: Ints, group: Ints, holders: tuple[Ints, Ints, Ints]) -> Ints:
    """The row of the innermost of `holders` (start, end, group) around each interval; -1: none.

    For holders that nest. `containment.tightest` also takes holders that overlap in any way, and is slower.
    """
    rows_around = np.full(len(start), -1, np.int64)
    holder_start, holder_end, holder_group = holders
    if not len(holder_start) or not len(start):
        return rows_around
    first = min(int(start.min()), int(holder_start.min()))
    span = max(int(end.max()), int(holder_end.max())) - first + 2
    depth = levels(holder_start, holder_end, holder_group)
    keys = holder_group * span + holder_start - first
    key = group * span + start - first
    for level in range(int(depth.max()) + 1):
        rows = np.flatnonzero(depth == level)
        rows = rows[np.argsort(keys[rows], kind="stable")]
        at = np.searchsorted(keys[rows], key, side="right") - 1
        row = rows[np.maximum(at, 0)]
        holds = (at >= 0) & (holder_group[row] == group) & (holder_end[row] >= end)
        rows_around[holds] = row[holds]
    return rows_around


def crossing(start: Ints, end: Ints, group: Ints) -> NDArray[np.bool_]:
    """Whether to take each interval out, so that the remaining ones nest: if two overlap, one contains the other."""
    out = np.zeros(len(start), bool)
    if not len(start):
        return out
    order = order_by_nesting(start, end, group)
    depth = levels(start, end, group)[order]
    place = np.arange(len(order))
    around = np.full(len(order), -1)
    for level in range(1, int(depth.max()) + 1):
        above, at_level = place[depth == level - 1], place[depth == level]
        around[at_level] = above[np.maximum(np.searchsorted(above, at_level) - 1, 0)]
    ends, groups = end[order], group[order]
    wrong = (around >= 0) & (groups[around] == groups) & (ends > ends[around])
    for crossed in np.unique(groups[wrong]):
        within = order[groups == crossed]
        out[within] = _unnested(start[within].tolist(), end[within].tolist())
    return out


def _unnested(starts: list[int], ends: list[int]) -> list[bool]:
    opened: list[int] = []
    crossed = []
    for start, end in zip(starts, ends, strict=True):
        while opened and opened[-1] <= start:
            opened.pop()
        crossed.append(bool(opened) and end > opened[-1])
        if not crossed[-1]:
            opened.append(end)
    return crossed
