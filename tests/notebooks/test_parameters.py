"""Parameters come from the tagged cell, and values are checked against it."""

from pathlib import Path
from typing import Any

import nbformat
import papermill
import pytest
from nbformat.v4 import new_code_cell, new_notebook

from labkit.notebooks import NotebookError, ParameterError, checked_values, read_parameters
from labkit.notebooks.parameters import Parameter

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))
CELL = """
model: str = "gpt2"  # a preset
batch: int = 1  # sequences at once
scale: float = 0.5
verbose: bool = False
threads: int | None = None  # None: all
sizes: list[int] = [1, 2]
untyped = 3
computed = max(1, 2)
named: str | None = "gpt2"
way: Literal["fast", "exact", 4] = "fast"
pair: tuple[int, float] = (1, 2.0)
several: typing.Optional[Union[int, List[int]]] = None
seconds: int = 60 * 60
place: Path = Path("runs") / "here"
quoted: "int | None" = None
"""
REST = ["computed", "named", "way", "pair", "several", "seconds", "place", "quoted"]


def parameters(source: str = CELL) -> Any:
    return read_parameters(new_notebook(cells=[new_code_cell(source, metadata={"tags": ["parameters"]})]))


def test_name_type_default_and_help_are_read() -> None:
    by_name = {parameter.name: parameter for parameter in parameters()}
    assert list(by_name) == ["model", "batch", "scale", "verbose", "threads", "sizes", "untyped", *REST]
    assert (by_name["batch"].type, by_name["batch"].default, by_name["batch"].help) == ("int", 1, "sequences at once")
    assert by_name["threads"].type == "int | None"
    assert by_name["untyped"].type == "int"
    assert str(by_name["computed"]) == "computed: any = max(1, 2)"
    assert by_name["way"].type == "Literal['fast', 'exact', 4]"
    assert by_name["several"].type == "int | List[int] | None"
    assert str(by_name["place"]) == "place: Path = Path('runs') / 'here'"


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("model", "8", "8"),
        ("batch", "8", 8),
        ("scale", "2", 2.0),
        ("scale", "1e-3", 1e-3),
        ("verbose", "True", True),
        ("verbose", "no", False),
        ("threads", "none", None),
        ("threads", "4", 4),
        ("sizes", "[3, 4]", [3, 4]),
        ("untyped", "7", 7),
        ("computed", "9", 9),
        ("computed", "nine", "nine"),
        ("named", "none", None),
        ("named", "4", "4"),
        ("way", "exact", "exact"),
        ("way", "4", 4),
        ("pair", "(3, 4.5)", (3, 4.5)),
        ("pair", "[3, 4.5]", (3, 4.5)),
        ("several", "8", 8),
        ("several", "[8, 9]", [8, 9]),
        ("several", "null", None),
        ("seconds", "5", 5),
        ("place", "/tmp", "/tmp"),
        ("quoted", "none", None),
    ],
)
def test_text_from_a_command_line_becomes_the_type(name: str, text: str, value: object) -> None:
    converted = checked_values(parameters(), {name: text})[name]
    assert converted == value
    assert type(converted) is type(value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("batch", "eight"),
        ("batch", "1.5"),
        ("batch", 1.5),
        ("batch", True),
        ("batch", None),
        ("verbose", "maybe"),
        ("threads", "many"),
        ("sizes", "1, x"),
        ("sizes", "{1: 2}"),
        ("way", "slow"),
        ("way", 5),
        ("pair", "3"),
        ("several", "eight"),
        ("seconds", "long"),
        ("sizes", "[1,"),
        ("model", {"a": 3}),
        ("model", True),
    ],
)
def test_a_value_of_the_wrong_type_says_got_and_expected(name: str, value: object) -> None:
    with pytest.raises(ParameterError, match=f"got {name} = .*, expected") as error_info:
        checked_values(parameters(), {name: value})
    assert "batch: int = 1  # sequences at once" in str(error_info.value)


def test_an_unknown_parameter_lists_all_and_suggests_the_closest() -> None:
    with pytest.raises(ParameterError, match=r"unknown parameter 'modle' \(did you mean 'model'\?\)") as error_info:
        checked_values(parameters(), {"modle": "gpt2", "batch": "x"})
    text = str(error_info.value)
    assert all(f"\n  {parameter}" in text for parameter in parameters())
    assert "got batch = 'x', expected int" in text


@pytest.mark.parametrize(
    ("name", "own"),
    [
        ("new", "new_tokens"),
        ("prompt", "prompt_tokens"),
        ("dtype", "precision"),
        ("batch", "batches"),
        ("tp", "tp_sizes"),
        ("cycles", "rounds"),
        ("max_batches", "batches"),
    ],
)
def test_another_name_of_a_setting_is_told_the_notebooks_own(name: str, own: str) -> None:
    names = ("model", "precision", "batches", "prompt_tokens", "new_tokens", "tp_sizes", "rounds")
    own_parameters = [Parameter(known, ("int",), 1, "") for known in names]
    with pytest.raises(ParameterError, match=rf"unknown parameter '{name}' \(did you mean '{own}'\?\)"):
        checked_values(own_parameters, {name: 1})


