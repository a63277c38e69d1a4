"""The parameters of a notebook, read from its cell tagged `parameters`, and values checked against their types."""

from __future__ import annotations

import ast
import io
import json
import tokenize
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nbformat import NotebookNode

from labkit.notebooks.failure import NotebookError
from labkit.notebooks.injected import source_of
from labkit.system.errors import UserError
from labkit.system.nearest import did_you_mean
from labkit.system.typed_value import refusal, typed

if TYPE_CHECKING:
    from labkit.studies.settings import StudySetting

TAG = "parameters"
LINE = 119  # characters
_TYPES: dict[str, type] = {
    **{kind.__name__: kind for kind in (str, bytes, int, float, complex, bool, list, dict, tuple, set, frozenset)},
    **{"List": list, "Dict": dict, "Tuple": tuple, "Set": set, "FrozenSet": frozenset},
    **{"Sequence": list, "Iterable": list, "Mapping": dict},
}
_EXAMPLES = {list: "[4]", tuple: "(3, 4)", set: "{3, 4}", frozenset: "{3, 4}", dict: "{'name': 4}", bytes: "b'text'"}
_UNREADABLE = (ValueError, SyntaxError, TypeError, OverflowError, MemoryError, RecursionError)  # of a literal
_BOOLS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
LITERAL = "Literal["
OTHER_NAMES = {  # of settings elsewhere, with the parameters that mean the same
    "dtype": ("precision", "precisions"),
    "precision": ("dtype",),
    "precisions": ("dtype",),
    "tp": ("tp_sizes",),
    "pp": ("stages",),
    "cycles": ("rounds",),
}
_MODULES = ("typing.", "collections.abc.", "t.")


class ParameterError(UserError):
    """A parameter is unknown, or its value has the wrong type."""


class Expression(str):
    """The source of a default that is computed when the notebook runs, such as `Path("runs")`."""

    __repr__ = str.__str__


@dataclass(frozen=True)
class Parameter:
    """A parameter of a notebook, as its cell declares it."""

    name: str
    types: tuple[str, ...]  # alternatives, such as "Literal['a', -1]" or "list[int]"; empty: not stated, any literal
    default: Any  # an Expression if it is not a literal
    help: str

    @property
    def type(self) -> str:
        return " | ".join(self.types) or "any"

    @property
    def expected(self) -> str:
        """The types in words, with an example of a type that has brackets."""
        kinds = [(name, _TYPES.get(_outer(name))) for name in self.types]
        of_ints = [kind for name, kind in kinds if set(_members(name)) <= {("int",), ("...",)}]
        example = next((_EXAMPLES[kind] for kind in of_ints if kind in _EXAMPLES), "")
        return " or ".join(map(_type_words, self.types)) + (f", such as {example}" if example else "")

    def __str__(self) -> str:
        return f"{self.name}: {self.type} = {self.default!r}" + (f"  # {self.help}" if self.help else "")

    def convert(self, value: object) -> Any:
        """Converts `value` to this parameter's type. Text from a command line is parsed.

        Raises:
            ValueError: the value fits none of the parameter's types.
        """
        if not self.types:
            return _literal(value) if isinstance(value, str) else value
        return _convert_to_one(value, self.types)


def read_parameters(notebook: NotebookNode) -> tuple[Parameter, ...]:
    """The parameters of the first cell tagged `parameters`, in order.

    Each is a top-level assignment. The annotation (else the default) gives its type, and a trailing comment its help.

    Raises:
        NotebookError: there is no such cell, or it is not Python.
    """
    cell = next((c for c in notebook.cells if c.cell_type == "code" and TAG in c.metadata.get("tags", [])), None)
    if cell is None:
        raise NotebookError(
            "the notebook has no cell tagged 'parameters'; add that tag to the cell that holds the defaults "
            "(JupyterLab: property inspector, 'Cell Tags'), or to an empty cell if it takes none"
        )
    try:
        statements = ast.parse(cell.source).body
    except SyntaxError as error:
        raise NotebookError(f"the parameters cell is not valid Python: line {error.lineno}: {error.msg}") from error
    except (ValueError, MemoryError, RecursionError) as error:  # a null byte; thousands of brackets
        raise NotebookError(f"the parameters cell is not valid Python: {error}") from error
    comments = _trailing_comments(cell.source)
    parameters = []
    for node in statements:
        match node:
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                types = _type_names(node.annotation)
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                types = ()
            case _:
                continue
        try:
            default = ast.literal_eval(value)
        except (ValueError, TypeError, MemoryError, RecursionError):
            default = Expression(ast.unparse(value))
        if not types and default is not None and not isinstance(default, Expression):
            types = (type(default).__name__,)
        parameters.append(Parameter(name, types, default, comments.get(node.end_lineno or node.lineno, "")))
    return tuple(parameters)


