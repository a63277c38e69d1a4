"""The kept rate of a machine's memory: the highest one, by machine and number of threads."""

from pathlib import Path

import pytest
import torch

from labkit.harness import kept_rate, roofline
from labkit.harness.kept_rate import KEPT, keep_rate, kept_rate_gb_s
from labkit.statistics.kept_records import Machine


def test_the_highest_rate_of_each_number_of_threads_is_kept(tmp_path: Path) -> None:
    assert kept_rate_gb_s(2, tmp_path) is None
    for threads, rate in ((2, 30.0), (2, 60.0), (2, 36.0), (1, 20.0)):
        keep_rate(rate, threads, tmp_path)
    assert [kept_rate_gb_s(threads, tmp_path) for threads in (1, 2, 3)] == [20.0, 60.0, None]


def test_another_machine_has_a_rate_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep_rate(60.0, 2, tmp_path)
    with monkeypatch.context() as patch:
        other = Machine(cpu="another", cores=2, memory_gb=1.0)
        patch.setattr(kept_rate.Machine, "here", classmethod(lambda cls: other))
        assert kept_rate_gb_s(2, tmp_path) is None
        keep_rate(10.0, 2, tmp_path)
        assert kept_rate_gb_s(2, tmp_path) == 10.0
    assert kept_rate_gb_s(2, tmp_path) == 60.0


@pytest.mark.parametrize(
    "content",
    ["", "[]", "null", '{"schema": 2}', '{"schema": 1, "rates": [3, {"threads": 2}]}', '{"schema": 1, "rates": {}}'],
)
def test_a_damaged_file_is_made_anew(content: str, tmp_path: Path) -> None:
    (tmp_path / KEPT).write_text(content)
    assert kept_rate_gb_s(2, tmp_path) is None
    keep_rate(60.0, 2, tmp_path)
    assert kept_rate_gb_s(2, tmp_path) == 60.0


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / KEPT).mkdir()
    keep_rate(60.0, 2, tmp_path)
    assert kept_rate_gb_s(2, tmp_path) is None


def test_a_probe_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[tuple[float, int]] = []
    monkeypatch.setattr(roofline, "keep_rate", lambda rate, threads: kept.append((rate, threads)))
    threads = torch.get_num_threads()
    rate = roofline.probe_bandwidth(threads)
    turns = [roofline.probe_turn(threads) for _ in range(3)]
    rates = sorted(rate for rate in roofline.rates_of_epoch(turns, threads) if rate is not None)
    assert kept == [(rate, threads), (rates[1], threads)]
