"""`labkit bench-methods`: tables in the terminal and on a page, or one JSON object, and refused requests."""

import json
from pathlib import Path

import pytest
from helpers.processes.command_line import Labkit, command_line
from rich.console import Console

from labkit.cli import methods as methods_cli
from labkit.harness import load_records

SMALL = ("bench-methods", "tiny-gpt2", "--methods", "llama.cpp", "--batch", "2,4", "--prompt", "9", "--new", "4")


@pytest.fixture
def labkit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Labkit:
    """Runs a command line in the test's folder, where no peer is installed: (exit code, stdout, stderr)."""
    monkeypatch.setattr(methods_cli, "out", Console(width=120))
    monkeypatch.setenv("LABKIT_LLAMA_CPP_PYTHON", str(tmp_path / "none"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    monkeypatch.chdir(tmp_path)
    return command_line(monkeypatch, capsys)


def test_refused_cells_are_reported_next_to_the_published_table(labkit: Labkit, tmp_path: Path) -> None:
    code, out, _ = labkit(*SMALL, "--page", "page.md")
    assert code == 0
    assert "llama.cpp, batch 2, 4: " in out
    assert "published, not measured here" in out
    assert [record.kind for record in load_records(tmp_path / "runs" / "methods.jsonl")] == ["method_cell"] * 2
    assert "## ms a token: tiny-gpt2, float32, 9 + 4 tokens" in (tmp_path / "page.md").read_text()


def test_json_is_one_object_with_a_cell_for_each_batch(labkit: Labkit) -> None:
    code, out, _ = labkit(*SMALL, "--json", "--output", "cells.jsonl")
    assert code == 0
    assert [cell["outcome"] for cell in json.loads(out.splitlines()[-1])["cells"]] == ["refused", "refused"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--batch", "1,two"), "got --batch 'two', expected numbers"),
        (("--batch", ","), "expected at least one of each"),
        (("--methods", "lama.cpp"), "did you mean"),
        (("--memory-gb", "0"), "got memory_gb = 0"),
        (("--page", "cells.jsonl", "--output", "./cells.jsonl"), "as --page and as --output; name two files"),
        (("--page", "/dev/null/page.md"), "/dev/null/page.md: Not a directory"),
    ],
)
def test_what_cannot_be_measured_is_one_line(arguments: tuple[str, ...], message: str, labkit: Labkit) -> None:
    code, out, err = labkit(*SMALL, *arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert len(err.strip().splitlines()) == 1
