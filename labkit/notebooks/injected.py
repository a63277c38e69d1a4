"""Parameters of a run as source: the cell that papermill adds to a notebook."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from nbformat import NotebookNode
from papermill.parameterize import parameterize_notebook
from papermill.translators import PythonTranslator, papermill_translators

from labkit.system.errors import UserError

LANGUAGE = "labkit's python"  # a name of our own: papermill's "python" stays as it is for other callers
BRACKETS = {list: ("[", "]"), tuple: ("(", ")"), set: ("{", "}")}
EXPECTED = "None, a bool, a number, text, bytes, or a list, tuple, set, frozenset or dict of such values"


class _Translator(PythonTranslator):  # type: ignore[misc]
    """Writes every plain value of Python. papermill's own translator writes a tuple as text."""

    @classmethod
    def translate(cls, val: object) -> str:
        return source_of(val)


papermill_translators.register(LANGUAGE, _Translator)


def with_parameters(notebook: NotebookNode, values: Mapping[str, Any]) -> NotebookNode:
    """The notebook with a cell that assigns `values`, after the cell of its defaults.

    The notebook's metadata lists the values, too; a value that JSON does not have is listed as its source.
    """
    injected = parameterize_notebook(notebook, dict(values), kernel_name=LANGUAGE, language=LANGUAGE)
    injected.metadata.papermill["parameters"] = {
        name: value if _is_json(value) else source_of(value) for name, value in values.items()
    }
    return injected


def source_of(value: object) -> str:
    """An expression of Python whose value equals `value` and has its type.

    UserError: the type has no such expression, or Python cannot read it because it is too long or nested too deep.
    """
    try:
        source = _source(value)
        compile(source, "<parameter>", "eval")
    except UserError:
        raise
    except (SyntaxError, RecursionError, MemoryError):
        raise UserError("got a value that is nested too deep for Python to read; pass less, or a file's name") from None
    except ValueError as error:  # an integer of thousands of digits
        raise UserError(f"got a value that Python does not write: {error}") from None
    return source


def _source(value: object) -> str:
    kind = next((kind for kind in (bool, int, float, complex, str, bytes) if isinstance(value, kind)), type(value))
    if kind is float and not math.isfinite(value):  # type: ignore[arg-type]
        return f"float('{float(value)}')"  # type: ignore[arg-type]
    if kind is complex:
        return f"complex({_source(value.real)}, {_source(value.imag)})"  # type: ignore[attr-defined]
    if value is None or kind in (bool, int, float, str, bytes):
        return kind.__repr__(value)
    if kind is dict:
        return f"{{{', '.join(f'{_source(key)}: {_source(item)}' for key, item in value.items())}}}"  # type: ignore[attr-defined]
    if kind is frozenset:
        return f"frozenset({_source(set(value))})"  # type: ignore[call-overload]
    if kind not in BRACKETS:
        raise UserError(f"got a value of type {kind.__name__}, expected {EXPECTED}")
    if kind is set and not value:
        return "set()"
    opening, closing = BRACKETS[kind]  # type: ignore[index]
    items = [_source(item) for item in value]  # type: ignore[attr-defined]
    return opening + ", ".join(items) + ("," if kind is tuple and len(items) == 1 else "") + closing


def _is_json(value: object) -> bool:
    """Whether a JSON file gives the value back, with its type."""
    try:
        text = json.dumps(value, allow_nan=False, ensure_ascii=False)
        text.encode()
        return repr(json.loads(text)) == repr(value)
    except (TypeError, ValueError, RecursionError):
        return False
