"""Checks `config.json` of a checkpoint; transformers then reads it, without running code that comes with it."""

from __future__ import annotations

import textwrap
from pathlib import Path

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PretrainedConfig

from labkit.models.config_checks import check_fields
from labkit.models.policies import POLICIES
from labkit.system.errors import UserError
from labkit.system.json_file import read_json

CONFIG = "config.json"


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
    except (StrictDataclassError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        reason = textwrap.shorten(f"{type(error).__name__}: {error}", 200)
        raise UserError(
            f"transformers cannot read {path} as the config of a known architecture ({reason}); expected one of "
            f"{', '.join(POLICIES)}; code that comes with a checkpoint is never run"
        ) from error
