"""`~` at the beginning of a path is the home folder, in every function and command that takes a path."""

import ast
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import plotly.graph_objects as go
import pytest
from helpers.house.source_tree import ROOT, modules, tree
from helpers.processes.command_line import command_line

from labkit import figures, nsys
from labkit.cli import app
from labkit.harness import load_records
from labkit.harness.results import save_lines
from labkit.launcher.command import program
from labkit.notebooks.carried import find_notebook
from labkit.notebooks.copies import copy_notebooks
from labkit.studies.last import Last, keep_last, now, read_last
from labkit.system.cache_root import cache_root
from labkit.system.errors import UserError
from labkit.system.home import expanded
from labkit.system.input_file import open_file, read_file, read_stream
from labkit.system.json_file import read_json
from labkit.system.output_folder import check_output_folder
from labkit.system.result_table import ResultTable, Tabular
from labkit.system.whole_file import check_no_input, check_output_file, check_two_outputs, whole_file, write_whole
from labkit.widgets.timeline_page import write_timeline_page

EVENT = {"ph": "X", "cat": "kernel", "name": "k", "ts": 0, "dur": 1, "pid": 1, "tid": 1}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A home folder with a trace. The current folder has to stay empty."""
    home, current = tmp_path / "home", tmp_path / "current"
    for folder in (home, current):
        folder.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(current)
    (home / "made.json").write_text(json.dumps({"traceEvents": [EVENT]}))
    yield home
    assert list(current.iterdir()) == []


def write_with_whole_file() -> None:
    with whole_file(Path("~/new")) as path:
        path.write_text("x")


WRITES: dict[str, Callable[[], Any]] = {
    "whole_file": write_with_whole_file,
    "write_whole": lambda: write_whole(Path("~/new"), "x"),
    "check_output_folder": lambda: check_output_folder("~/new"),
    "save_lines": lambda: save_lines(Path("~/new"), []),
    "figures.save": lambda: figures.save(go.Figure(), "~/new.html"),
    "write_chrome": lambda: nsys.write_chrome(nsys.read("~/made.json"), "~/new.json"),
    "write_timeline_page": lambda: write_timeline_page(nsys.read("~/made.json"), "~/new.html"),
    "to_csv": lambda: Result().to_csv("~/new.csv"),
    "copy_notebooks": lambda: copy_notebooks("~/new"),
    "keep_last": lambda: keep_last(Last({}, now(), 3), int, "x", "~/new"),
}


class Result(Tabular):
    def table(self) -> ResultTable:
        raise NotImplementedError

    def to_frame(self) -> pd.DataFrame:
        return pd.DataFrame({"a": [1]})


@pytest.mark.parametrize("name", WRITES)
def test_functions_write_to_the_home_folder(home: Path, name: str) -> None:
    WRITES[name]()
    (new,) = (path for path in home.iterdir() if path.name.startswith("new"))
    assert new.is_dir() or new.exists()


READS: dict[str, Callable[[], Any]] = {
    "open_file": lambda: open_file(Path("~/made.json"), "x").close(),
    "read_file": lambda: read_file(Path("~/made.json"), "x"),
    "read_stream": lambda: read_stream(Path("~/made.json"), 9),
    "read_json": lambda: read_json(Path("~/made.json"), "x"),
    "nsys.read": lambda: nsys.read("~/made.json"),
    "nsys.read of several": lambda: nsys.read(["~/made.json", Path("~/made.json")]),
    "nsys.summary_of": lambda: nsys.summary_of([Path("~/made.json")]),
    "find_notebook": lambda: find_notebook("~/made.json"),
    "program": lambda: program(["~/made.json"]),
    "check_output_file": lambda: check_output_file(Path("~/made.json")),
}


@pytest.mark.parametrize("name", READS)
def test_functions_find_files_of_the_home_folder(home: Path, name: str) -> None:
    READS[name]()


def test_two_spellings_of_a_file_are_one_file(home: Path) -> None:
    with pytest.raises(UserError, match="which is the input"):
        check_no_input(Path("~/made.json"), [home / "made.json"])
    with pytest.raises(UserError, match="which is the input"):
        check_no_input(home / "made.json", [Path("~/made.json")])
    with pytest.raises(UserError, match="name two files"):
        check_two_outputs(one=Path("~/x"), two=home / "x")
    with pytest.raises(UserError, match="which is a folder"):
        check_output_file(Path("~"))
    with pytest.raises(UserError, match="holds no results"):
        load_records("~")
    keep_last(Last({}, now(), 3), int, "x", "~")
    kept = read_last(int, "x", home)
    assert kept is not None
    assert kept.result == 3


@pytest.mark.parametrize("variable", ["LABKIT_CACHE", "XDG_CACHE_HOME"])
def test_the_cache_may_be_in_the_home_folder(home: Path, variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LABKIT_CACHE", raising=False)
    monkeypatch.setenv(variable, "~/mine")
    root = cache_root()
    assert root is not None
    assert root.is_relative_to(home / "mine")


def test_a_name_of_no_user_stays(home: Path) -> None:
    assert expanded("~nobody-of-that-name/x") == Path("~nobody-of-that-name/x")


def commands() -> dict[str, Any]:
    """All commands of the command line, with the commands of groups, by their names."""
    found: dict[str, Any] = {}
    for name, command in app.Commands().items():
        inner = getattr(command, "commands", None)
        found |= {f"{name} {part}": value for part, value in inner.items()} if inner else {name: command}
    return found


def with_paths() -> list[str]:
    return [name for name, command in commands().items() if any(takes_path(one) for one in command.params)]


def takes_path(parameter: Any) -> bool:
    return parameter.type_descriptor.annotation in (Path, list[Path])


@pytest.mark.parametrize("name", with_paths())
def test_every_path_of_every_command_is_expanded(
    home: Path, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = commands()[name]
    words, expected = [], {}
    for number, parameter in enumerate(command.params):
        path = f"~/p{number}"
        if takes_path(parameter):
            words += [path] if parameter.param_type_name == "argument" else [f"{max(parameter.opts, key=len)}={path}"]
            value = home / f"p{number}"
            expected[parameter.name] = [value] if parameter.multiple or parameter.nargs == -1 else value
        elif parameter.required:
            words += ["1"] if parameter.param_type_name == "argument" else [f"{max(parameter.opts, key=len)}=1"]
    called: dict[str, Any] = {}
    monkeypatch.setattr(command, "callback", lambda **values: called.update(values))
    assert command_line(monkeypatch, capsys)(*name.split(), *words)[0] == 0
    paths = {key: list(value) if isinstance(value, tuple) else value for key, value in called.items()}
    assert {key: paths[key] for key in expected} == expected


def test_commands_read_and_write_below_home(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    labkit = command_line(monkeypatch, capsys)
    assert labkit("timeline", "~/made.json", "--output=~/t.html")[0] == 0
    assert labkit("trace", "kernels", "~/made.json", "--csv", "--output=~/k.csv")[0] == 0
    assert {"t.html", "k.csv"} <= {path.name for path in home.iterdir()}


def taken_as_they_are() -> Iterator[str]:
    """Calls of `Path` for a parameter that is a path in any form."""
    for path in modules().values():
        for function in (node for node in ast.walk(tree(path)) if isinstance(node, ast.FunctionDef)):
            parameters = [*function.args.args, *function.args.kwonlyargs]
            kinds = {one.arg: ast.unparse(one.annotation) for one in parameters if one.annotation}
            paths = {name for name, kind in kinds.items() if "PathLike" in kind or "str | Path" in kind}
            for call in (node for node in ast.walk(function) if isinstance(node, ast.Call)):
                if ast.unparse(call.func) == "Path" and paths & set(map(ast.unparse, call.args)):
                    yield f"{path.relative_to(ROOT)}:{call.lineno}: {ast.unparse(call)}"


def test_paths_of_any_form_are_expanded_where_they_become_paths() -> None:
    assert not list(taken_as_they_are()), "expected labkit.system.home.expanded instead of Path"
