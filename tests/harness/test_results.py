"""Records are read back unchanged and appear whole; an error names a line that cannot be read."""

import importlib
import os
import pkgutil
from pathlib import Path

import pytest
from helpers.studies.comparisons import comparison, measurement
from helpers.studies.precision_studies import TRAINED, evaluation
from helpers.studies.precision_studies import study as precision_study
from helpers.studies.streaming_plans import plan
from helpers.studies.streaming_studies import study as streaming_study

from labkit import harness
from labkit.harness import Comparison, load_records, load_results, save
from labkit.harness.frozen_record import FrozenRecord
from labkit.harness.methods.cell import MethodCell
from labkit.harness.results import KINDS, save_lines
from labkit.studies.larger_than_memory import save_study as save_streaming
from labkit.studies.precision_study import save_study as save_precisions
from labkit.system.errors import UserError
from labkit.system.whole_file import write_whole


def test_a_record_comes_back_equal(tmp_path: Path) -> None:
    compared, measured = comparison(), measurement("fused")
    save(compared, tmp_path)
    path = save(measured, tmp_path)
    assert path.suffix == ".jsonl"
    assert set(map(type, load_records(tmp_path))) == {type(compared), type(measured)}
    assert compared in load_records(tmp_path)
    assert load_records(path) == [measured]


def test_every_kind_of_record_can_be_read_back() -> None:
    """Its class is in `AnyRecord`."""
    for module in pkgutil.walk_packages(harness.__path__, "labkit.harness."):
        importlib.import_module(module.name)
    classes, kinds = [FrozenRecord], set()
    while classes:
        record = classes.pop()
        classes += record.__subclasses__()
        kind = record.model_fields.get("kind")
        if record.__module__.startswith("labkit.harness.") and "schema_version" in record.model_fields and kind:
            kinds |= set() if kind.is_required() else {kind.default}
    assert kinds == KINDS


def test_the_frame_has_a_row_per_run(tmp_path: Path) -> None:
    record = comparison(rounds=5)
    save(record, tmp_path)
    frame = load_results(tmp_path)
    assert len(frame) == 10
    fused = frame[frame["role"] == "candidate"]
    assert set(fused["side"]) == {"fused"}
    assert fused["per_token_ms"].median() == pytest.approx(record.candidate.per_token_ms)
    assert fused["floor_share"].median() == pytest.approx(record.candidate.floor_share)
    assert set(frame["origin"]) == {record.case.origin}


def test_records_in_folders_below_are_found_and_hidden_folders_are_not(tmp_path: Path) -> None:
    save(comparison(rounds=5), tmp_path / "monday" / "gpt2")
    (tmp_path / ".capture-1").mkdir()
    (tmp_path / ".capture-1" / "plain.jsonl").write_text("[1, 2]\n")
    assert len(load_results(tmp_path)) == 10


