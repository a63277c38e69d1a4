"""A GGUF file: its tensors with their types and places, and the config of its model."""

from __future__ import annotations

import re
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from transformers import GenerationConfig, PretrainedConfig

from labkit.models.policies import policy_for
from labkit.models.policy import Policy
from labkit.models.tensor_names import misfits
from labkit.system.errors import UserError
from labkit.weights.gguf.architectures import ARCHITECTURES
from labkit.weights.gguf.config import LONG_ROPE, ROPE_FACTORS, read_config
from labkit.weights.gguf.described import PREDICTING
from labkit.weights.gguf.header import Header, StoredTensor, is_gguf, read_header
from labkit.weights.gguf.metadata import Metadata
from labkit.weights.gguf.tokenizer import ends_of_turn, special_ids

if TYPE_CHECKING:
    from gguf import TensorNameMap

SUFFIX = ".gguf"
PART = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})(?P<suffix>\.[^.]*)?", re.DOTALL)
LAYER = re.compile(r"blk\.(?P<number>\d{1,6})\.")
MOST_PARTS = 1 << 12
ROLES = {"bos": "bos", "eos": "eos", "pad": "padding"}  # transformers' names of special tokens, and GGUF's


class GgufFile:
    """An opened file. A divided file is named by its first part; all parts are opened.

    Raises UserError for a file that is damaged, incomplete, of another version or of an unknown architecture.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        first = read_header(path)
        self.metadata = Metadata(path, first.metadata)
        headers = [first, *_further_parts(path, self.metadata)]
        self.files = [header.path for header in headers]
        self.tensors: dict[str, StoredTensor] = {}
        for header in headers:
            if twice := self.tensors.keys() & header.tensors.keys():
                raise UserError(
                    f"{header.path} has {min(twice)}, which an earlier part has too; download the parts again"
                )
            self.tensors |= header.tensors
        self.architecture = self.metadata.text("general.architecture") or ""
        if self.architecture not in ARCHITECTURES:
            raise UserError(
                f"{path} is of architecture {self.architecture!r}; expected one of {', '.join(ARCHITECTURES)}"
            )

    @cached_property
    def config(self) -> PretrainedConfig:
        """transformers' config of the model in the metadata. Raises UserError for metadata that describes no model."""
        config = read_config(self.architecture, self.metadata, self.tensors, self._specials)
        config.architectures = [policy_for(config).architecture]
        return config

    def names(self, policy: Policy) -> dict[str, str]:
        """Hugging Face's name -> GGUF's, for every tensor of the model.

        Raises UserError for tensors that are missing, and for tensors that the model does not have.
        """
        from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

        config = policy.model_config(self.config)
        architecture = next(key for key, name in MODEL_ARCH_NAMES.items() if name == self.architecture)
        name_map = get_tensor_name_map(architecture, config.num_layers)
        mapped = {name: self._name(name_map, name) for name in policy.expected(config)}
        names = {name: stored for name, stored in mapped.items() if stored is not None}
        read = set(names.values()) | ({ROPE_FACTORS} if ARCHITECTURES[self.architecture].rotary else set())
        rope = getattr(self.config, "rope_parameters", None) or {}
        read |= set(LONG_ROPE.values()) if rope.get("rope_type") == "longrope" else set()
        extra = {name for name in self.tensors.keys() - read if not self._predicts(name, config.num_layers)}
        missing = (set(names.values()) - self.tensors.keys()) | (mapped.keys() - names.keys())
        if extra or missing:
            raise UserError(
                f"the tensors of {self.path} do not fit {policy.architecture} with {config.num_layers} layers "
                f"({misfits(missing, extra)}); download or convert it again"
            )
        return names

    def _predicts(self, name: str, layers: int) -> bool:
        """Whether a tensor is of a layer that guesses further tokens, which is not read. layers: of the model."""
        count, layer = self.metadata.size(f"{self.architecture}.{PREDICTING}") or 0, LAYER.match(name)
        return layer is not None and layers <= int(layer["number"]) < layers + count

    @staticmethod
    def _name(name_map: TensorNameMap, name: str) -> str | None:
        """GGUF's name for Hugging Face's. The maps of some models leave out the model's own prefix. A parameter without
        an ending is a weight in the file.
        """
        spellings, endings = (name, name.partition(".")[2]), (".weight", ".bias")
        stored = next((found for key in spellings if (found := name_map.get_name(key, endings))), None)
        return stored if stored is None or stored.endswith(endings) else f"{stored}.weight"

    def generation_config(self) -> GenerationConfig:
        """The special tokens of the file, and every token that ends an answer."""
        ends = {"eos_token_id": self._ends[0] if len(self._ends) == 1 else list(self._ends)} if self._ends else {}
        return GenerationConfig(**(self._specials | ends))

    @cached_property
    def _ends(self) -> tuple[int, ...]:
        return ends_of_turn(self.metadata)

    @cached_property
    def _specials(self) -> dict[str, int]:
        """The ids of special tokens, by transformers' names."""
        ids = special_ids(self.metadata)
        return {f"{name}_token_id": ids[role] for name, role in ROLES.items() if role in ids}


def _further_parts(path: Path, metadata: Metadata) -> list[Header]:
    """The headers of all parts after the first. Raises UserError if `path` is a later part, or if a part is missing."""
    count, number = metadata.size("split.count") or 1, metadata.size("split.no") or 0
    if count == 1:
        return []
    named = PART.fullmatch(path.name)
    if named is None or int(named["count"]) != count or count > MOST_PARTS:
        raise UserError(
            f"{path} is part {number + 1} of {count}; expected a name that ends in -{1:05}-of-{count:05}.gguf, which "
            "tells the names of the other parts: give it the name that it was downloaded by"
        )
    parts = [
        path.with_name(f"{named['stem']}-{index:05}-of-{count:05}{named['suffix'] or ''}")
        for index in range(1, count + 1)
    ]
    if number != 0:
        raise UserError(f"{path} is part {number + 1} of {count}; give the first, {parts[0].name}")
    if absent := [part.name for part in parts[1:] if not part.is_file()]:
        raise UserError(f"{path} is the first of {count} parts, and {absent[0]} is missing; download it next to it")
    headers = [read_header(part) for part in parts[1:]]
    for index, header in enumerate(headers, 1):
        own = Metadata(header.path, header.metadata)
        if (own.size("split.no"), own.size("split.count")) != (index, count):
            raise UserError(f"{header.path} is not part {index + 1} of {count}; download it again")
    return headers


def gguf_in(path: Path) -> Path | None:
    """The GGUF file that a path means: the path itself, by first bytes or suffix, or the only GGUF file of a folder.

    None for anything else. Raises UserError for a folder with several.
    """
    if not path.is_dir():
        return path if path.suffix.lower() == SUFFIX or is_gguf(path) else None
    try:
        files = sorted(file for file in path.iterdir() if is_gguf(file))
    except OSError as error:
        raise UserError(f"the files in {path} can't be listed ({error.strerror}); expected a model's folder") from None
    firsts = [file for file in files if not (named := PART.fullmatch(file.name)) or int(named["number"]) == 1]
    if len(firsts) > 1:
        raise UserError(
            f"{path} holds {len(firsts)} GGUF files ({', '.join(file.name for file in firsts[:8])}); give one of them"
        )
    return next(iter(firsts or files), None)
