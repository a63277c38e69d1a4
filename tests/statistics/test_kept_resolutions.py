"""Measured resolutions are kept by machine, number of threads and size of the model; damaged files are made anew."""

import json
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from labkit.statistics import kept_records
from labkit.statistics.kept_records import Machine
from labkit.statistics.kept_resolutions import (
    KEPT,
    KeptResolution,
    check_can_keep,
    keep_resolution,
    kept_resolutions,
    resolution_for,
    size_class,
)


def kept(**changes: Any) -> KeptResolution:
    fields: dict[str, Any] = {
        "machine": Machine.here(), "threads": 2, "model": "gpt2", "dtype": "bfloat16", "weight_mb": 249.0,
        "scatter": 0.02, "bias": 0.0, "epoch_s": 3.0, "epochs": 20, "measured": date(2026, 11, 27),
    }  # fmt: skip
    return KeptResolution(**(fields | changes))


def test_a_resolution_comes_back_as_it_was_kept(tmp_path: Path) -> None:
    assert kept_resolutions(tmp_path) == []
    keep_resolution(kept(), tmp_path / "new")
    assert kept_resolutions(tmp_path / "new") == [kept()]
    assert resolution_for(249.0, 2, tmp_path / "new") == kept().resolution
    assert [path.name for path in (tmp_path / "new").iterdir()] == [KEPT]


def test_a_new_measurement_replaces_the_one_of_its_size_and_threads(tmp_path: Path) -> None:
    for resolution in (kept(), kept(weight_mb=5000.0), kept(threads=1), kept(scatter=0.01, weight_mb=498.0)):
        keep_resolution(resolution, tmp_path)
    known = kept_resolutions(tmp_path)
    assert [(one.weight_mb, one.threads) for one in known] == [(249.0, 1), (498.0, 2), (5000.0, 2)]
    assert resolution_for(249.0, 2, tmp_path) == kept(scatter=0.01).resolution


@pytest.mark.parametrize(("weight_mb", "threads"), [(100.0, 2), (600.0, 2), (249.0, 1)])
def test_another_size_or_number_of_threads_has_none(weight_mb: float, threads: int, tmp_path: Path) -> None:
    keep_resolution(kept(), tmp_path)
    assert resolution_for(weight_mb, threads, tmp_path) is None
    assert resolution_for(130.0, 2, tmp_path) is not None


def test_sizes_are_classed_by_powers_of_4() -> None:
    assert [size_class(size) for size in (130, 249, 498, 510)] == [4] * 4
    assert (size_class(120), size_class(520), size_class(0.5)) == (3, 5, 0)


@pytest.mark.parametrize("change", [{"cpu": "another"}, {"cores": 96}, {"memory_gb": 3000.0}])
def test_another_machine_has_figures_of_its_own(
    change: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = Machine.here(), Machine.here().model_copy(update=change)
    keep_resolution(kept(), tmp_path)
    monkeypatch.setattr(Machine, "here", lambda: there)
    assert kept_resolutions(tmp_path) == []
    keep_resolution(kept(machine=there, scatter=0.05), tmp_path)
    assert kept_resolutions(tmp_path) == [kept(machine=there, scatter=0.05)]
    monkeypatch.setattr(Machine, "here", lambda: here)
    assert kept_resolutions(tmp_path) == [kept()]


def test_a_little_less_memory_is_the_same_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = kept()
    keep_resolution(original, tmp_path)
    less = Machine.here().model_copy(update={"memory_gb": 0.99 * Machine.here().memory_gb})
    monkeypatch.setattr(Machine, "here", lambda: less)
    assert kept_resolutions(tmp_path) == [original]


ENTRY = kept().model_dump(mode="json")


@pytest.mark.parametrize(
    "content",
    [
        "",
        "\x00" * 50,
        "[" * 1000,
        "[]",
        "7",
        '{"schema": 1}',
        '{"schema": 1, "resolutions": {}}',
        json.dumps({"schema": 2, "resolutions": [ENTRY]}),
        json.dumps({"schema": 1, "resolutions": [None, 3, {}, ENTRY | {"extra": 1}, ENTRY | {"scatter": -1}]}),
        json.dumps({"schema": 1, "resolutions": [ENTRY | {"weight_mb": 0}, ENTRY | {"bias": 1e300}]}),
        json.dumps({"schema": 1, "resolutions": [ENTRY | {"epoch_s": float("nan")}, ENTRY | {"measured": "soon"}]}),
        json.dumps({"schema": 1, "resolutions": [ENTRY | {"epoch_s": 0.0}, ENTRY | {"machine": "mine"}]}),
    ],
)
def test_a_damaged_file_is_made_anew(content: str, tmp_path: Path) -> None:
    (tmp_path / KEPT).write_text(content)
    assert kept_resolutions(tmp_path) == []
    keep_resolution(kept(), tmp_path)
    assert kept_resolutions(tmp_path) == [kept()]


def test_a_damaged_entry_does_not_hide_the_others(tmp_path: Path) -> None:
    entries = [ENTRY | {"scatter": None}, ENTRY]
    (tmp_path / KEPT).write_text(json.dumps({"schema": 1, "resolutions": entries}))
    assert kept_resolutions(tmp_path) == [kept()]


def test_a_folder_that_is_none_is_told_before_the_measurement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="Not a directory"):
        check_can_keep(tmp_path / "file")
    assert kept_resolutions(tmp_path / "file") == []
    monkeypatch.setattr(kept_records, "cache_root", lambda: None)
    with pytest.raises(ValueError, match=r"got no home folder.*LABKIT_CACHE"):
        check_can_keep()
    assert kept_resolutions() == []


def test_it_is_said_in_one_line_without_control_characters() -> None:
    assert str(kept(model="gpt2\x1b[2J")) == (
        "0.9% apart in 60 s, for models around 249 MB (gpt2\\x1b[2J bfloat16) on 2 threads, 2026-11-27"
    )
    assert kept().as_dict()["difference"] == pytest.approx(0.0094, abs=1e-4)
