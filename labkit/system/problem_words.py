"""Problems that pydantic reports, in the words of labkit's error messages."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

# By pydantic's type of the problem; the names in braces come from its context.
EXPECTED = {
    "missing": "is missing",
    "extra_forbidden": "is not known here; leave it out",
    "greater_than": "expected more than {gt}",
    "greater_than_equal": "expected at least {ge}",
    "less_than": "expected less than {lt}",
    "less_than_equal": "expected at most {le}",
    "multiple_of": "expected a multiple of {multiple_of}",
    "finite_number": "expected a finite number",
    "literal_error": "expected {expected}",
    "enum": "expected {expected}",
    "is_instance_of": "expected {class}",
    "union_tag_invalid": "expected a field {discriminator} that is one of {expected_tags}",
    "union_tag_not_found": "expected a field {discriminator}",
    "string_pattern_mismatch": "expected text that matches {pattern}",
    "too_short": "expected at least {min_length} of them",
    "too_long": "expected at most {max_length} of them",
    "none_required": "expected nothing",
    "json_invalid": "expected JSON ({error})",
    "date_from_datetime_parsing": "expected a date",
    "path_type": "expected a path",
}
KINDS = {  # of a value, by the beginning of pydantic's type
    "int": "an integer",
    "float": "a number",
    "bool": "true or false",
    "string": "text",
    "bytes": "bytes",
    "list": "a list",
    "tuple": "a list",
    "set": "a list without repetitions",
    "datetime": "a date with its time",
    "timezone": "a time with its zone",
    "callable": "a function",
}
OBJECTS = ("dict", "mapping", "model", "dataclass")
KIND = re.compile(rf"({'|'.join((*KINDS, *OBJECTS))})_\w+")


def problem_words(problem: Mapping[str, Any], *, an_object: str = "an object") -> str:
    """The message for one of the `errors()` of a ValidationError. an_object: the reader's word for a JSON object."""
    name, context = problem["type"], problem.get("ctx", {})
    if "error" in context and name in ("value_error", "assertion_error"):  # raised by one of labkit's own checks
        return str(context["error"])
    if name in EXPECTED:
        return EXPECTED[name].format_map(context)
    if kind := KIND.fullmatch(name):
        return f"expected {KINDS.get(kind[1], an_object)}"
    message = str(problem["msg"])
    return message[:1].lower() + message[1:]
