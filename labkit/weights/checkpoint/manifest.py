"""`labkit_checkpoint.json`, the manifest of a checkpoint of labkit's own.

It is written last: a folder that has it has all files of the checkpoint.
"""

from __future__ import annotations

import json
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from labkit.models.config import ExpertsSpec, ModelConfig
from labkit.models.dtypes import DTYPES
from labkit.system.errors import UserError
from labkit.system.json_file import read_json
from labkit.system.shown import shown_value
from labkit.system.validation import first_problem
from labkit.weights.quantise import Quantization

MANIFEST = "labkit_checkpoint.json"
FORMAT = 5
# Format 2 has no records of layers, so they cannot be streamed; format 3 no digests of experts. Before format 5 all
# ranks had a part of every expert.
READABLE = (2, 3, 4, 5)
Layout = Annotated[str, Field(pattern="^(panels|rows|words)$")]
Digest = Annotated[str, Field(pattern="^[0-9a-f]{16}$")]
Dtype = Annotated[str, Field(pattern=f"^({'|'.join(DTYPES)})$")]


class ManifestPart(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class MatrixRecord(ManifestPart):
    """A matrix of `outputs` rows and `inputs` columns, packed in the `layout` of a `Linear`.

    group: how many inputs share a scale; 0 if the matrix is not quantised.
    row_group: how many inputs share a scale before the matrix is cut between ranks; 0 if it is not quantised.
    bits: bits of a code of a quantised matrix.

    The scales of a quantised matrix are a tensor of the same file and layout.
    """

    outputs: int = Field(ge=1)
    inputs: int = Field(ge=1)
    layout: Layout
    group: int = Field(default=0, ge=0)
    row_group: int = Field(default=0, ge=0)
    bits: Literal[4, 8] = 8


class LayerExtent(ManifestPart):
    """The place of a layer in a file, which is read in one piece: offset and bytes are multiples of 4096.

    digest: XXH64 of these bytes, in hexadecimal.
    experts: a digest of each of its experts, see `stored_experts.expert_digests`.
    """

    layer: int = Field(ge=0)
    offset: int = Field(ge=0, multiple_of=4096)
    bytes: int = Field(ge=1, multiple_of=4096)
    digest: Digest
    experts: list[Digest] = []


class FileRecord(ManifestPart):
    """The file of one rank: its size, the XXH3 digest of each tensor, the matrices among them, and the layers."""

    name: str
    bytes: int = Field(ge=0)
    digests: dict[str, str]
    matrices: dict[str, MatrixRecord]
    layers: list[LayerExtent] = []


class Manifest(ManifestPart):
    """The saved model, and its files.

    save: a name that all files of one save share, different for each save.
    dtype, layout: of the matrices; for the layouts see `kernels.types.Linear`.
    quant: the option with which int8 matrices were quantised; None: they came as codes.
    tp_size, ep_size: number of ranks, and of the parts into which they divided the experts.
    """

    format: int
    save: str
    architecture: str
    model: dict[str, Any]
    dtype: Dtype
    tp_size: int = Field(ge=1)
    ep_size: int = Field(default=1, ge=1)
    layout: Layout
    quant: Quantization | None
    files: list[FileRecord]

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]


def described_model(config: ModelConfig) -> dict[str, Any]:
    """A model's description as JSON has it, for comparison with the description of other weights.

    `positions_from_mask` and `takes_position_ids` are left out: they say nothing about the weights, and older manifests
    do not have them.
    """
    described: dict[str, Any] = json.loads(json.dumps(asdict(config), default=sorted))
    del described["positions_from_mask"], described["takes_position_ids"]
    return described


def stored_description(manifest: Manifest) -> dict[str, Any]:
    """The description in a manifest. Fields that `ModelConfig` and `ExpertsSpec` got later have the values that they
    have by default.
    """
    stored = _defaults(ModelConfig) | manifest.model
    if isinstance(experts := stored["experts"], dict):
        stored["experts"] = _defaults(ExpertsSpec) | experts
    return stored


def _defaults(kind: type[ModelConfig | ExpertsSpec]) -> dict[str, Any]:
    """The fields of a class that have default values, as JSON has them."""
    defaults = {field.name: field.default for field in fields(kind) if field.default is not MISSING}
    described: dict[str, Any] = json.loads(json.dumps(defaults, default=sorted))
    return described


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of a folder, or None. Raises UserError for a manifest that is damaged or of another format."""
    path = folder / MANIFEST
    if not path.is_file():
        return None
    values = read_json(path, "the manifest that labkit writes last when it saves a checkpoint")
    if not isinstance(values, dict):
        raise UserError(f"{path} is damaged: it holds a {type(values).__name__}; save the checkpoint again")
    if values.get("format") not in READABLE:
        raise UserError(
            f"{path} has format {shown_value(values.get('format'))}; expected {FORMAT}: save it again with this labkit"
        )
    try:
        return Manifest.model_validate(values)
    except ValidationError as error:
        raise UserError(
            f"{path} is damaged ({first_problem(error, 'the manifest')}); save the checkpoint again"
        ) from error
