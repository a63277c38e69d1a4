"""An output that cannot be written is refused before anything is read or measured."""

from pathlib import Path

import pytest
from helpers.processes.command_line import Labkit, command_line

FORMS = ("--csv", "--json", "--markdown")
WRITING = (
    *(("trace", "kernels", "none.json", form, "--output") for form in FORMS),
    ("trace", "compare", "none.json", "none.json", "--csv", "--output"),
    ("trace", "replay", "none.json", "--op", "aten::mm", "--output"),
    ("trace", "merge", "none.json", "--output"),
    ("explain", "none.json", "none.json", "--output"),
    ("timeline", "none.json", "--output"),
    ("bench-methods", "no-such-model", "--output"),
    ("bench-methods", "no-such-model", "--page"),
)


@pytest.fixture
def labkit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Labkit:
    """Runs a command line in a folder with a folder "results.json", a file "file" and an empty program."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    Path("results.json").mkdir()
    Path("file").touch()
    Path("program.py").touch()
    return command_line(monkeypatch, capsys)


@pytest.mark.parametrize("arguments", WRITING, ids=" ".join)
def test_a_folder_in_place_of_a_file_is_refused_first(arguments: tuple[str, ...], labkit: Labkit) -> None:
    """The trace and the model do not exist either, which a command finds as soon as it begins its work."""
    code, out, err = labkit(*arguments, "results.json")
    assert (code, out) == (2, "")
    assert "got results.json to write to, which is a folder; name a file in it" in err


@pytest.mark.parametrize("arguments", WRITING, ids=" ".join)
def test_a_file_in_place_of_the_folder_is_refused_first(arguments: tuple[str, ...], labkit: Labkit) -> None:
    for output in ("file/new/results.json", "file/results.json"):
        code, out, err = labkit(*arguments, output)
        assert (code, out) == (2, "")
        assert f"{output}: Not a directory; a part of the path is a file" in err


@pytest.mark.parametrize(
    "arguments",
    [
        ("kernels",),
        ("kernels", "--op", "all_reduce"),
        ("compare", "tiny-gpt2", "--baseline", "hf-eager"),
        ("evaluate", "tiny-gpt2"),
        ("plan-batch", "tiny-gpt2", "--memory-gb", "1"),
        ("run", "05_precision"),
        ("profile", "--source", "torch", "--", "python", "program.py"),
    ],
    ids=" ".join,
)
def test_a_file_in_place_of_a_folder_of_results_is_refused_first(arguments: tuple[str, ...], labkit: Labkit) -> None:
    at = arguments.index("--") if "--" in arguments else len(arguments)
    code, out, err = labkit(*arguments[:at], "--output", "file", *arguments[at:])
    assert (code, out) == (2, "")
    assert "File exists; there is a file of that name" in " ".join(err.split())


def test_several_tables_are_parquet_files_in_a_folder_that_may_exist(labkit: Labkit) -> None:
    _, _, err = labkit("trace", "summary", "none.json", "--parquet", "--output", "results.json")
    assert "got none.json, which does not exist" in err
