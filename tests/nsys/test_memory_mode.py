"""The memory mode is judged by the fastest rate seen so far, which is kept on disk."""

import json
from pathlib import Path
from typing import Any

import pytest

from labkit.nsys.doctor import memory_mode as memory_mode_module
from labkit.nsys.doctor.check import Status
from labkit.nsys.doctor.memory_mode import memory_mode
from labkit.system.processor import cpu_name


def fact(*gb_s: float) -> dict[str, Any]:
    return {"threads": 2, "gb_s": list(gb_s)}


def test_the_first_look_has_nothing_to_compare_with(tmp_path: Path) -> None:
    check = memory_mode(fact(40.0, 42.0, 41.0), tmp_path)
    assert check.status == Status.OK
    assert "41 GB/s now (40 to 42); the first check" in check.finding


def test_a_slow_mode_is_told_by_an_earlier_reading(tmp_path: Path) -> None:
    memory_mode(fact(70.0, 75.0, 76.0), tmp_path)
    slow = memory_mode(fact(40.0, 42.0, 41.0), tmp_path)
    assert slow.status == Status.WARN
    assert "54% of the 76 of" in slow.finding
    assert slow.finding.endswith("the slow mode")
    assert slow.repair
    assert memory_mode(fact(70.0, 74.0, 72.0), tmp_path).finding.endswith("the fastest mode seen here")
    assert memory_mode(fact(41.0), tmp_path).finding.endswith("the slow mode")


def test_another_processor_has_a_rate_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory_mode(fact(70.0), tmp_path)
    monkeypatch.setattr(memory_mode_module, "cpu_name", lambda: "another")
    assert "the first check" in memory_mode(fact(40.0), tmp_path).finding
    assert "the fastest mode" in memory_mode(fact(40.0), tmp_path).finding


def test_a_mode_that_changes_meanwhile_is_told(tmp_path: Path) -> None:
    check = memory_mode(fact(70.0, 41.0, 72.0), tmp_path)
    assert check.status == Status.WARN
    assert "changes within seconds" in check.finding


def test_a_damaged_record_is_ignored(tmp_path: Path) -> None:
    file = tmp_path / "memory.json"
    for damaged in ("", "[]", *(json.dumps({cpu_name(): rates}) for rates in (76, [76.0], ["76", "today"]))):
        file.write_text(damaged)
        assert "the first check" in memory_mode(fact(40.0), tmp_path).finding
        assert json.loads(file.read_text())[cpu_name()][0] == 40.0


def test_without_a_folder_every_look_is_the_first(tmp_path: Path) -> None:
    no_folder = tmp_path / "file"
    no_folder.write_text("")
    for _ in range(2):
        assert "the first check" in memory_mode(fact(40.0), no_folder).finding
