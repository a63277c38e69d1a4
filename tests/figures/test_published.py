"""Published figures are data with a source."""

import pytest

from labkit.published import PAIRS, published, published_speedups


def test_every_figure_names_its_source_and_hardware() -> None:
    frame = published()
    assert len(frame) > 150
    for column in ("source", "reference", "hardware", "model", "metric", "unit"):
        assert frame[column].str.len().gt(0).all(), column


def test_a_missing_value_says_why() -> None:
    frame = published()
    missing = frame[frame["value"].isna()]
    assert len(missing) == 7
    assert set(missing["note"]) == {"out of memory"}


@pytest.mark.parametrize(
    ("table", "method", "precision", "batch", "value"),
    [
        ("gptj6b-generate-128", "hf vanilla", "fp16", 1, 5357.65),
        ("bloom7b1-8xa6000", "ds-inference", "fp16", 8, 2.42),
        ("bloom176b-8xa100", "ds-inference", "fp16", 128, 0.69),
        ("zero-inference-a6000", "zero-inference nvme offload", "fp16", 32, 0.39),
    ],
)
def test_values_are_those_of_the_articles(table: str, method: str, precision: str, batch: int, value: float) -> None:
    frame = published(table)
    row = frame[(frame["method"] == method) & (frame["precision"] == precision) & (frame["batch"] == batch)]
    assert row["value"].iloc[0] == value


def test_the_four_regions_are_complete() -> None:
    assert list(published("deep-fusion")["value"]) == [1.5, 2.9, 3.0, 1.2]


def test_speedups_are_quotients_of_published_latencies() -> None:
    frame = published_speedups()
    assert len(frame) == len(PAIRS)
    assert frame["speedup"].to_list() == pytest.approx((frame["baseline_ms"] / frame["candidate_ms"]).to_list())
    assert frame.loc[0, "speedup"] == pytest.approx(5357.65 / 2413.18)


def test_an_unknown_table_lists_the_known() -> None:
    with pytest.raises(ValueError, match="deep-fusion"):
        published("nonsense")


def test_the_data_cannot_be_changed_through_a_result() -> None:
    changed = published()
    changed["value"] = 0.0
    assert published("deep-fusion")["value"].max() == 3.0
