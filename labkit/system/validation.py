"""Pydantic models for options, and its validation errors in labkit's words."""

from collections.abc import Iterable

from pydantic import BaseModel, ConfigDict, ValidationError
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
    return "; ".join(
        f"{'.'.join(map(str, item['loc']))}: "
        + ("" if item["type"] == "missing" else f"got {item['input']!r}, ")
        + problem_words(item, an_object="a dict")
        for item in error.errors()
    )
