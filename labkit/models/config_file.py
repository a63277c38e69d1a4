"""Checks `config.json` of a checkpoint; transformers then reads it, without running code that comes with it."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig

from labkit.models.config_checks import check_fields
from labkit.models.policies import POLICIES
from labkit.system.errors import UserError
from labkit.system.json_file import read_json
from labkit.system.shown import shown, shown_value

CONFIG = "config.json"
REFUSALS = (StrictDataclassError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
OF_FIELD = re.compile(r"Validation error for field '(\w+)'")  # how a StrictDataclassFieldValidationError begins
KINDS = {  # by the names in the declared type of a field
    "int": "an integer",
    "float": "a number",
    "bool": "true or false",
    "str": "a string",
    "list": "a list",
    "list[int]": "a list of integers",
    "list[str]": "a list of strings",
    "dict": "an object",
    "None": "null",
}


def read_config(folder: Path) -> PretrainedConfig:
    """The config of the checkpoint in a folder. Raises UserError, naming the file, for one that cannot be used."""
    path = folder / CONFIG
    if not path.is_file():
        raise UserError(f"{folder} has no {CONFIG}; expected a folder that save_pretrained wrote")
    values = read_json(path, "the config that save_pretrained writes")
    if not isinstance(values, dict):
        raise UserError(f"{path} holds a {type(values).__name__}; expected an object with the fields of a model")
    check_fields(values, str(path))
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except REFUSALS as error:
        model_type = values.get("model_type", "")
        if model_type in CONFIG_MAPPING:
            raise UserError(
                f"{path}: {refused_fields(error, model_type, values)}; correct it, or get it again"
            ) from error
        kind = f"the unknown model_type {shown_value(model_type)}" if model_type else "no model_type"
        raise UserError(
            f"{path} has {kind}; expected the config of one of {', '.join(POLICIES)}; code that comes with a "
            "checkpoint is never run"
        ) from error


def refused_fields(error: Exception, model_type: str, values: Mapping[str, Any]) -> str:
    """Why transformers refuses these fields with this error, in one line without names of Python."""
    if field := OF_FIELD.match(str(error)):
        name = field[1]
        got = f" = {shown_value(values[name])}" if name in values else " is of a wrong type"
        return f"{name}{got}; expected {_expected(model_type, name)}"
    reason = str(error.__cause__ if isinstance(error, StrictDataclassError) else error)
    reason = textwrap.shorten(shown(" ".join(reason.replace("`", "").split())), 200, placeholder=" …").rstrip(".")
    return f"these fields make no {model_type}: {reason[:1].lower()}{reason[1:]}"


def _expected(model_type: str, name: str) -> str:
    """The right values of a field, by its declared type."""
    declared = CONFIG_MAPPING[model_type].__dataclass_fields__[name].type
    names = (declared.__name__ if isinstance(declared, type) else str(declared)).split(" | ")
    return " or ".join(KINDS[kind] for kind in names if kind in KINDS) or "a value as save_pretrained writes it"
