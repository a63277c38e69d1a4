"""`labkit_checkpoint.json`, which says what a checkpoint of labkit's holds.

It is written last: a folder that has it has all files of the checkpoint.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from labkit.models.config import ModelConfig
from labkit.models.dtypes import DTYPES
from labkit.system.errors import UserError
from labkit.system.json_file import read_json
from labkit.system.validation import first_problem
from labkit.weights.quantise import Quantization

MANIFEST = "labkit_checkpoint.json"
FORMAT = 3
READABLE = (2, 3)  # those of format 2 have no layers that could be streamed
Layout = Annotated[str, Field(pattern="^(panels|rows|words)$")]
Dtype = Annotated[str, Field(pattern=f"^({'|'.join(DTYPES)})$")]


class ManifestPart(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class MatrixRecord(ManifestPart):
    """A matrix of `outputs` rows and `inputs` columns, which a file holds packed in the `layout` of a `Linear`.

    Of a quantised matrix: `bits` of a code, `group`: how many inputs share a scale, and `row_group`: how many do before
    the matrix is cut between ranks; its scales are a tensor of the same file and layout. The groups are 0 for a matrix
    that is not quantised.
    """

    outputs: int = Field(ge=1)
    inputs: int = Field(ge=1)
    layout: Layout
    group: int = Field(default=0, ge=0)
    row_group: int = Field(default=0, ge=0)
    bits: Literal[4, 8] = 8


class LayerExtent(ManifestPart):
    """Where a layer stands in a file, as it can be read in one piece: offset and bytes are multiples of 4096.

    digest: XXH64 of these bytes, in hexadecimal.
    """

    layer: int = Field(ge=0)
    offset: int = Field(ge=0, multiple_of=4096)
    bytes: int = Field(ge=1, multiple_of=4096)
    digest: str = Field(pattern="^[0-9a-f]{16}$")


class FileRecord(ManifestPart):
    """The file of one rank: its size, the XXH3 digest of each tensor, the matrices among them, and the layers."""

    name: str
    bytes: int = Field(ge=0)
    digests: dict[str, str]
    matrices: dict[str, MatrixRecord]
    layers: list[LayerExtent] = []


class Manifest(ManifestPart):
    """What was saved, and in which files.

    `dtype`, `layout`: of the matrices; for the layouts see `kernels.types.Linear`. `quant`: how int8 ones were
    quantised, as the option of that name; None: they were quantised already. `save`: a name that all files of one save
    share, and no files of another.
    """

    format: int
    save: str
    architecture: str
    model: dict[str, Any]
    dtype: Dtype
    tp_size: int = Field(ge=1)
    layout: Layout
    quant: Quantization | None
    files: list[FileRecord]

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]


def described_model(config: ModelConfig) -> dict[str, Any]:
    """A model's description as JSON has it, to be compared with that of other weights.

    Which positions a forward makes up is left out: it says nothing of the weights, and older manifests do not have it.
    """
    described: dict[str, Any] = json.loads(json.dumps(asdict(config), default=sorted))
    del described["positions_from_mask"]
    return described


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of a folder; None: it has none. Raises UserError for one that is damaged or of another format."""
    path = folder / MANIFEST
    if not path.is_file():
        return None
    values = read_json(path, "the manifest that labkit writes last when it saves a checkpoint")
    if not isinstance(values, dict):
        raise UserError(f"{path} is damaged: it holds a {type(values).__name__}; save the checkpoint again")
    if values.get("format") not in READABLE:
        raise UserError(
            f"{path} has format {values.get('format')!r}; expected {FORMAT}: save it again with this labkit"
        )
    try:
        return Manifest.model_validate(values)
    except ValidationError as error:
        raise UserError(
            f"{path} is damaged ({first_problem(error, 'the manifest')}); save the checkpoint again"
        ) from error
