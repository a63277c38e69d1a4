"""One clock for ranks whose traces have different clocks, set by the collectives that synchronise the ranks.

Let true time be a rank's time plus its offset. No rank leaves a synchronising collective before the last one has
arrived. So for ranks s and r each collective gives start_r - end_s <= o_s - o_r <= end_r - start_s. The offsets that
all collectives allow are an interval. The chosen offset is the one within it where the ends agree best, because ranks
leave at nearly the same time.
"""

from __future__ import annotations

from dataclasses import dataclass
from difflib import SequenceMatcher

import numpy as np
import pandas as pd

from labkit.nsys.arrays import Ints

MOST_TO_ALIGN = 20_000  # collectives of a rank; longer sequences are not searched for missing ones
FEW_MISSING, MOST_MISSING, STRETCHES = 2, 30, 4  # limits of the search for an offset if collectives are missing
RESIDUAL_QUANTILE = 0.95
UNKNOWN_NS = 1 << 62
PAIR_TIMES = ("start_ns", "end_ns", "start_ns_first", "end_ns_first")  # of a collective, on a rank and on the first


@dataclass(frozen=True)
class Offset:
    """The offset of a rank's clock from the first rank's."""

    offset_ns: int
    low_ns: int  # the least offset that the collectives of both ranks allow
    high_ns: int  # the greatest
    residual_ns: int  # 19 of 20 ends lie closer than this to the first rank's: the uncertainty of the clock


def matched(collectives: pd.DataFrame) -> tuple[pd.DataFrame, int]:
    """The collectives with a partner on every rank of their group, and the number of the others.

    The column `match` numbers the collectives. Partners have the same group and sequence number if the trace has these,
    else the same position in the sequence of tokens, which are equal on all ranks. Sequences that differ are aligned
    first, so that a missing collective does not shift the others.
    """
    keys = []
    for group, group_rows in collectives.groupby("group", sort=False):
        if (group_rows["sequence"] >= 0).all():
            again = group_rows.groupby(["rank", "sequence", "token"]).cumcount()
            key = group_rows["sequence"].astype("str") + "|" + group_rows["token"] + "|" + again.astype("str")
        else:
            key = _places(group_rows)
        keys.append(str(group) + "|" + key)
    return _whole(collectives.assign(match=pd.concat(keys).reindex(collectives.index)))


def _whole(rows: pd.DataFrame) -> tuple[pd.DataFrame, int]:
    """The collectives that are on every rank of their group, numbered, and the number of the others."""
    count = rows.groupby("match")["rank"].transform("nunique")
    size = rows.groupby("match")["size"].transform("max")
    ranks = rows.groupby("group")["rank"].transform("nunique")
    whole = (count == np.where((size > 0) & (size <= ranks), size, ranks)) & (count > 1)
    complete = rows[whole.to_numpy()].copy()
    complete["match"] = pd.factorize(complete["match"])[0]
    return complete.reset_index(drop=True), int((~whole).sum())


def matched_by_ends(collectives: pd.DataFrame, *, one_clock: bool) -> tuple[pd.DataFrame, int]:
    """`matched` for traces with missing collectives and without sequence numbers.

    Partners have the same kind and message, and their ends are closest to each other. This finds the missing one in a
    run of equal collectives.
    """
    rows_of = dict(iter(collectives.groupby("rank")))
    most = max(rows_of, key=lambda rank: len(rows_of[rank]))
    first = np.sort(rows_of[most]["end_ns"].to_numpy())
    offset = {
        rank: 0 if one_clock else _likely_offset(first, np.sort(rows["end_ns"].to_numpy()))
        for rank, rows in rows_of.items()
    }
    ends = collectives["end_ns"] + collectives["rank"].map(offset)
    place = pd.Series("", collectives.index, dtype="object")
    for token, rows in collectives.groupby("token", sort=False):
        of_rank = {rank: ends[own.index].sort_values() for rank, own in rows.groupby("rank")}
        longest = max(of_rank.values(), key=len).to_numpy()
        for rank, times in of_rank.items():
            near = _nearest(longest, times.to_numpy())
            mutual = _nearest(times.to_numpy(), longest)[near] == np.arange(len(times))
            place[times.index] = [
                f"{token}@{partner}" if is_mutual else f"none{rank}-{at}"
                for at, (partner, is_mutual) in enumerate(zip(near.tolist(), mutual.tolist(), strict=True))
            ]
    return _whole(collectives.assign(match=place))