def test_a_folder_without_results_says_so(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    with pytest.raises(ValueError, match="holds no results; expected files of JSON lines"):
        load_results(tmp_path)


def test_methods_and_evaluations_have_rows_and_what_has_none_is_named(tmp_path: Path) -> None:
    side = measurement("fused", rounds=6)
    cells = {"case": side.case, "cycles": 6, "seed": 0, "environment": side.environment}
    records = [
        comparison(rounds=6),
        MethodCell(method="fused-tp2", measured=side, **cells),
        MethodCell(method="hf-eager", oom="needs more", **cells),
        evaluation("int8", 0.01, TRAINED),
        plan(),
    ]
    save_lines(tmp_path / "all.jsonl", records)
    with pytest.warns(UserWarning, match="left out: 1 streaming plan; load_records has them"):
        frame = load_results(tmp_path)
    assert frame.groupby("kind").size().to_dict() == {"evaluation": 1, "method": 1, "run": 18}
    assert list(frame[frame["role"] == "method"]["side"].unique()) == ["fused-tp2", "hf-eager"]
    assert frame["why"].dropna().tolist() == ["needs more"]
    assert frame["kl"].dropna().tolist() == pytest.approx([0.01])
    assert frame[["machine", "model", "dtype"]].notna().all(axis=None)


def test_samples_can_be_joined_by_their_case_and_machine() -> None:
    for frame in (comparison().to_frame(), measurement("fused").to_frame()):
        assert {"model", "dtype", "batch", "prompt_tokens", "new_tokens", "machine"} <= set(frame.columns)


def test_what_holds_thousands_of_samples_has_a_short_repr() -> None:
    """Debuggers and failed assertions print the `repr`."""
    record = comparison(rounds=40, new_tokens=512)
    assert len(repr(record)) < 300
    assert str(record.ratio("per_token")) in repr(record)
    for part in (record.candidate, record.candidate.runs[0], record.case, record.candidate.environment):
        assert len(repr(part)) < 2500
    assert repr(record.case).startswith("Case(model='gpt2'")


def test_the_floor_is_judged_by_the_bandwidth_of_each_run() -> None:
    """At half the bandwidth a run is twice as slow, and its share of the limit stays the same."""
    side = measurement("fused", rounds=1)
    run = side.runs[0]
    slow = run.model_copy(
        update={"bandwidth_gb_s": (30.0, 30.0), "decode_ms": tuple(2 * step for step in run.decode_ms)}
    )
    fast = run.model_copy(update={"bandwidth_gb_s": (60.0, 60.0)})
    assert side.work is not None
    assert slow.floor_share(side.work) == pytest.approx(fast.floor_share(side.work))


def test_without_a_probe_the_share_is_unknown_and_said_to_be() -> None:
    record = comparison(probed=False)
    assert record.candidate.floor_share is None
    assert record.read_bandwidth_gb_s is None
    assert any("share of the physical limit unknown" in remark for remark in record.remarks)


def test_summary_ratios_agree_with_the_figures() -> None:
    figures = comparison().as_dict()
    for metric in ("ttft", "per_token", "end_to_end"):
        quotient = figures["baseline"][f"{metric}_ms"] / figures["candidate"][f"{metric}_ms"]
        assert figures[f"{metric}_ratio"] == pytest.approx(quotient)
        assert figures[f"{metric}_ratio_low"] <= quotient <= figures[f"{metric}_ratio_high"]


def test_few_rounds_are_remarked() -> None:
    assert any("3 rounds" in remark for remark in comparison(rounds=3).remarks)
    assert not any("rounds:" in remark for remark in comparison(rounds=6).remarks)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not a result of schema version 1"),
        ('{"kind": "else"}', "kind"),
        (comparison().model_dump_json().replace('"schema_version":1', '"schema_version":99'), "schema_version"),
        (measurement("fused").model_dump_json().replace('"runs"', '"ruins"'), "measurement.ru"),
    ],
)
def test_a_strange_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    file = tmp_path / "results.jsonl"
    file.write_text(measurement("fused").model_dump_json() + "\n\n" + line + "\n")
    with pytest.raises(ValueError, match=r"results\.jsonl:3 is not a result.*measure again") as error_info:
        load_results(file)
    assert message in str(error_info.value)


def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(source: str, target: Path) -> None:
        raise OSError("disk full")

    target = tmp_path / "record.jsonl"
    target.write_text("before")
    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(OSError, match="disk full"):
        write_whole(target, "after")
    assert [file.name for file in tmp_path.iterdir()] == ["record.jsonl"]
    assert target.read_text() == "before"


def test_the_record_names_no_user_and_no_host() -> None:
    fields = set(Comparison.model_json_schema()["$defs"]["Environment"]["properties"])
    assert not {"host", "hostname", "user", "environ", "node"} & fields


def test_records_inside_of_studies_are_found_with_the_others(tmp_path: Path) -> None:
    of_precisions, of_streaming = precision_study(), streaming_study()
    save_precisions(of_precisions, tmp_path)
    save_streaming(of_streaming, tmp_path)
    (tmp_path / "capture.json").write_text("{}")  # another kind of file
    with pytest.warns(UserWarning, match="left out: 1 streaming plan; load_records has them"):
        frame = load_results(tmp_path)
    sides = frame[frame["role"] == "measurement"]
    assert set(sides["side"]) == {side.measurement.name for side in of_precisions.sides}
    assert list(frame[frame["kind"] == "evaluation"]["dtype"]) == [part.precision for part in of_precisions.sides]
    assert [record for record in load_records(tmp_path) if isinstance(record, Comparison)] == [
        *of_streaming.comparisons
    ]


def test_a_study_without_records_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x-precisions.json").write_text('{"kind": "precision_study", "sides": []}')
    with pytest.raises(UserError, match=r"x-precisions\.json, which holds no records; expected a study"):
        load_records(tmp_path)
