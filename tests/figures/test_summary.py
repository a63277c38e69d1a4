"""Headline, table and notes agree with the record."""

import pytest
from helpers.studies.comparisons import comparison

from labkit.figures import headline, notes, summary_table
from labkit.studies.frames import number


def test_a_speedup_is_never_written_without_interval_baseline_and_shares() -> None:
    record = comparison()
    line = headline(record)
    ratio = record.ratio("per_token")
    for part in (f"[{ratio.low:.2f}, {ratio.high:.2f}]", "hf-eager", f"{record.candidate.floor_share:.0%}"):
        assert part in line


def test_the_table_has_both_sides_and_the_ratio() -> None:
    record = comparison()
    table = summary_table(record)
    assert list(table.columns)[:2] == ["hf-eager", "fused"]
    assert table.loc["per token, ms", "fused"] == number(record.candidate.per_token_ms, 4)
    assert table.loc["per token, ms"].iloc[2] == str(record.ratio("per_token"))


def test_what_is_unknown_is_called_unknown() -> None:
    record = comparison(probed=False, stages=False)
    assert set(summary_table(record).loc["share of the limit"].iloc[:2]) == {"unknown"}
    assert "unknown" in notes(record)


def test_different_tokens_are_reported() -> None:
    record = comparison().model_copy(update={"tokens_equal": False, "first_difference": 7})
    assert "differ from new token 7" in notes(record)


def test_the_records_remarks_are_passed_on() -> None:
    record = comparison(rounds=3)
    assert all(remark in notes(record) for remark in record.remarks)


@pytest.mark.parametrize(
    ("value", "digits", "text"),
    [
        (0, 3, "0"),
        (0.04119, 3, "0.0412"),
        (3.14159, 3, "3.14"),
        (12345.6, 3, "12,346"),
        (99.96, 3, "100.0"),
        (-2.5, 2, "-2.5"),
    ],
)
def test_numbers_have_no_exponent(value: float, digits: int, text: str) -> None:
    assert number(value, digits) == text
