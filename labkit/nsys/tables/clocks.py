"""One clock for ranks whose traces have clocks of their own, set by the collectives that synchronise them.

Let true time be a rank's time plus its offset. No rank leaves such a collective before the last one has come, so for
ranks s and r each collective says start_r - end_s <= o_s - o_r <= end_r - start_s. The offsets that all collectives
allow are an interval. Within it the offset is set where the ends agree best: ranks leave at nearly the same time.
"""

from __future__ import annotations

from dataclasses import dataclass
from difflib import SequenceMatcher

import numpy as np
import pandas as pd

from labkit.nsys.arrays import Ints

MOST_TO_ALIGN = 20_000  # collectives of a rank: longer sequences are not searched for missing ones
FEW_MISSING, MOST_MISSING, STRETCHES = 2, 30, 4  # of a search for the clock where collectives are missing
RESIDUAL_QUANTILE = 0.95
UNKNOWN_NS = 1 << 62


@dataclass(frozen=True)
class Offset:
    """How the clock of a rank was set. `low_ns` to `high_ns`: what its collectives with the first rank allow;
    `residual_ns`: how far apart its ends and those of the first rank are after that, but for one in twenty: what the
    clock is known by.
    """

    offset_ns: int
    low_ns: int
    high_ns: int
    residual_ns: int


def matched(found: pd.DataFrame) -> tuple[pd.DataFrame, int]:
    """The collectives that have a partner on every rank of their group, with the number of the collective in the column
    `match`, and how many have none.

    Partners have the same group and sequence number where the trace tells them, else the same place in the sequence of
    what must be equal on all ranks. A missing one shifts no others: sequences that differ are aligned first.
    """
    keys = []
    for group, rows in found.groupby("group", sort=False):
        if (rows["sequence"] >= 0).all():
            again = rows.groupby(["rank", "sequence", "token"]).cumcount()
            key = rows["sequence"].astype("str") + "|" + rows["token"] + "|" + again.astype("str")
        else:
            key = _places(rows)
        keys.append(str(group) + "|" + key)
    return _whole(found.assign(match=pd.concat(keys).reindex(found.index)))


def _whole(named: pd.DataFrame) -> tuple[pd.DataFrame, int]:
    """Those that are on every rank of their group, numbered, and how many are not."""
    count = named.groupby("match")["rank"].transform("nunique")
    size = named.groupby("match")["size"].transform("max")
    ranks = named.groupby("group")["rank"].transform("nunique")
    whole = (count == np.where((size > 0) & (size <= ranks), size, ranks)) & (count > 1)
    kept = named[whole.to_numpy()].copy()
    kept["match"] = pd.factorize(kept["match"])[0]
    return kept.reset_index(drop=True), int((~whole).sum())


def matched_by_ends(found: pd.DataFrame, *, one_clock: bool) -> tuple[pd.DataFrame, int]:
    """The same where some are missing and the trace tells no numbers: partners have the same kind and message, and
    their ends are closest to each other. So it is found which one of a run of equal ones is missing.
    """
    rows_of = dict(iter(found.groupby("rank")))
    most = max(rows_of, key=lambda rank: len(rows_of[rank]))
    first = np.sort(rows_of[most]["end_ns"].to_numpy())
    offset = {
        rank: 0 if one_clock else _likely_offset(first, np.sort(rows["end_ns"].to_numpy()))
        for rank, rows in rows_of.items()
    }
    ends = found["end_ns"] + found["rank"].map(offset)
    place = pd.Series("", found.index, dtype="object")
    for token, rows in found.groupby("token", sort=False):
        of_rank = {rank: ends[each.index].sort_values() for rank, each in rows.groupby("rank")}
        longest = max(of_rank.values(), key=len).to_numpy()
        for rank, times in of_rank.items():
            near = _nearest(longest, times.to_numpy())
            mutual = _nearest(times.to_numpy(), longest)[near] == np.arange(len(times))
            place[times.index] = [
                f"{token}@{at}" if both else f"none{rank}-{own}"
                for own, (at, both) in enumerate(zip(near.tolist(), mutual.tolist(), strict=True))
            ]
    return _whole(found.assign(match=place))


