"""Each command that opens a file refuses a pipe without a writer in one line, and does not wait for it."""

import os
from pathlib import Path

import pytest
from helpers.processes.command_line import Labkit, command_line

from labkit.system import input_file

SMALL = ("--tokens", "32", "--window", "16", "--threads", "1")


@pytest.fixture
def labkit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Labkit:
    """Runs a command line in a folder that has pipes without a writer."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(input_file, "WRITER_S", 0.2)
    monkeypatch.chdir(tmp_path)
    for name in ("pipe", "pipe.ipynb", "results/pipe.jsonl", "studies/pipe-precisions.json", "model/config.json"):
        Path(name).parent.mkdir(exist_ok=True)
        os.mkfifo(name)
    return command_line(monkeypatch, capsys)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "arguments",
    [
        ("trace", "summary", "pipe"),
        ("trace", "compare", "pipe", "pipe"),
        ("trace", "merge", "pipe"),
        ("timeline", "pipe", "--output", "page.json"),
        ("stages", "pipe"),
        ("explain", "pipe", "pipe"),
        ("diff", "pipe", "pipe"),
        ("diff", "results", "results"),
        ("diff", "studies", "studies"),
        ("run", "pipe.ipynb"),
        ("run", "pipe"),
        ("evaluate", "tiny-gpt2", "--text", "pipe", *SMALL),
        ("generate", "model", "--prompt", "a"),
        ("generate", "pipe", "--prompt", "a"),
    ],
    ids=" ".join,
)
def test_a_pipe_without_a_writer_is_refused_in_one_line(arguments: tuple[str, ...], labkit: Labkit) -> None:
    code, out, err = labkit(*arguments)
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1
    if arguments[0] != "generate":
        assert "pipe" in err
        assert "a file" in err
