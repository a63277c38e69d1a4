"""What pydantic checks in options, and what it finds wrong with data, in words for the error that a reader raises."""

from pydantic import BaseModel, ConfigDict, ValidationError

from labkit.system.problem_words import problem_words


class Strict(BaseModel):
    """Options: values have the very types that are declared, and other names than the declared ones are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True, strict=True)


def first_problem(error: ValidationError, whole: str) -> str:
    """The field and what is wrong with it; `whole`: what to name where no field is to blame."""
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc'])) or whole}: {problem_words(first)}"


def all_problems(error: ValidationError) -> str:
    """Every field, what was got and what is wrong with it."""
    return "; ".join(
        f"{'.'.join(map(str, item['loc']))}: "
        + ("" if item["type"] == "missing" else f"got {item['input']!r}, ")
        + problem_words(item)
        for item in error.errors()
    )
