"""DeepSpeed's descriptions of checkpoints: their files, their kind, and the number of ranks that wrote them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError, field_validator
from transformers import PretrainedConfig

from labkit.models.config_file import CONFIG
from labkit.models.policies import policy_for
from labkit.system.errors import UserError
from labkit.system.home import expanded
from labkit.system.json_file import read_json
from labkit.system.validation import all_problems, one_problem
from labkit.weights.checkpoint.megatron import megatron_weights
from labkit.weights.checkpoint.saved import saved_weights
from labkit.weights.checkpoint.tensor_parallel import tensor_parallel_weights
from labkit.weights.listed_files import index_files, listed_path, stays_inside
from labkit.weights.protocol import TensorSource
from labkit.weights.source import Checkpoint, ModelSource, hf_shapes, some_weight_files

Type = Literal["Megatron", "ds_model", "BLOOM", "labkit"]
INDEX = ".index.json"
WRITTEN_BY_DEEPSPEED = "ds_inference_config.json"


class Shards(BaseModel):
    """The files of a checkpoint that was written for several ranks. `tp` lists all ranks of the first part, then all
    ranks of the second, and so on. `non_tp` lists files of the tensors that all ranks share.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    non_tp: list[str] = []
    tp: list[str]


class Description(BaseModel):
    """The contents of DeepSpeed's JSON file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    type: Type
    checkpoints: Annotated[
        str | list[str] | Shards, one_problem("the name of a file or folder, a list of names, or a dict with tp")
    ]
    version: float | None = None
    base_dir: str | None = None
    parallelization: Literal["tp", "pp"] | None = None
    tp_size: int | None = Field(default=None, validation_alias=AliasChoices("tp_size", "mp_size"))
    dtype: str | None = None

    @field_validator("type", mode="before")
    @classmethod
    def _known_type(cls, value: Any) -> Any:
        return next((known for known in get_args(Type) if known.lower() == str(value).lower()), value)


@dataclass(frozen=True)
class Listing:
    """The place in which the file names of a description are looked up."""

    folder: Path
    came_with: Path | None  # the description's file, if it is part of a checkpoint

    def path(self, name: str) -> Path:
        return self.folder / name if self.came_with is None else listed_path(self.folder, name, self.came_with)


def described_source(
    checkpoint: dict[str, Any] | str | Path, hf_config: PretrainedConfig, base_dir: str
) -> ModelSource:
    """The model of this config with the weights that `checkpoint` describes. Reads only names yet.

    checkpoint: a description as a dict or the path of its JSON file, or a folder with a checkpoint of labkit, DeepSpeed
    or `save_pretrained`. File names in a description are relative to `base_dir`, else to the description's own base_dir
    if it is a folder, else to the description's folder.

    A description that came with a checkpoint (DeepSpeed's own file, or any file next to a config.json) may only name
    files of its own folder, and its base_dir must not lead out of it. A dict, and a file in another place, are the
    caller's own words and may name any file.

    Raises UserError for a description or files that cannot be used, and for files of another model.
    """
    folder, came_with = expanded(base_dir), None
    if isinstance(checkpoint, str | Path):
        path = folder / expanded(checkpoint)
        if path.is_dir() and not (path / WRITTEN_BY_DEEPSPEED).is_file():
            folder = path.absolute()
            checkpoint = {"type": "ds_model", "checkpoints": str(folder)}
        else:
            path = path / WRITTEN_BY_DEEPSPEED if path.is_dir() else path
            checkpoint = _description_in(path)
            folder = folder if base_dir else path.parent
            came_with = path if path.name == WRITTEN_BY_DEEPSPEED or (path.parent / CONFIG).is_file() else None
    described = read_description(checkpoint)
    own = described.base_dir
    if own and not base_dir and (came_with is None or stays_inside(own)) and (folder / own).is_dir():
        folder = folder / own
    return ModelSource(
        hf_config.model_type,
        f"{described.type} checkpoint in {folder.absolute()}",
        hf_config,
        _weights(described, Listing(folder, came_with), hf_config),
    )


def read_description(values: Any) -> Description:
    """The description in these values. Raises UserError naming the wrong key, its value and the values it can have."""
    if not isinstance(values, dict):
        raise UserError(f"got {values!r}, expected a checkpoint's description: a dict with type and checkpoints")
    try:
        return Description.model_validate(values)
    except ValidationError as error:
        raise UserError(f"checkpoint description: {all_problems(error)}") from None


def _description_in(path: Path) -> Any:
    try:
        return read_json(path, "DeepSpeed's description, with type and checkpoints")
    except FileNotFoundError:
        raise UserError(f"{path} does not exist; expected a JSON description of a checkpoint or a folder") from None


def _weights(described: Description, listing: Listing, hf_config: PretrainedConfig) -> TensorSource:
    policy = policy_for(hf_config)
    config = policy.model_config(hf_config)
    listed = described.checkpoints
    if described.parallelization == "pp":
        raise UserError("parallelization 'pp' is not read; expected 'tp', or files that are not divided")
    if isinstance(listed, Shards):
        if described.tp_size is None:
            raise UserError("checkpoints names files of several ranks, and tp_size is missing; say how many ranks")
        non_tp, tp = ([listing.path(name) for name in names] for names in (listed.non_tp, listed.tp))
        return tensor_parallel_weights(non_tp, tp, described.tp_size, policy, config, hf_shapes(hf_config))
    names = [listed] if isinstance(listed, str) else listed
    if not names:
        raise UserError("checkpoints lists no file; expected at least one")
    paths = [listing.path(name) for name in names]
    own = saved_weights(paths[0], policy, config) if described.type == "labkit" or len(paths) == 1 else None
    if own is not None:
        return own
    if described.type == "labkit":
        raise UserError(f"{paths[0]} is no checkpoint of labkit's; expected a folder that it saved")
    if described.type == "Megatron":
        return megatron_weights(paths, described.version, policy, config)
    if described.version not in (None, 0.0, 1.0):
        raise UserError(f"version {described.version} of {described.type} is unknown; expected 1.0")
    files = [file for path in paths for file in _files(path)]
    return Checkpoint(files, policy, config)


def _files(path: Path) -> list[Path]:
    """The files that one entry of a list means: the file itself, the files of a folder, or the files of an index."""
    if path.name.endswith(INDEX):
        return index_files(path)
    return some_weight_files(path) if path.is_dir() else [path]
