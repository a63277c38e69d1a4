"""Ranks with separate clocks: collectives show the offsets of the clocks and the waiting, or that neither is known."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from helpers.traces.unstaged_traces import TRANSFER_US, TRUE_OFFSETS_US, exchange, steps

from labkit.nsys.tables.operator_work import element_bytes
from labkit.nsys.tables.rank_waits import UNDECIDED, RankWaits, on_one_clock, rank_waits
from labkit.nsys.trace import TraceError


def test_clocks_are_set_by_the_collectives() -> None:
    arrived = steps()
    waits = rank_waits(exchange(arrived))
    offsets = waits.ranks.set_index("rank")
    for rank, true_us in enumerate(TRUE_OFFSETS_US):
        assert offsets.loc[rank, "low_ns"] <= true_us * 1e3 + 1000
        assert offsets.loc[rank, "high_ns"] >= true_us * 1e3 - 1000
        assert offsets.loc[rank, "offset_ns"] == pytest.approx(true_us * 1e3, abs=600)
        assert offsets.loc[rank, "residual_ns"] <= 600
    assert waits.frame["skew_ns"].to_numpy() == pytest.approx(np.ptp(arrived, axis=1) * 1e3, abs=700)
    assert waits.frame["transfer_ns"].to_numpy() == pytest.approx(TRANSFER_US * 1e3, abs=1500)
    assert (waits.frame["last"] == "1").all()
    assert waits.frame["range"].tolist() == [f"layer.{number}" for number in range(40)]
    waited = (arrived.max(axis=1)[:, None] - arrived).sum(axis=0) * 1e3
    assert waits.ranks["wait_ns"].to_numpy(float) == pytest.approx(waited, abs=40 * 700)
    assert waits.ranks["last"].tolist() == [0, 40, 0]


def test_a_skew_below_the_uncertainty_of_the_clock_is_undecided() -> None:
    waits = rank_waits(exchange(steps(by_us=1.0, spread_us=0.5), jitter_us=4.0))
    assert (waits.frame["last"] == UNDECIDED).mean() > 0.8
    assert waits.ranks["last"].sum() < 8


def test_ranks_of_one_file_keep_their_clock() -> None:
    arrived = steps()
    trace = exchange(arrived, offsets_us=(0.0, 0.0, 0.0))
    waits = rank_waits(replace(trace, source=replace(trace.source, files=("all.sqlite",))))
    assert waits.ranks["offset_ns"].tolist() == [0, 0, 0]
    assert waits.frame["skew_ns"].to_numpy() == pytest.approx(np.ptp(arrived, axis=1) * 1e3, abs=1)


@pytest.mark.parametrize("lost", [(7, 2), (0, 0), (39, 1)])
def test_a_lost_collective_shifts_no_others(lost: tuple[int, int]) -> None:
    """All collectives are alike, but their ends show which one has no partner."""
    arrived = steps()
    waits = rank_waits(exchange(arrived, lost=lost))
    kept = [number for number in range(40) if number != lost[0]]
    assert waits.frame["range"].tolist() == [f"layer.{number}" for number in kept]
    assert waits.frame["skew_ns"].to_numpy() == pytest.approx(np.ptp(arrived[kept], axis=1) * 1e3, abs=1500)
    assert [remark for remark in waits.remarks if "2 of 119 have no partner" in remark]


def test_bandwidth_is_of_the_transfer_alone() -> None:
    """2 MiB in 50 µs are 41.9 GB/s; the bus moves 2 (n - 1) / n of that."""
    waits = rank_waits(exchange(steps(), told=True))
    assert waits.frame["bytes"].tolist() == [2 << 20] * 40
    assert waits.frame["algorithm_gb_s"].median() == pytest.approx((2 << 20) / 50e3, rel=0.05)
    assert (waits.frame["bus_gb_s"] / waits.frame["algorithm_gb_s"]).to_numpy(float) == pytest.approx(4 / 3)
    assert waits.frame["group"].unique().tolist() == ["0"]


def test_clocks_that_no_offset_fits_are_said_to_drift() -> None:
    arrived = steps(count=200)
    trace = exchange(arrived)
    drift = (trace.operations["process"] == 1) * (trace.operations["start_ns"] * 3e-2).astype(np.int64)
    operations = trace.operations.assign(
        start_ns=trace.operations["start_ns"] + drift, end_ns=trace.operations["end_ns"] + drift
    )
    waits = rank_waits(replace(trace, operations=operations.sort_values("start_ns", ignore_index=True)))
    assert any("its clock drifts" in remark for remark in waits.remarks)
    assert (waits.frame["last"] == UNDECIDED).all()


def test_what_does_not_synchronise_has_no_skew() -> None:
    waits = rank_waits(exchange(steps(), name="ncclDevKernel_Broadcast"))
    assert (waits.frame["skew_ns"] == 0).all()
    assert (waits.frame["last"] == "").all()
    assert waits.ranks["offset_ns"].tolist() == [0, 0, 0]
    assert waits.ranks["residual_ns"].isna().tolist() == [False, True, True]


def test_merged_ranks_end_their_collectives_together() -> None:
    trace = exchange(steps())
    merged = on_one_clock(trace)
    ends = merged.operations.groupby("process")["end_ns"].apply(lambda times: np.sort(times.to_numpy()))
    assert np.ptp(np.stack(ends.tolist()), axis=0).max() < 2_000
    assert merged.operations["start_ns"].is_monotonic_increasing
    assert len(merged.ranges) == len(trace.ranges)
    assert any("rank 1's clock was set by 5,000" in line for line in merged.source.skipped)


def test_two_files_of_different_runs_match_nothing() -> None:
    trace = exchange(steps(), offsets_us=(0.0, 0.0), told=True)
    collective = trace.operations["collective"].astype(str)
    other_run = collective.where(trace.operations["process"] == 0, '{"name": "allgather", "group": "5"}')
    with pytest.raises(TraceError, match=r"but none matches one of another rank: two runs\?"):
        rank_waits(replace(trace, operations=trace.operations.assign(collective=other_run.astype("category"))))


def test_ranks_that_share_nothing_are_refused() -> None:
    with pytest.raises(TraceError, match="at least 2 ranks: give the traces of all ranks together"):
        rank_waits(exchange(steps(), offsets_us=(0.0,)))


@pytest.mark.parametrize(
    ("dtype", "size"), [("Half", 2), ("c10::BFloat16", 2), ("long int", 8), ("Float8_e4m3fn", 1), ("what", 0)]
)
def test_types_are_known_by_the_names_of_traces(dtype: str, size: int) -> None:
    assert element_bytes(dtype) == size


def test_a_hundred_ranks_are_compared() -> None:
    arrived = np.tile(10_000 + 200.0 * np.arange(5)[:, None], 100) + np.arange(100) * 0.5
    waits: RankWaits = rank_waits(exchange(arrived, offsets_us=tuple(10.0 * rank for rank in range(100))))
    assert len(waits.ranks) == 100
    assert (waits.frame["ranks"] == 100).all()
