"""The cell that a run adds to a notebook assigns the values that labkit checked, with their types."""

import json
import math
from pathlib import Path
from typing import Any

import nbformat
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_notebook

from labkit.notebooks.injected import source_of, with_parameters
from labkit.notebooks.parameters import ParameterError, checked_values, read_parameters
from labkit.notebooks.report import html_report
from labkit.system.errors import UserError

SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.complex_numbers() | st.text() | st.binary(max_size=9)
)
KEYS = st.recursive(SCALARS, lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3), max_leaves=4)
VALUES = st.recursive(
    KEYS | st.sets(KEYS, max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples()
        | st.tuples(inner)
        | st.tuples(inner, inner)
        | st.dictionaries(KEYS, inner, max_size=3)
    ),
    max_leaves=6,
)


def notebook_with(parameters: str) -> NotebookNode:
    cell = new_code_cell(parameters, metadata={"tags": ["parameters"]})
    return new_notebook(cells=[cell], metadata={"papermill": {}})  # as papermill loads it


def after(parameters: str, **values: object) -> dict[str, Any]:
    """What the names hold after the two cells of a run."""
    notebook = notebook_with(parameters)
    injected = with_parameters(notebook, checked_values(read_parameters(notebook), values))
    nbformat.writes(injected).encode()
    assert [cell.metadata.tags for cell in injected.cells] == [["parameters"], ["injected-parameters"]]
    names: dict[str, Any] = {}
    for cell in injected.cells:
        exec(cell.source, names)
    return names


def form(value: object) -> object:
    """A comparable form with all types in it: NaN is like NaN, 1 is not like True, and sets have no order."""
    if isinstance(value, set | frozenset):
        return type(value), sorted(repr(form(item)) for item in value)
    if isinstance(value, list | tuple):
        return type(value), [form(item) for item in value]
    if isinstance(value, dict):
        return dict, [(form(key), form(item)) for key, item in value.items()]
    return type(value), repr(value)


@settings(derandomize=True, deadline=None, max_examples=60)
@given(VALUES)
def test_a_plain_value_reaches_the_cell_as_it_was_checked(value: object) -> None:
    declared = "value: str | None = None" if isinstance(value, str) else "value = max(1, 2)"  # text would be parsed
    expected = None if isinstance(value, str) and value.lower() in ("none", "null") else value
    assert repr(form(after(declared, value=value)["value"])) == repr(form(expected))


@pytest.mark.parametrize(
    ("declared", "text", "value"),
    [
        ("pair: tuple[int, int] = (1, 2)", "[3, 4]", (3, 4)),
        ("pair: set[int] = {1}", "{3, 4}", {3, 4}),
        ("pair: set[int] = {1}", "set()", set()),
        ("pair: frozenset[int] = frozenset()", "{3, 4}", frozenset({3, 4})),
        ("pair: dict = {}", "{1: (2,), (3, 4): {5}}", {1: (2,), (3, 4): {5}}),
        ("pair: list = []", "[(1, 2), b'x']", [(1, 2), b"x"]),
        ("pair: bytes = b''", "b'x'", b"x"),
        ("pair: complex = 1j", "2", 2 + 0j),
        ("pair: float = 1.0", "-inf", -math.inf),
    ],
)
def test_a_text_of_the_command_line_reaches_the_cell_in_its_type(declared: str, text: str, value: object) -> None:
    arrived = after(declared, pair=text)["pair"]
    assert (type(arrived), arrived) == (type(value), value)


def nested(levels: int) -> list[Any]:
    return [nested(levels - 1)] if levels else []


@pytest.mark.parametrize(
    "value", [Path("a"), [object()], {1: range(3)}, nested(500), 10**9999], ids=lambda v: str(type(v))
)
def test_what_no_source_says_is_refused_by_its_name(value: object) -> None:
    with pytest.raises(ParameterError, match="parameter 'value': got a value "):
        after("value = max(1, 2)", value=value)


def test_a_text_that_fits_no_set_is_refused() -> None:
    for text in ("[[1]]", "{[1]}"):
        with pytest.raises(ParameterError, match=r"expected set, such as \{3, 4\}"):
            after("value: set = {1}", value=text)
    with pytest.raises(ParameterError, match="expected float"):
        after("value: float = 1.0", value=10**400)


def test_the_metadata_lists_what_json_has_as_it_is() -> None:
    values = {"number": 1, "pair": (1, 2), "odd": math.nan, "name": "\udcff", "list": [1, "a", None]}
    listed = with_parameters(notebook_with(""), values).metadata.papermill["parameters"]
    assert json.loads(json.dumps(listed, allow_nan=False)) == {
        "number": 1,
        "pair": "(1, 2)",
        "odd": "float('nan')",
        "name": r"'\udcff'",
        "list": [1, "a", None],
    }


def test_a_report_shows_a_name_that_is_not_utf_8() -> None:
    page = html_report(notebook_with(""), title="t", parameters={"name": "\udcff", "set": {1}}, seconds=1)
    assert r"\udcff" in page.encode().decode()


def test_a_wrong_value_is_told_in_words_what_is_expected() -> None:
    declared = read_parameters(
        notebook_with('kind: Literal["a", "b"] = "a"\nbatches: list[int] = [1]\nthreads: int | None = None')
    )
    for name, value, expected in (
        ("kind", "c", "got kind = 'c', expected one of 'a', 'b'\n"),
        ("batches", "4", r"got batches = '4', expected list\[int\], such as \[4\]"),
        ("threads", "x", "got threads = 'x', expected int or None\n"),
    ):
        with pytest.raises(ParameterError, match=expected):
            checked_values(declared, {name: value})


def test_a_value_of_no_plain_type_names_the_plain_types() -> None:
    with pytest.raises(UserError, match="got a value of type PosixPath, expected None, a bool, a number"):
        source_of(Path("a"))
