"""Answers in a file: numbers and words that a learner types into a TOML file."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from labkit.notebooks.verdicts import checked, shown
from labkit.notebooks.workshop.exercises import Remark, Report
from labkit.system.input_file import read_file

Numbers = Mapping[str, tuple[float, Mapping[float, str]]]  # the right number, and what a wrong one suggests
APART = 0.03  # least distance of a mistake's number to the right one, as a fraction
RIGHT = "**right**"
OPEN = "?"  # an answer that was not given yet


def drawn_apart(draw: Callable[[], dict[str, Any]], expected: Callable[[dict[str, Any]], Numbers]) -> dict[str, Any]:
    """Parameters of a task, drawn until no mistake gives nearly the right number."""
    while True:
        drawn = draw()
        if all(abs(wrong / right - 1) > APART for right, mistakes in expected(drawn).values() for wrong in mistakes):
            return drawn


def read_answers(path: Path) -> dict[str, Any] | Remark:
    """The answers in a file; a remark if it is not TOML."""
    text = ""
    try:
        text = read_file(path, "answers").decode()
        return tomllib.loads(text)
    except (ValueError, OSError) as error:
        return Remark(f"{path.name} cannot be read: {_in_its_line(error, text)}", right=False)


def _in_its_line(error: Exception, text: str) -> str:
    """What is wrong with a file of TOML, after the line that it stands in."""
    if not (place := re.search(r" \(at line (\d+), column \d+\)$", str(error))):
        return str(error)
    line = text.split("\n")[int(place[1]) - 1].strip()
    _, _, value = line.partition("=")
    words = "a word stands in quotes" if re.match(r"\s*[A-Za-z_]", value) else str(error)[: place.start()]
    return f"`{line:.80}`, line {place[1]}: {words}"


def judged_answers(
    path: Path,
    numbers: Numbers,
    words: Mapping[str, tuple[str, Sequence[str]]] | None = None,
) -> Report:
    """A remark about each expected answer.

    numbers: the right number, and what a wrong one suggests, by the wrong number.
    words: the right word, and all words that may be chosen.
    """
    answers, words = read_answers(path), words or {}
    if isinstance(answers, Remark):
        return Report((answers,))
    remarks = [_number(name, answers.get(name, OPEN), *right) for name, right in numbers.items()]
    remarks += [_word(name, answers.get(name, OPEN), *right) for name, right in words.items()]
    if unknown := [name for name in answers if name not in numbers and name not in words]:
        remarks.append(
            Remark(f"{path.name} has {', '.join(unknown)}, which is no answer of this exercise", right=False)
        )
    return Report(tuple(remarks))


def _number(name: str, answer: Any, right: float, mistakes: Mapping[float, str]) -> Remark:
    verdict = checked(None if answer == OPEN else answer, right, mistakes)
    passed = verdict.startswith(RIGHT)
    return Remark(f"{name}: {verdict.removeprefix(RIGHT).removeprefix(': ').removeprefix('not yet: ')}", passed)


def _word(name: str, answer: Any, right: str, choices: Sequence[str]) -> Remark:
    if answer == OPEN:
        return Remark(f"{name}: not answered yet", right=False)
    if answer not in choices:
        return Remark(f"{name}: got {shown(answer)}, expected one of {', '.join(choices)}", right=False)
    return Remark(f"{name}: {answer}" + ("" if answer == right else " is not it"), right=answer == right)
