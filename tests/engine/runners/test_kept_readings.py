"""The ways to read weights that earlier processes chose."""

from pathlib import Path

import pytest
from helpers.models.engines import fused, prompt, vanilla

import labkit
from labkit.engine.runners import kept_readings
from labkit.engine.runners.kept_readings import KEPT, KeptReadings
from labkit.engine.runners.one_call import OneCallRunner
from labkit.engine.runners.reading_choice import MOST_ROUNDS
from labkit.kernels.reading import READINGS
from labkit.statistics import kept_records
from labkit.statistics.kept_records import Machine


def kept(folder: Path, kernels: str = "kernels-float32", matrices: str = "2 layers") -> KeptReadings:
    return KeptReadings(kernels, matrices, folder)


def test_each_kind_of_steps_has_a_way_of_its_own(tmp_path: Path) -> None:
    assert kept(tmp_path).way(2, 1) is None
    for threads, rows, way in ((2, 1, 3), (1, 1, 0), (2, 8, 1), (2, 1, 4)):
        kept(tmp_path).keep(threads, rows, way)
    assert [kept(tmp_path).way(threads, rows) for threads, rows in ((2, 1), (1, 1), (2, 8), (1, 8))] == [4, 0, 1, None]
    assert kept(tmp_path, kernels="others").way(2, 1) is None
    assert kept(tmp_path, matrices="3 layers").way(2, 1) is None


def test_another_machine_has_a_way_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept(tmp_path).keep(2, 1, 3)
    with monkeypatch.context() as patch:
        other = Machine(cpu="another", cores=2, memory_gb=1.0)
        patch.setattr(kept_readings.Machine, "here", classmethod(lambda cls: other))
        assert kept(tmp_path).way(2, 1) is None
        kept(tmp_path).keep(2, 1, 0)
    assert kept(tmp_path).way(2, 1) == 3


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "null",
        '{"schema": 2}',
        '{"schema": 1, "readings": [3, {"threads": 2}]}',
        '{"schema": 1, "readings": {}}',
    ],
)
def test_a_damaged_file_is_made_anew(content: str, tmp_path: Path) -> None:
    (tmp_path / KEPT).write_text(content)
    assert kept(tmp_path).way(2, 1) is None
    kept(tmp_path).keep(2, 1, 3)
    assert kept(tmp_path).way(2, 1) == 3


def test_a_way_that_this_version_does_not_have_counts_as_none(tmp_path: Path) -> None:
    kept(tmp_path).keep(2, 1, 3)
    text = (tmp_path / KEPT).read_text()
    (tmp_path / KEPT).write_text(text.replace(READINGS[3], "l3-9k"))
    assert kept(tmp_path).way(2, 1) is None


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / KEPT).mkdir()
    kept(tmp_path).keep(2, 1, 3)
    assert kept(tmp_path).way(2, 1) is None


def test_the_oldest_records_leave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_records, "MOST", 2)
    for rows in (1, 2, 3):
        kept(tmp_path).keep(2, rows, rows)
    assert [kept(tmp_path).way(2, rows) for rows in (1, 2, 3)] == [None, 2, 3]


def test_the_next_engine_begins_with_the_kept_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But not an engine with other weights."""
    monkeypatch.setattr(kept_records, "cache_root", lambda: tmp_path)
    monkeypatch.delenv("LABKIT_READ", raising=False)

    engine = labkit.init_inference(vanilla("llama"))

    def first_choice(family: str) -> tuple[bool, str]:
        runner = OneCallRunner(fused(family).fused.runner.layer_range)  # type: ignore[union-attr]
        choice = runner.readings.of(1, 1)
        return choice.compares, READINGS[choice.chosen]

    assert first_choice("llama")[0]
    steps = len(READINGS) * MOST_ROUNDS  # of the longest race
    while steps > 0 and not (tmp_path / KEPT).exists():
        engine.generate(prompt(1, 4), max_new_tokens=40, do_sample=False, eos_token_id=None)
        steps -= 39
    assert first_choice("llama") == (False, engine.reading)
    assert first_choice("gpt2")[0]
