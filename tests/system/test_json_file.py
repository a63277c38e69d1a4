"""Untrusted JSON is read as it is written, and JSON that is not sensible data is refused in linear time."""

from pathlib import Path

import pytest

from labkit.system import json_file
from labkit.system.errors import UserError
from labkit.system.json_file import MOST_LEVELS, read_json


def written(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_values_arrive_as_they_are_written(tmp_path: Path) -> None:
    text = '{"a": [1, 2.5, null, true], "brackets [{": "]}\\"[[[\\\\", "é": {"deep": [[[[]]]]}}'
    assert read_json(written(tmp_path / "a.json", text), "an object") == {
        "a": [1, 2.5, None, True],
        "brackets [{": ']}"[[[\\',
        "é": {"deep": [[[[]]]]},
    }


@pytest.mark.parametrize("opening", ["[", '{"a":', '[{"a":[', '"]"['])
def test_deep_nesting_is_refused_wherever_it_ends(opening: str, tmp_path: Path) -> None:
    path = written(tmp_path / "deep.json", opening * 500_000)
    with pytest.raises(UserError, match=rf"deep.json nests deeper than {MOST_LEVELS} levels; expected an object"):
        read_json(path, "an object")


def test_brackets_within_strings_do_not_nest(tmp_path: Path) -> None:
    text = '"' + '[{\\"' * 100_000 + '"'
    assert read_json(written(tmp_path / "a.json", text), "a string") == '[{"' * 100_000


@pytest.mark.parametrize(
    "text", ["{", "{'a': 1}", '"' + '\\"' * 500_000, '"\\', "1" * 100_000], ids=lambda text: text[:4]
)
def test_what_is_no_json_is_named(text: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"a.json is not JSON \(.*\); expected an object"):
        read_json(written(tmp_path / "a.json", text), "an object")


def test_bytes_that_are_not_utf_8_are_named_by_the_first_one(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"a.json is not UTF-8 text \(byte 3\); expected an object$"):
        read_json(written(tmp_path / "a.json", b'{"a\xc3": 1}'), "an object")


@pytest.mark.parametrize("text", ["", " \n"])
def test_an_empty_file_is_called_so(text: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"a.json is empty.*; expected an object"):
        read_json(written(tmp_path / "a.json", text), "an object")


def test_a_file_of_another_size_than_such_files_have_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_file, "MOST_BYTES", 10)
    with pytest.raises(UserError, match=r"a.json has 11 bytes; expected at most 10 of an object"):
        read_json(written(tmp_path / "a.json", '{"a": 1234}'), "an object")
