"""Pydantic models for options, and its validation errors in labkit's words."""

from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError, ValidatorFunctionWrapHandler, WrapValidator
from pydantic._internal._model_construction import ModelMetaclass

from labkit.system.problem_words import problem_words

OF_PYDANTIC = frozenset(name for name in dir(BaseModel) if not name.startswith("_"))


class ListedType(ModelMetaclass):
    """A class whose `dir()` lists the names that it declares, without the 30 names that pydantic adds."""

    def __dir__(cls) -> list[str]:
        return without_pydantic([*super().__dir__(), *getattr(cls, "__pydantic_fields__", {})])


class Listed(BaseModel, metaclass=ListedType):
    """A pydantic model whose `dir()` lists only its own names, for completion in a notebook."""

    def __dir__(self) -> list[str]:
        return without_pydantic([*super().__dir__(), *type(self).model_fields])


def without_pydantic(names: Iterable[str]) -> list[str]:
    return sorted(set(names) - OF_PYDANTIC)


class Strict(Listed):
    """Options: values must have exactly the declared types, and undeclared names are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True, strict=True)


def first_problem(error: ValidationError, whole: str) -> str:
    """The first problem with its field. `whole`: the name to use if the problem concerns no single field."""
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc'])) or whole}: {problem_words(first)}"


def all_problems(error: ValidationError) -> str:
    """Every problem with its field and the value that it got, for options passed from Python."""
    return "; ".join(f"{'.'.join(map(str, item['loc']))}: {_with_value(item)}" for item in error.errors())


def one_problem(expected: str) -> WrapValidator:
    """For a field of several types, for each of which pydantic reports a problem of its own. A value that fits none of
    them becomes one problem. expected: the values that fit.
    """

    def validate(value: Any, fields: ValidatorFunctionWrapHandler) -> Any:
        try:
            return fields(value)
        except ValidationError as error:
            problems = [
                ": ".join((*map(str, item["loc"][1:]), _with_value(item)))
                for item in error.errors()
                if len(item["loc"]) > 1
            ] or [problem_words(item) for item in error.errors() if item["type"] == "value_error"]
            raise ValueError("; ".join(problems) or f"expected {expected}") from None

    return WrapValidator(validate)


def _with_value(problem: Any) -> str:
    value = "" if problem["type"] == "missing" else f"got {problem['input']!r}, "
    return value + problem_words(problem, an_object="a dict")
