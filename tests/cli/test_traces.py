"""`labkit trace`: tables that fit the terminal, files for programs, and messages about bad requests."""

import csv
import io
import json
from pathlib import Path

import pandas as pd
import pytest
from helpers.processes.command_line import Labkit, command_line
from helpers.sweeps import swept
from helpers.traces.handmade import Recorder

from labkit.cli import showing
from labkit.nsys.timeline.export import write_chrome

COMMANDS = ("summary", "kernels", "ranges", "copies", "calls", "gaps", "projection")
HOSTILE = '=HYPERLINK("http://example.com")|<b>[red]'
WIDTH = 80


@pytest.fixture
def labkit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Labkit:
    """Runs a command line in the test's folder: (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    for console in (showing.out, showing.err):
        monkeypatch.setattr(console, "_width", WIDTH)
    return command_line(monkeypatch, capsys)


@pytest.fixture
def recorded(tmp_path: Path) -> str:
    """A trace without stages: kernels with long and hostile names, a copy, a gap."""
    recorder = Recorder()
    recorder.range("forward " * 30, 0, 400, domain="")
    for index in range(30):
        recorder.kernel(
            10 * index, 10 * index + 5, 10 * index + 9, name=f"void at::native::kernel_{index}<{'T, ' * 40}>"
        )
    recorder.kernel(350, 355, 360, name=HOSTILE)
    recorder.kernel(370, 380, 390, name="HtoD")
    recorder.operations[-1] |= {"kind": "memcpy", "bytes": 4096, "memory": "Pageable -> Device"}
    return str(write_chrome(recorder.trace(), tmp_path / "made.json"))


@pytest.mark.parametrize("command", COMMANDS)
def test_tables_fit_the_terminal(command: str, labkit: Labkit, recorded: str) -> None:
    code, output, errors = labkit("trace", command, recorded)
    assert code == 0, errors
    assert max(map(len, output.splitlines())) <= WIDTH
    assert not {"nan", "None", "<NA>", "_ns"} & set(output.replace("┃", " ").replace("│", " ").split())


def test_programs_get_all_columns_and_rows(labkit: Labkit, recorded: str, tmp_path: Path) -> None:
    _, output, _ = labkit("trace", "kernels", recorded, "--json")
    document = json.loads(output)
    names = {row["name"] for row in document["kernels"]}
    assert len(names) == 31
    assert HOSTILE in names
    assert document["files"] == ["made.json"]
    assert document["skipped"] == []
    _, output, _ = labkit("trace", "kernels", recorded, "--csv")
    rows = list(csv.DictReader(io.StringIO(output)))
    # The quote keeps a spreadsheet from following the link.
    assert {row["name"] for row in rows} == names - {HOSTILE} | {f"'{HOSTILE}"}
    assert [int(row["total_ns"]) for row in rows] == [row["total_ns"] for row in document["kernels"]]
    labkit("trace", "kernels", recorded, "--parquet", "-o", "kernels.parquet")
    read = pd.read_parquet(tmp_path / "kernels.parquet")
    assert read["total_ns"].tolist() == [row["total_ns"] for row in document["kernels"]]
    _, output, _ = labkit("trace", "summary", recorded, "--json")
    assert {"contents", "budget", "idle", "kernels", "remarks", "unread"} <= json.loads(output).keys()
    assert labkit("trace", "summary", recorded, "--parquet", "-o", "tables")[0] == 0
    assert (tmp_path / "tables" / "budget.parquet").exists()


def test_markdown_escapes_what_it_would_take_for_its_own(labkit: Labkit, recorded: str) -> None:
    _, output, _ = labkit("trace", "kernels", recorded, "--markdown", "--name", "HYPER")
    title, _, head, line, row = output.strip().splitlines()
    assert title == "### Kernels"
    assert row.startswith(r'| =HYPERLINK("http://example.com")\|\<b>[red] | 1 | ')
    assert head.count("|") == line.count("|") == row.replace("\\|", "").count("|")


def test_rows_are_filtered_sorted_and_cut_to_the_top(labkit: Labkit, recorded: str) -> None:
    _, output, _ = labkit("trace", "gaps", recorded, "--json", "--window", "0.3:", "--sort", "start", "--ascending")
    starts = [row["start_ns"] for row in json.loads(output)["gaps"]]
    assert starts == sorted(starts)
    assert min(starts) >= 300_000
    _, output, errors = labkit("trace", "kernels", recorded, "--top", "3")
    assert output.count("% │") == 3
    assert "3 of 31 rows; --top 0 shows all" in errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--json", "--csv"), "got --json and --csv; give one of them"),
        (("--parquet",), "got --parquet without --output"),
        (("-o", "x"), "got --output x without a form"),
        (("--window", "3"), "got the window '3', expected FROM:TO in ms"),
        (("--window", "5:1"), "got a window from 5 ms to 1 ms"),
        (("--window", "5:9"), "in which no GPU operation runs; expected a window within 0.005 to 0.360 ms"),
        (("--name", "kernel_99"), "got the name 'kernel_99'"),
        (("--sort", "totl"), "got --sort totl (did you mean 'total'"),
        (("--rank", "4"), "got rank 4, which has no GPU operations; expected one of 0"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_request_that_cannot_be_served_says_what_was_expected(
    arguments: tuple[str, ...], message: str, labkit: Labkit, recorded: str
) -> None:
    code, output, errors = labkit("trace", "kernels", recorded, *arguments)
    assert (code, output) == (2, "")
    assert message in errors.replace("\n", " ")


@pytest.mark.parametrize("command", ["summary", "operators"])
def test_each_of_several_tables_is_sorted_that_has_the_column(
    command: str, labkit: Labkit, recorded: str, tmp_path: Path
) -> None:
    recorder = Recorder()
    for index, length in enumerate((5, 20, 10)):
        recorder.operator(f"aten::op{index}", 50 * index, 50 * index + 10)
        recorder.kernel(50 * index + 5, 50 * index + 12, 50 * index + 12 + length, name=f"kernel{index}")
    path = str(write_chrome(recorder.trace(), tmp_path / "three.json"))
    _, output, _ = labkit("trace", command, path, "--sort", "total", "--ascending", "--json")
    tables = json.loads(output)
    table = tables["kernels" if command == "summary" else "operators"]
    assert [row["total_ns"] for row in table] == [5_000, 10_000, 20_000]
    code, _, errors = labkit("trace", command, path, "--sort", "totl")
    assert code == 2
    assert "total" in errors
    assert "labkit trace contents" not in errors
    code, _, errors = labkit("trace", command, path, "--sort", "bogus")
    assert "got --sort bogus, expected a column; the tables and their columns are:" in errors
    listed = dict(line.strip().split(": ") for line in errors.splitlines()[1:])
    assert list(listed) == [name for name in tables if isinstance(tables[name], list) and name in listed]
    assert "total_ns" in listed["kernels" if command == "summary" else "operators"].split(", ")


CODES = "\x1b[2J\x1b]0;title\x07\u202egemm\x9b31m\r\n"


@pytest.mark.parametrize(
    "form", swept({"tables": (), "markdown": ("--markdown",), "a name": ("--name", "gone" + CODES)}, ["tables"])
)
def test_nothing_that_strangers_wrote_reaches_the_terminal_as_a_command(
    form: tuple[str, ...], labkit: Labkit, tmp_path: Path
) -> None:
    recorder = Recorder()
    recorder.range(CODES, 0, 200, domain="")
    for index in range(3):
        recorder.operator(CODES, 50 * index, 50 * index + 40)
        recorder.kernel(50 * index + 5, 50 * index + 12, 50 * index + 22, name=CODES)
    path = write_chrome(recorder.trace(), tmp_path / "evil.json")
    text = path.read_text().replace('"cat": "cpu_op"', json.dumps({"cat": CODES})[1:-1], 1)
    path.write_text(text)
    for command in (*COMMANDS, "operators", "short", "cuda_gpu_kern_sum"):
        _, output, errors = labkit("trace", command, str(path), *form)
        assert not set(output + errors) & set("\x1b\x07\x9b\u202e\r"), command
    _, output, _ = labkit("trace", "kernels", str(path), "--json")
    assert json.loads(output)["kernels"][0]["name"] == CODES


def test_processes_of_no_known_rank_are_called_processes(labkit: Labkit, tmp_path: Path) -> None:
    recorder = Recorder()
    for process in range(2):
        recorder.kernel(0, 5, 50, process=process, device=1 - process)
        recorder.kernel(500, 505, 550, process=process, device=1 - process)
    for known, word in (((-1, -1), "process"), ((0, 1), "rank")):
        path = write_chrome(recorder.trace(ranks=known), tmp_path / f"{word}.json")
        _, output, _ = labkit("trace", "summary", str(path))
        assert word in output
        assert {"rank": "process", "process": "rank"}[word] not in output


def test_ranges_of_a_chrome_trace_are_not_called_nvtx(labkit: Labkit, recorded: str) -> None:
    for command in ("summary", "ranges", "projection"):
        _, output, errors = labkit("trace", command, recorded)
        assert "anges" in output
        assert "NVTX" not in output + errors


def test_windows_in_which_less_was_done_are_compared_by_one_step(labkit: Labkit, tmp_path: Path) -> None:
    paths = []
    for pace in (40, 50):
        recorder = Recorder()
        for step in range(50):
            recorder.range(f"ProfilerStep#{step}", pace * step, pace * step + 30, domain="")
            recorder.kernel(pace * step, pace * step + 5, pace * step + 15, name="gemm")
        paths.append(str(write_chrome(recorder.trace(), tmp_path / f"{pace}.json")))
    code, output, errors = labkit("trace", "compare", *paths, "--window", "0:1")
    assert code == 0, errors
    assert "1.000 of A" not in output
    assert "25 of 'ProfilerStep', each 0.0" in output
    assert "of A for one of them" in output
    assert "A has 25 and B 20 of 'ProfilerStep'" in errors
    _, output, _ = labkit("trace", "compare", *paths, "--window", "0:1", "--json")
    document = json.loads(output)
    assert document["units"] == {"name": "ProfilerStep", "a": 25.0, "b": 20.0}
    assert document["ratio"] == pytest.approx(1.25, rel=0.03)


@pytest.mark.parametrize(
    "words",
    [
        ("trace", "kernels", "made.json", "--csv"),
        ("trace", "kernels", "made.json", "--parquet"),
        ("trace", "compare", "made.json", "other.json", "--json"),
        ("trace", "compare", "other.json", "made.json", "--json"),
        ("trace", "replay", "made.json", "--op", "mm"),
        ("trace", "merge", "made.json", "other.json"),
        ("timeline", "made.json"),
        ("explain", "made.json", "other.json"),
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("output", ["made.json", "link.json"])
def test_no_command_replaces_what_it_reads(
    words: tuple[str, ...], output: str, labkit: Labkit, recorded: str, tmp_path: Path
) -> None:
    before = Path(recorded).read_bytes()
    (tmp_path / "link.json").symlink_to("made.json")
    (tmp_path / "other.json").write_text("{}")
    code, _, errors = labkit(*words, "--output", output)
    assert code == 2
    assert "is the input made.json; name another file" in errors
    assert Path(recorded).read_bytes() == before


def test_a_table_goes_to_a_device_as_to_a_file(labkit: Labkit, recorded: str) -> None:
    assert labkit("trace", "kernels", recorded, "--csv", "--output", "/dev/null")[0] == 0
    assert Path("/dev/null").is_char_device()
