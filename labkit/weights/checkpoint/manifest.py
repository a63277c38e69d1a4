"""`labkit_checkpoint.json`: what a checkpoint of labkit's holds. It is written last, so where it is, all is there."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, ValidationError

from labkit.models.config import ModelConfig
from labkit.system.errors import UserError

MANIFEST = "labkit_checkpoint.json"
FORMAT = 1


class Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class MatrixRecord(Record):
    """A matrix in a file. `outputs`, `inputs`: what it is as a `Linear`, of which the stored shape is a packing.

    int8: `group` inputs share a scale, and the scales stand in the file beside it, in the same layout.
    """

    outputs: int
    inputs: int
    layout: str
    group: int = 0


class FileRecord(Record):
    """The file of one rank: the XXH3 digest of each tensor, and in `matrices` those that have a layout."""

    name: str
    bytes: int
    digests: dict[str, str]
    matrices: dict[str, MatrixRecord]


class Manifest(Record):
    """`dtype` of the matrices, with int8 in `groups` per row and the LM head with `lm_head`; `layout`: "panels", "rows"
    or "words", see `kernels.types.Linear`. `save`: the same in all files of one save and in no other.
    """

    format: int
    save: str
    architecture: str
    model: dict[str, Any]
    dtype: str
    tp_size: int
    layout: str
    groups: int
    lm_head: bool
    files: list[FileRecord]

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype = getattr(torch, self.dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype


def described_model(config: ModelConfig) -> dict[str, Any]:
    """A model's description as JSON has it, to be compared."""
    described: dict[str, Any] = json.loads(json.dumps(asdict(config), default=sorted))
    return described


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of a folder; None: it has none. Raises ValueError for one of another format or a damaged one."""
    path = folder / MANIFEST
    if not path.is_file():
        return None
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(values, dict) and values.get("format") != FORMAT:
            raise UserError(
                f"{path} has format {values.get('format')!r}; expected {FORMAT}: save it again with this labkit"
            )
        return Manifest(**values)
    except (json.JSONDecodeError, UnicodeDecodeError, TypeError, ValidationError) as error:
        raise UserError(f"{path} is damaged ({str(error).splitlines()[0]}); save the checkpoint again") from error
