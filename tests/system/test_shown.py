"""No character of untrusted text moves the cursor, reverses the direction of text, or begins a new line."""

import io
import logging
import sys
import unicodedata
import warnings
from traceback import format_exception_only
from typing import Any

import pytest
from transformers.utils import logging as transformers_logging

from labkit.system.command import run_command
from labkit.system.errors import RunError, UnsupportedError, UserError, UserTypeError
from labkit.system.shown import CONTROL_OF_LINES, shown, shown_lines, shown_value

EVERY = "".join(map(chr, range(sys.maxunicode + 1)))
DIRECTIONS = "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain [red]é 漢字 🙂\u200d🙂", "plain [red]é 漢字 🙂\u200d🙂"),
        ("\x1b]0;title\x07", r"\x1b]0;title\x07"),
        ("a\x1b[2Jb", r"a\x1b[2Jb"),
        ("c1 \x9b2J", r"c1 \x9b2J"),
        ("gpj.\u202eexe", r"gpj.\u202eexe"),
        ("name\nerror: not mine\tx\r\x7f", r"name\nerror: not mine\tx\r\x7f"),
        ("bytes\udcff", r"bytes\udcff"),
    ],
)
def test_a_control_character_is_written_out(text: str, expected: str) -> None:
    assert shown(text) == expected


def test_no_character_that_moves_the_cursor_or_turns_text_is_left() -> None:
    kinds = ("Cc", "Cs", "Zl", "Zp")
    controls = {character for character in EVERY if character in DIRECTIONS or unicodedata.category(character) in kinds}
    assert not controls & set(shown(EVERY))
    harmless = "".join(character for character in EVERY if character not in controls)
    assert shown(harmless) == harmless
    assert all(shown(character).isascii() for character in controls)


def test_what_was_shown_stays_as_it_is() -> None:
    once = shown(EVERY)
    assert shown(once) == once
    once.encode()


def test_lines_of_a_message_stay_lines() -> None:
    assert shown_lines("one\n\ttwo\r\x1b[2J") == "one\n\ttwo\\r\\x1b[2J"
    assert shown_lines(EVERY) == shown(EVERY).replace(r"\n", "\n", 1).replace(r"\t", "\t", 1)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, "null"),
        (True, "true"),
        (1e-6, "1e-06"),
        ("3", '"3"'),
        (b"3", '"3"'),
        ("[1]".encode("utf-16-le"), r'"[\x001\x00]\x00"'),
        (b"\xff\xfe\x1b[2J", r'"\xff\xfe\x1b[2J"'),
        ({"a": [1, "b", None], "c": (False,)}, '{"a": [1, "b", null], "c": [false]}'),
        ("x" * 100, f'"{"x" * 40}…"'),
    ],
)
def test_a_value_is_shown_as_json_writes_it(value: Any, expected: str) -> None:
    assert shown_value(value) == expected


@pytest.mark.parametrize("huge", ["x" * 10**6, b"x" * 10**6, list(range(10**6)), {"a": ["b" * 10**6] * 99}, EVERY])
def test_a_huge_value_is_shown_in_a_short_line_without_controls(huge: Any) -> None:
    line = shown_value(huge)
    assert len(line) < 400
    assert line == shown(line)


@pytest.mark.parametrize("name", ["root", "labkit", "transformers.modeling_rope_utils", "another"])
def test_log_lines_and_warnings_of_a_command_are_shown(name: str) -> None:
    text = EVERY.replace("%", "")
    written, logger = io.StringIO(), logging.getLogger(None if name == "root" else name)
    transformers_logging.get_logger(name)  # gives the library's logger its handler, which is older than the command
    handler = logging.StreamHandler(written)
    top = logging.getLogger(name.partition(".")[0] if name != "root" else None)
    top.addHandler(handler)

    def command() -> None:
        logger.error("%s is read", text)
        logger.error(text)
        written.write(warnings.formatwarning(text, UserWarning, f"{text}.py", 3, text))

    try:
        with pytest.raises(SystemExit):
            run_command(command)
    finally:
        top.removeHandler(handler)
    assert written.getvalue().count(shown_lines(text)) >= 4
    assert shown_lines(written.getvalue()) == written.getvalue()
    assert logging.getLogRecordFactory() is logging.LogRecord


@pytest.mark.parametrize("kind", [UserError, UserTypeError, UnsupportedError, RunError])
def test_an_error_is_safe_in_a_traceback(kind: type[Exception]) -> None:
    error = kind("tensor \x1b]0;title\x07\x1b[2J:\nexpected another name")
    assert str(error) == "tensor \\x1b]0;title\\x07\\x1b[2J:\nexpected another name"
    assert CONTROL_OF_LINES.search("".join(format_exception_only(error))) is None