def parameters_cell(settings: Mapping[str, StudySetting]) -> str:
    """The source of a `parameters` cell with the settings of a study: type, default and help of each."""
    lines = []
    for setting in settings.values():
        default = json.dumps(setting.default) if setting.kind is str else repr(setting.default)
        line = f"{setting.name}: {setting.kind.__name__} = {default}  # {setting.help}"
        lines.append(line if len(line) <= LINE else _in_two_lines(line))
    return "\n".join(lines)


def _in_two_lines(line: str) -> str:
    """A line whose literal, a text with commas, goes on after a backslash."""
    end = line.rindex(", ", 0, min(LINE, line.index("  # "))) + 2
    return f"{line[:end]}\\\n{line[end:]}"


def checked_values(parameters: Sequence[Parameter], values: Mapping[str, object]) -> dict[str, Any]:
    """`values` converted to the types of `parameters`.

    Raises:
        ParameterError: a name is unknown, or a value has the wrong type; the message lists all parameters.
    """
    known = {parameter.name: parameter for parameter in parameters}
    problems, checked = [], {}
    for name, value in values.items():
        if name not in known:
            problems.append(f"unknown parameter {name!r}{_suggestion(name, known)}")
            continue
        try:
            checked[name] = known[name].convert(value)
        except ValueError:
            problems.append(refusal(name, value, known[name].expected))
            continue
        try:
            source_of(checked[name])
        except UserError as error:
            problems.append(f"parameter {name!r}: {error}")
    if problems:
        listing = "\n".join(f"  {parameter}" for parameter in parameters) or "  none"
        raise ParameterError("\n".join(problems) + f"\nthe notebook's parameters are:\n{listing}")
    return checked


def _suggestion(name: str, known: Mapping[str, Parameter]) -> str:
    """The parameters of the same meaning; without any, the parameters with a similar name."""
    same = [other for other in known if (name and other.startswith(name)) or other in OTHER_NAMES.get(name, ())]
    return did_you_mean(name, same, likeness=0) or did_you_mean(name, known)


def _convert_to_one(value: object, types: Sequence[str]) -> Any:
    """Converts `value` to the first of these types that takes it; UserError if none does."""
    # Every value is a text, so `str` is tried last: `str | None` takes "none" for None.
    for name in sorted(types, key="str".__eq__):
        try:
            return _convert(value, name)
        except _UNREADABLE:
            continue
    raise UserError(value)


def _convert(value: object, type_name: str) -> Any:
    if type_name == "None":
        if value is None or (isinstance(value, str) and value.lower() in ("none", "null")):
            return None
        raise UserError(value)
    if type_name.startswith(LITERAL):
        choices = ast.literal_eval(f"({type_name.removeprefix(LITERAL).removesuffix(']')},)")
        same = [choice for choice in choices if type(choice) is type(value) and choice == value]
        for choice in same or [choice for choice in choices if isinstance(value, str) and str(choice) == value]:
            return choice
        raise UserError(value)
    converted, members = _converted(value, _outer(type_name)), _members(type_name)
    return _with_members(converted, members) if members else converted


def _with_members(values: Any, members: Sequence[tuple[str, ...]]) -> Any:
    """A container whose members are converted to their types: a key and a value, each item of a tuple, or all items."""
    if isinstance(values, dict):
        keys, contents = members
        return {_convert_to_one(key, keys): _convert_to_one(item, contents) for key, item in values.items()}
    if not isinstance(values, tuple) or members[-1] == ("...",):
        members = [members[0]] * len(values)
    if len(values) != len(members):
        raise UserError(values)
    return type(values)(_convert_to_one(item, types) for item, types in zip(values, members, strict=True))