def _likely_offset(first: Ints, times: Ints) -> int:
    """The offset that brings a rank's ends closest to another rank's, if at most a few are missing on either side.

    Stretches of both sequences are laid on each other, shifted by a few positions. Each shift gives an offset. The
    result is the offset that minimises the distance within which three quarters of the ends have an end of the other
    rank.
    """
    furthest = min(abs(len(first) - len(times)) + FEW_MISSING, MOST_MISSING)
    candidates = []
    for stretch in np.array_split(np.arange(len(times)), STRETCHES):
        for shift in range(-furthest, furthest + 1):
            partners = stretch + shift
            inside = (partners >= 0) & (partners < len(first))
            if inside.any():
                candidates.append(int(np.median(first[partners[inside]] - times[stretch[inside]])))
    return min(candidates, key=lambda offset: _distance(first, times + offset))


def _distance(first: Ints, times: Ints) -> float:
    return float(np.quantile(np.abs(first[_nearest(first, times)] - times), 0.75))


def _nearest(among: Ints, times: Ints) -> Ints:
    """For each time the position of the nearest time in `among`, which is sorted."""
    after = np.clip(np.searchsorted(among, times), 1, max(len(among) - 1, 1))
    before = after - 1
    after = np.minimum(after, len(among) - 1)
    return np.where(times - among[before] <= among[after] - times, before, after)


def _places(rows: pd.DataFrame) -> pd.Series:
    """The position of each row in the longest rank's sequence, as text; a text of its own for a row without partner."""
    of_rank = dict(iter(rows.groupby("rank")))
    longest = max(of_rank, key=lambda rank: len(of_rank[rank]))
    pattern = of_rank[longest]["token"].tolist()
    places = []
    for rank, own in of_rank.items():
        tokens = own["token"].tolist()
        if tokens == pattern:
            place = [str(at) for at in range(len(tokens))]
        elif max(len(tokens), len(pattern)) > MOST_TO_ALIGN:
            place = [f"{token}#{at}" for token, at in zip(tokens, own.groupby("token").cumcount(), strict=True)]
        else:
            place = [f"none{rank}-{at}" for at in range(len(tokens))]
            for block in SequenceMatcher(None, pattern, tokens, autojunk=False).get_matching_blocks():
                place[block.b : block.b + block.size] = [str(block.a + at) for at in range(block.size)]
        places.append(pd.Series(place, own.index, dtype="object"))
    return pd.concat(places)


def aligned(collectives: pd.DataFrame, *, one_clock: bool, word: str = "rank") -> tuple[dict[int, Offset], list[str]]:
    """The offset of each rank from the first one, and remarks.

    `one_clock`: all ranks were recorded on one clock. All offsets are then 0, with bounds from the collectives.
    """
    synchronising = collectives[collectives["synchronises"]]
    ranks = sorted(collectives["rank"].unique().tolist())
    offsets, remarks = {ranks[0]: Offset(0, 0, 0, 0)}, []
    for rank in ranks[1:]:
        pairs = synchronising[synchronising["rank"] == rank].merge(
            synchronising[synchronising["rank"] == ranks[0]], on="match", suffixes=("", "_first")
        )
        if pairs.empty:
            remarks.append(
                f"{word} {rank} has no synchronising collective with {word} {ranks[0]}: its clock is as it was"
            )
            offsets[rank] = Offset(0, -UNKNOWN_NS, UNKNOWN_NS, UNKNOWN_NS)
            continue
        start, end, first_start, first_end = (pairs[name].to_numpy() for name in PAIR_TIMES)
        offset = offsets[rank] = _offset(start, end, first_start, first_end, one_clock)
        if offset.low_ns > offset.high_ns:
            by = (offset.low_ns - offset.high_ns) / 1e3
            remarks.append(
                f"no offset of {word} {rank} fits all its collectives (by {by:,.1f} µs): its clock drifts, or some are "
                "matched wrongly; the order of events within that time is undecided"
            )
    return offsets, remarks


def _offset(start: Ints, end: Ints, first_start: Ints, first_end: Ints, one_clock: bool) -> Offset:
    low, high = int((first_start - end).max()), int((first_end - start).min())
    apart = first_end - end
    offset = 0 if one_clock else int(np.median(apart))
    if not one_clock and low <= high:
        offset = min(max(offset, low), high)
    residual = int(np.quantile(np.abs(apart - offset), RESIDUAL_QUANTILE))
    return Offset(offset, low, high, max(residual, low - high))
