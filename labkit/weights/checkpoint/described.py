"""DeepSpeed's descriptions of checkpoints: which files, of what kind, written by how many ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError, field_validator
from transformers import PretrainedConfig

from labkit.models.policies import policy_for
from labkit.system.errors import UserError
from labkit.system.validation import all_problems
from labkit.weights.checkpoint.megatron import megatron_weights
from labkit.weights.checkpoint.saved import saved_weights
from labkit.weights.checkpoint.tensor_parallel import tensor_parallel_weights
from labkit.weights.protocol import TensorSource
from labkit.weights.source import Checkpoint, ModelSource, hf_shapes, weight_files

TYPES = ("Megatron", "ds_model", "BLOOM", "labkit")
INDEX = ".index.json"
WRITTEN_BY_DEEPSPEED = "ds_inference_config.json"


class Shards(BaseModel):
    """The files of a checkpoint that was written for several ranks; those of `tp` part by part, then rank by rank."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    non_tp: list[str] = []
    tp: list[str]


class Description(BaseModel):
    """What DeepSpeed's JSON says."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    type: Literal["Megatron", "ds_model", "BLOOM", "labkit"]
    checkpoints: str | list[str] | Shards
    version: float | None = None
    base_dir: str | None = None
    parallelization: Literal["tp", "pp"] | None = None
    tp_size: int | None = Field(default=None, validation_alias=AliasChoices("tp_size", "mp_size"))
    dtype: str | None = None

    @field_validator("type", mode="before")
    @classmethod
    def _known_type(cls, value: Any) -> Any:
        return next((known for known in TYPES if known.lower() == str(value).lower()), value)


def described_source(
    checkpoint: dict[str, Any] | str | Path, hf_config: PretrainedConfig, base_dir: str
) -> ModelSource:
    """The model of this config with the weights that `checkpoint` describes; nothing is read yet but names.

    checkpoint: a description as a dict or the path of its JSON file, or a folder: labkit's own checkpoint, one that
    DeepSpeed wrote, or one that `save_pretrained` wrote. File names in it are relative to `base_dir`, else to the
    description's own base_dir, else to the folder that it lies in.

    Raises ValueError for a description or files that can't be used, and for those of another model.
    """
    folder = Path(base_dir)
    if isinstance(checkpoint, str | Path):
        path = Path(base_dir) / checkpoint
        if path.is_dir() and not (path / WRITTEN_BY_DEEPSPEED).is_file():
            checkpoint = {"type": "ds_model", "checkpoints": str(path.absolute())}
        else:
            path = path / WRITTEN_BY_DEEPSPEED if path.is_dir() else path
            checkpoint = read_json(path)
            folder = folder if base_dir else path.parent
    described = read_description(checkpoint)
    if not base_dir and described.base_dir and (folder / described.base_dir).is_dir():
        folder = folder / described.base_dir
    return ModelSource(
        hf_config.model_type,
        f"{described.type} checkpoint in {folder}",
        hf_config,
        _weights(described, folder, hf_config),
    )


def read_description(values: Any) -> Description:
    """Raises ValueError for what is no description of a checkpoint, naming the key, what it is and what it can be."""
    if not isinstance(values, dict):
        raise UserError(f"a checkpoint's description is an object with type and checkpoints, got {values!r}")
    try:
        return Description(**values)
    except ValidationError as error:
        raise UserError(f"checkpoint description: {all_problems(error)}") from None


def read_json(path: Path) -> Any:
    """What a JSON file holds. Raises ValueError where there is none."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path} does not exist; expected a JSON description of a checkpoint or a folder") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(
            f"{path} is not JSON ({error}); expected DeepSpeed's description, with type and checkpoints"
        ) from None


def _weights(described: Description, folder: Path, hf_config: PretrainedConfig) -> TensorSource:
    policy = policy_for(hf_config)
    config = policy.model_config(hf_config)
    listed = described.checkpoints
    if described.parallelization == "pp":
        raise UserError("parallelization 'pp' is not read; expected 'tp', or files that are not divided")
    if isinstance(listed, Shards):
        if described.tp_size is None:
            raise UserError("checkpoints names files of several ranks, and tp_size is missing; say how many ranks")
        non_tp, tp = ([folder / name for name in names] for names in (listed.non_tp, listed.tp))
        return tensor_parallel_weights(non_tp, tp, described.tp_size, policy, config, hf_shapes(hf_config))
    names = [listed] if isinstance(listed, str) else listed
    if not names:
        raise UserError("checkpoints lists no file; expected at least one")
    if described.type == "labkit" or (len(names) == 1 and (own := saved_weights(folder / names[0], policy, config))):
        own = saved_weights(folder / names[0], policy, config)
        if own is None:
            raise UserError(f"{folder / names[0]} is no checkpoint of labkit's; expected a folder that it saved")
        return own
    if described.type == "Megatron":
        return megatron_weights([folder / name for name in names], described.version, policy, config)
    if described.version not in (None, 0.0, 1.0):
        raise UserError(f"version {described.version} of {described.type} is unknown; expected 1.0")
    files = [file for name in names for file in _files(folder / name)]
    return Checkpoint(files, policy, config)


def _files(path: Path) -> list[Path]:
    """The files that one entry of a list stands for: itself, those of a folder, or those of an index."""
    if path.name.endswith(INDEX):
        return sorted({path.parent / file for file in read_json(path)["weight_map"].values()})
    if path.is_dir():
        if not (files := weight_files(path)):
            raise UserError(f"{path} holds no weights; expected model*.safetensors or pytorch_model*.bin")
        return files
    return [path]