def _converted(value: object, type_name: str) -> Any:
    """A value in a type whose members may be anything."""
    kind = _TYPES.get(type_name)
    if kind is None:
        return value
    if isinstance(value, str) and kind is not str:
        if kind is bool:
            if value.lower() not in _BOOLS:
                raise UserError(value)
            return _BOOLS[value.lower()]
        value = kind(value) if kind in (int, float, complex) else ast.literal_eval(value)
    if kind in (int, float, str):
        return typed(value, kind)
    if kind is complex and isinstance(value, int | float) and not isinstance(value, bool):
        return kind(value)
    if kind in (list, tuple, set, frozenset) and isinstance(value, list | tuple):
        return kind(value)
    if kind is frozenset and isinstance(value, set):
        return frozenset(value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise UserError(value)
    return value


def _outer(type_name: str) -> str:
    """`list` for `list[int]`."""
    return type_name.partition("[")[0]


def _members(type_name: str) -> list[tuple[str, ...]]:
    """The alternatives of each member of a container: [("str",), ("int", "None")] for `dict[str, int | None]`. Empty
    if nothing is said about them.
    """
    if "[" not in type_name or type_name.startswith(LITERAL) or _outer(type_name) not in _TYPES:
        return []
    match ast.parse(type_name, mode="eval").body:
        case ast.Subscript(slice=inner):
            return [_type_names(member) for member in _parts(inner)]
    return []


def _parts(inner: ast.expr) -> list[ast.expr]:
    """What the brackets of an annotation hold, one by one."""
    return inner.elts if isinstance(inner, ast.Tuple) else [inner]


def _type_words(name: str) -> str:
    if not name.startswith(LITERAL):
        return name
    return f"one of {name.removeprefix(LITERAL).removesuffix(']')}"


def _literal(text: str) -> Any:
    """The value of a text that is a literal, else the text itself."""
    try:
        return ast.literal_eval(text)
    except _UNREADABLE:
        return text


def _type_names(annotation: ast.expr) -> tuple[str, ...]:
    """The alternatives of an annotation: `int | None`, `Optional[int]` and `Union[int, None]` give ("int", "None"),
    `list[int]` gives ("list[int]",), `Literal["a", -1]` gives ("Literal['a', -1]",), `Annotated[int, ...]` and
    `Final[int]` give ("int",), and `Final` alone gives ().
    """
    match annotation:
        case ast.Constant(value=None):
            return ("None",)
        case ast.Constant(value=str() as text):
            try:
                return _type_names(ast.parse(text, mode="eval").body)
            except SyntaxError:
                return (text,)
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return _type_names(left) + _type_names(right)
        case ast.Subscript(value=outer, slice=inner):
            members = _parts(inner)
            match _plain(outer):
                case "Optional":
                    return (*_type_names(inner), "None")
                case "Union":
                    return tuple(name for member in members for name in _type_names(member))
                case "Annotated" | "Final" if members:
                    return _type_names(members[0])
                case "Literal" if choices := _choices(members):
                    return (f"Literal[{', '.join(map(repr, choices))}]",)
                case container if _takes(container, len(members)):
                    return (ast.unparse(ast.Subscript(ast.Name(container), inner)),)
            return _type_names(outer)
        case ast.Name(id="Final") | ast.Attribute(attr="Final"):
            return ()
    return (_plain(annotation),)


def _choices(members: Sequence[ast.expr]) -> list[Any]:
    """The values of a `Literal`, also of one inside it; none if one of them is no literal, such as a name."""
    values: list[Any] = []
    for member in members:
        match member:
            case ast.Subscript(value=outer, slice=inner) if _plain(outer) == "Literal":
                values += _choices(_parts(inner))
            case _:
                try:
                    values.append(ast.literal_eval(member))
                except _UNREADABLE:
                    return []
    return values


def _takes(container: str, members: int) -> bool:
    """Whether a container is annotated with this number of members: a key and a value, one for all items, or any."""
    kind = _TYPES.get(container)
    return kind is tuple or (kind is dict and members == 2) or (kind in (list, set, frozenset) and members == 1)


def _plain(name: ast.expr) -> str:
    """`typing.Literal` as `Literal`."""
    text = ast.unparse(name)
    return next((text.removeprefix(module) for module in _MODULES if text.startswith(module)), text)


def _trailing_comments(source: str) -> dict[int, str]:
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return {token.start[0]: token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT}