def _likely_offset(first: Ints, times: Ints) -> int:
    """The offset that brings ends closest to those of another rank, if at most a few are missing on either side.

    Stretches of both sequences are laid on each other, shifted by some places. Of the offsets that this gives, the one
    is taken after which three quarters of the ends lie closest to an end of the other rank.
    """
    furthest = min(abs(len(first) - len(times)) + FEW_MISSING, MOST_MISSING)
    candidates = []
    for stretch in np.array_split(np.arange(len(times)), STRETCHES):
        for shift in range(-furthest, furthest + 1):
            there = stretch + shift
            held = (there >= 0) & (there < len(first))
            if held.any():
                candidates.append(int(np.median(first[there[held]] - times[stretch[held]])))
    return min(candidates, key=lambda offset: _distance(first, times + offset))


def _distance(first: Ints, times: Ints) -> float:
    return float(np.quantile(np.abs(first[_nearest(first, times)] - times), 0.75))


def _nearest(among: Ints, times: Ints) -> Ints:
    """For each time the place of the nearest among sorted ones."""
    after = np.clip(np.searchsorted(among, times), 1, max(len(among) - 1, 1))
    before = after - 1
    after = np.minimum(after, len(among) - 1)
    return np.where(times - among[before] <= among[after] - times, before, after)


def _places(rows: pd.DataFrame) -> pd.Series:
    """Of each row its place in the sequence of the rank that has the most, as text; its own where it has no partner."""
    of_rank = dict(iter(rows.groupby("rank")))
    longest = max(of_rank, key=lambda rank: len(of_rank[rank]))
    pattern = of_rank[longest]["token"].tolist()
    places = []
    for rank, each in of_rank.items():
        tokens = each["token"].tolist()
        if tokens == pattern:
            place = [str(at) for at in range(len(tokens))]
        elif max(len(tokens), len(pattern)) > MOST_TO_ALIGN:
            place = [f"{token}#{at}" for token, at in zip(tokens, each.groupby("token").cumcount(), strict=True)]
        else:
            place = [f"none{rank}-{at}" for at in range(len(tokens))]
            for block in SequenceMatcher(None, pattern, tokens, autojunk=False).get_matching_blocks():
                place[block.b : block.b + block.size] = [str(block.a + at) for at in range(block.size)]
        places.append(pd.Series(place, each.index, dtype="object"))
    return pd.concat(places)


def aligned(found: pd.DataFrame, *, one_clock: bool, word: str = "rank") -> tuple[dict[int, Offset], list[str]]:
    """The offset of each rank from the first one, and remarks. `one_clock`: all ranks were recorded on one; then it is
    left as it is, and only told what the collectives allow.
    """
    waits = found[found["synchronises"]]
    everyone = sorted(found["rank"].unique().tolist())
    offsets, remarks = {everyone[0]: Offset(0, 0, 0, 0)}, []
    for rank in everyone[1:]:
        pairs = waits[waits["rank"] == rank].merge(
            waits[waits["rank"] == everyone[0]], on="match", suffixes=("", "_first")
        )
        if pairs.empty:
            remarks.append(
                f"{word} {rank} has no synchronising collective with {word} {everyone[0]}: its clock is as it was"
            )
            offsets[rank] = Offset(0, -UNKNOWN_NS, UNKNOWN_NS, UNKNOWN_NS)
            continue
        start, end, first_start, first_end = (pairs[name].to_numpy() for name in COLUMNS)
        offsets[rank] = _offset(start, end, first_start, first_end, one_clock)
        if offsets[rank].low_ns > offsets[rank].high_ns:
            by = (offsets[rank].low_ns - offsets[rank].high_ns) / 1e3
            remarks.append(
                f"no offset of {word} {rank} fits all its collectives (by {by:,.1f} µs): its clock drifts, or some are "
                "matched wrongly; what happened within that time is undecided"
            )
    return offsets, remarks


COLUMNS = ("start_ns", "end_ns", "start_ns_first", "end_ns_first")


def _offset(start: Ints, end: Ints, first_start: Ints, first_end: Ints, one_clock: bool) -> Offset:
    low, high = int((first_start - end).max()), int((first_end - start).min())
    apart = first_end - end
    offset = 0 if one_clock else int(np.median(apart))
    if not one_clock and low <= high:
        offset = min(max(offset, low), high)
    residual = int(np.quantile(np.abs(apart - offset), RESIDUAL_QUANTILE))
    return Offset(offset, low, high, max(residual, low - high))