@pytest.mark.parametrize(("value", "text"), [(3, "3"), (0.5, "0.5"), ([1, 4], "1, 4"), (("a", "b"), "a, b")])
def test_a_number_and_a_list_are_a_text(value: object, text: str) -> None:
    """As in a bench, which gets a number from `papermill -p batches 4`."""
    assert checked_values(parameters(), {"model": value}) == {"model": text}


# Annotation -> pairs of a text that fits and its value, and texts that do not fit.
MEMBERS: dict[str, tuple[list[tuple[str, Any]], list[str]]] = {
    "Literal[-1, 2]": ([("-1", -1), ("2", 2)], ["77", "0"]),
    "Literal[-0.5, +3, b'x']": ([("-0.5", -0.5), ("3", 3), ("b'x'", b"x")], ["0.5", "-3"]),
    "Literal[Literal['a'], Literal[-2, 'b']]": ([("a", "a"), ("-2", -2)], ["c"]),
    "Optional[Literal[-1]]": ([("-1", -1), ("none", None)], ["1"]),
    "list[int]": ([("[1, 2]", [1, 2]), ("[]", [])], ["['a']", "[1.5]", "[True]", "[None]"]),
    "list[int | None]": ([("[1, None]", [1, None])], ["['a']"]),
    "list[float]": ([("[1, 0.5]", [1.0, 0.5])], ["['a']"]),
    "list[Literal['a', -1]]": ([("['a', -1]", ["a", -1])], ["['b']", "[1]"]),
    "list[list[int]]": ([("[[1], []]", [[1], []])], ["[['a']]", "[1]"]),
    "Sequence[int]": ([("(1, 2)", [1, 2])], ["['a']"]),
    "list[Any]": ([("['a', 1]", ["a", 1])], ["3"]),
    "tuple[int, int]": ([("(1, 2)", (1, 2)), ("[1, 2]", (1, 2))], ["('a', 'b')", "(1,)", "(1, 2, 3)"]),
    "tuple[int, str]": ([("(1, 'a')", (1, "a"))], ["('a', 1)"]),
    "typing.Tuple[int, ...]": ([("(1, 2, 3)", (1, 2, 3)), ("()", ())], ["(1, 'a')"]),
    "set[int]": ([("{1, 2}", {1, 2})], ["{'a'}"]),
    "dict[str, int]": ([("{'a': 1}", {"a": 1})], ["{'a': 'b'}", "[1]"]),
    "dict[str, list[int]]": ([("{'a': [1]}", {"a": [1]})], ["{'a': 1}", "{'a': ['b']}"]),
    "Final[int]": ([("3", 3)], ["a", "1.5"]),
    "typing.Final": ([("3", 3)], ["a", "1.5"]),
    "Final[list[int]]": ([("[3]", [3])], ["['a']"]),
    "'list[int]'": ([("[3]", [3])], ["['a']"]),
}


@pytest.mark.parametrize("annotation", MEMBERS)
def test_every_part_of_an_annotation_is_checked(annotation: str) -> None:
    declared = parameters(f"k: {annotation} = 7")
    fitting, others = MEMBERS[annotation]
    for text, value in fitting:
        converted = checked_values(declared, {"k": text})["k"]
        assert (converted, repr(converted)) == (value, repr(value))
    for text in others:
        with pytest.raises(ParameterError, match=r"got k = .*, expected"):
            checked_values(declared, {"k": text})


def test_an_integer_is_a_float_but_a_bool_is_no_integer() -> None:
    assert checked_values(parameters(), {"scale": 2}) == {"scale": 2.0}
    with pytest.raises(ParameterError):
        checked_values(parameters(), {"batch": False})


def test_no_parameters_cell_says_what_to_do() -> None:
    with pytest.raises(NotebookError, match="no cell tagged 'parameters'; add that tag"):
        read_parameters(new_notebook(cells=[new_code_cell("model = 'gpt2'")]))


def test_a_parameters_cell_that_is_not_python_names_the_line() -> None:
    with pytest.raises(NotebookError, match="line 2"):
        parameters("a = 1\nb = = 2")


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_plain_papermill_takes_every_parameter_of_ours(
    notebook: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """test_timelines runs a whole notebook under plain papermill."""
    values = {parameter.name: parameter.default for parameter in read_parameters(nbformat.read(notebook, as_version=4))}
    prepared = papermill.execute_notebook(
        notebook, tmp_path / "out.ipynb", values, prepare_only=True, progress_bar=False
    )
    assert values
    assert "unknown parameter" not in caplog.text
    (injected,) = [cell for cell in prepared.cells if "injected-parameters" in cell.metadata.get("tags", [])]
    assert all(f"{name} = {value!r}" in injected.source.replace('"', "'") for name, value in values.items())
