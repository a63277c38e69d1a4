"""Options and reports of an nsys, read from its own help: the oracle for the command lines of captures."""

import re
from collections.abc import Mapping
from functools import cache

from labkit.nsys.tool import Nsys, ask

OPTION = re.compile(r"^\t(?=\S).*?(--[a-z][\w-]*)(?:\[(include)\|(exclude)\])?=", re.MULTILINE)
VALUES = re.compile(r"Possible (values|formats)(?: for <granularity>)? are:?\s+(.*?)(?:\.\s|\.$|\n\s*\n|\Z)", re.DOTALL)


def supports(nsys: Nsys, option: str, value: str | None = None) -> bool:
    """Whether `nsys profile` takes the option and the value, or all values between commas ("cuda,nvtx").

    The part of a value after a colon is not checked. An option whose help lists no values takes any.
    """
    options = _options(nsys)
    if option not in options:
        return False
    known_values = {_base(name) for name in options[option]}
    return value is None or not known_values or all(_base(name) in known_values for name in value.split(","))


def reports(nsys: Nsys) -> frozenset[str]:
    """Names of the reports that `nsys stats -r` has; the names changed from 2022 to 2023."""
    folders = [nsys.folder / "reports", *nsys.folder.parent.glob("host-*/reports")]
    return frozenset(file.stem for folder in folders for file in folder.glob("[!_]*.py"))


@cache
def _options(nsys: Nsys) -> Mapping[str, frozenset[str]]:
    """Options of `nsys profile` by their long names, with the values listed in the help, if any."""
    help_text = ask(nsys.path, "profile", "--help")
    assert isinstance(help_text, str)
    heads = list(OPTION.finditer(help_text))
    options = {}
    for head, end in zip(heads, [*(following.start() for following in heads[1:]), len(help_text)], strict=True):
        values = frozenset(_values(help_text[head.end() : end]))
        names = [head[1] + suffix for suffix in head.groups()[1:] if suffix] or [head[1]]
        options.update(dict.fromkeys(names, values))
    return options


def _values(help_text: str) -> list[str]:
    """Values in "Possible values are 'graph' or 'node'."; none if the help describes numbers, patterns or examples."""
    match = VALUES.search(help_text)
    if match is None or "for example" in match[2]:
        return []
    quoted = re.findall(r"'([^']+)'", match[2])
    by_spaces = match[1] == "formats"
    values = quoted or (match[2].partition("\n")[0].split() if by_spaces else re.split(r",\s*", match[2]))
    return [] if any(re.search(r"\s", value) for value in values) else values


def _base(value: str) -> str:
    return re.split(r"[\[:]", value, maxsplit=1)[0]
