"""Exact output of the commands that work on captures."""

from datetime import UTC, datetime
from pathlib import Path

import pytest
from helpers.processes.command_line import Labkit, command_line
from helpers.traces.handmade import Recorder

from labkit.cli import trace as trace_cli
from labkit.nsys.capture import profile as capture
from labkit.nsys.capture.record import CaptureRecord
from labkit.nsys.capture.result import CaptureInterrupted
from labkit.nsys.timeline.export import write_chrome

FOLDER = "runs [/old] [bold]"  # rich would read both as markup


@pytest.fixture
def labkit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Labkit:
    """Runs a command line in the test's folder: (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    for console in (trace_cli.out, trace_cli.err):
        monkeypatch.setattr(console, "_width", 200)
    return command_line(monkeypatch, capsys)


@pytest.fixture
def recorded(tmp_path: Path) -> str:
    """A capture of one step on a CPU."""
    recorder = Recorder()
    recorder.range("decode/step", 0, 100)
    recorder.range("decode/layer.0/qkv", 10, 60)
    return str(write_chrome(recorder.trace(), tmp_path / FOLDER / "[red]capture.json"))


def with_record(recorded: str, name: str, suffix: str) -> tuple[Path, Path]:
    """The capture under another name, and its record next to it."""
    capture = Path(recorded).rename(Path(recorded).with_name(name + suffix))
    record = CaptureRecord(
        created=datetime.now(UTC), files=(capture.name,), command=("x",), case={}, window=None,
        profiler="torch.profiler", exit_code=0, seconds=9.0, tax=None, environment=None, taken_cores=1.5,
    )  # fmt: skip
    record_file = capture.with_name(f"{name.removesuffix('-r1')}.json")
    record_file.write_text(record.model_dump_json())
    return capture, record_file


def test_a_path_is_printed_as_it_is(labkit: Labkit, recorded: str) -> None:
    for target in (f"{FOLDER}/x.html", f"{FOLDER}/x.json.gz"):
        assert labkit("timeline", recorded, "--output", target) == (0, f"{target}\n", "")
    code, output, _ = labkit("explain", recorded, recorded, "--output", f"{FOLDER}/y.html")
    assert (code, output.splitlines()[-1]) == (0, f"{FOLDER}/y.html")


@pytest.mark.parametrize("suffix", [".json", ".json.gz"])
def test_the_title_of_a_timeline_is_the_name_without_the_ending_of_a_trace(
    labkit: Labkit, recorded: str, tmp_path: Path, suffix: str
) -> None:
    """Other dots belong to the name. Traces of one name are told apart by their paths."""
    name, page = f"model-1.5B.v2{suffix}", tmp_path / "page.html"
    for folder in ("one", "other"):
        code, _, _ = labkit("timeline", recorded, "--output", f"{folder}/{name}")
        assert code == 0
    assert labkit("timeline", f"one/{name}", "--output", str(page))[0] == 0
    assert "<title>Timeline: model-1.5B.v2</title>" in page.read_text()
    assert labkit("timeline", f"one/{name}", f"other/{name}", "--output", str(page))[0] == 0
    assert f"<title>Timeline: one/{name} above other/{name}</title>" in page.read_text()


def test_a_path_is_quoted_as_it_is(labkit: Labkit, recorded: str) -> None:
    code, output, _ = labkit("stages", recorded)
    assert code == 0
    assert "qkv" in output
    code, _, errors = labkit("stages", f"{FOLDER}/[bold]none.json")
    assert code == 2
    assert f"{FOLDER}/[bold]none.json, which does not exist" in errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--steps", "2", "--output", "x.json.gz"),
            "got --steps for x.json.gz, which holds all of a trace",
        ),
        (("again.json", "--output", "x.json"), "got 2 traces for x.json, which holds one; name one, or join ranks"),
        (("--output", "x.png"), "got --output x.png, expected a name that ends in .html"),
    ],
    ids=" ".join,
)
def test_what_a_timeline_cannot_use_is_refused(
    arguments: tuple[str, ...], message: str, labkit: Labkit, recorded: str
) -> None:
    code, output, errors = labkit("timeline", recorded, *arguments)
    assert (code, output) == (2, "")
    assert message in errors


def test_what_an_interrupted_capture_kept_is_named(
    labkit: Labkit, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Kept:
        files = (Path(FOLDER, "run.sqlite"),)

    def interrupted(*_: object, **__: object) -> None:
        raise CaptureInterrupted(Kept())  # type: ignore[arg-type]

    monkeypatch.setattr(capture, "profile", interrupted)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    code, _, errors = labkit("profile", "--output", FOLDER, "--", "python", "x.py")
    assert code == 130
    assert f"interrupted; kept: {FOLDER}/run.sqlite" in errors


def test_captures_of_a_busy_machine_are_named(labkit: Labkit, recorded: str) -> None:
    capture, _ = with_record(recorded, "[red]busy", ".json.gz")
    for arguments in (("explain", str(capture), str(capture)), ("stages", str(capture))):
        code, _, errors = labkit(*arguments)
        assert code == 0
        assert "note: [red]busy.json.gz: not trustworthy: other programs used 1.5 of the processors" in errors


@pytest.mark.parametrize(("name", "suffix"), [("x", ".sqlite"), ("x-r1", ".json.gz")])
def test_the_record_next_to_a_capture_is_not_replaced(name: str, suffix: str, labkit: Labkit, recorded: str) -> None:
    capture, record = with_record(recorded, name, suffix)
    (link := Path("link.json")).symlink_to(record)
    text = record.read_text()
    for output in (record, link):
        for arguments in (
            ("timeline", str(capture)),
            ("explain", str(capture), str(capture)),
            ("trace", "kernels", str(capture), "--csv"),
            ("trace", "compare", str(capture), "other.json", "--json"),
            ("trace", "replay", str(capture), "--op", "aten::mm"),
            ("trace", "merge", "other.json", str(capture)),
        ):
            code, printed, errors = labkit(*arguments, "--output", str(output))
            assert (code, printed) == (2, "")
            assert f"got --output {output}, which is the record of {capture}, {record}; name another" in errors
    assert record.read_text() == text


def test_a_file_with_the_name_of_a_record_that_is_none_is_replaced(labkit: Labkit, recorded: str) -> None:
    capture, other = with_record(recorded, "x", ".json.gz")
    other.write_text("{}")
    assert labkit("timeline", str(capture), "--output", str(other))[0] == 0
    assert len(other.read_text()) > 2
