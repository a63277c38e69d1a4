"""What pydantic checks in options, and what it finds wrong with data, in words for the error that a reader raises."""

from collections.abc import Iterable

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic._internal._model_construction import ModelMetaclass

from labkit.system.problem_words import problem_words

OF_PYDANTIC = frozenset(name for name in dir(BaseModel) if not name.startswith("_"))


class ListedType(ModelMetaclass):
    """A class whose `dir()` has what it declares, without the 30 names that pydantic adds."""

    def __dir__(cls) -> list[str]:
        return without_pydantic([*super().__dir__(), *getattr(cls, "__pydantic_fields__", {})])


class Listed(BaseModel, metaclass=ListedType):
    """A model of pydantic whose `dir()`, which completion in a notebook shows, has what it declares."""

    def __dir__(self) -> list[str]:
        return without_pydantic([*super().__dir__(), *type(self).model_fields])


def without_pydantic(names: Iterable[str]) -> list[str]:
    return sorted(set(names) - OF_PYDANTIC)


class Strict(Listed):
    """Options: values have the very types that are declared, and other names than the declared ones are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True, strict=True)


def first_problem(error: ValidationError, whole: str) -> str:
    """The field and what is wrong with it; `whole`: what to name where no field is to blame."""
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc'])) or whole}: {problem_words(first)}"


def all_problems(error: ValidationError) -> str:
    """Every field of options that Python gives, what was got and what is wrong with it."""
    return "; ".join(
        f"{'.'.join(map(str, item['loc']))}: "
        + ("" if item["type"] == "missing" else f"got {item['input']!r}, ")
        + problem_words(item, an_object="a dict")
        for item in error.errors()
    )
