"""A GGUF file: which tensors it has, of which type and where, and the config of its model."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PretrainedConfig, PreTrainedTokenizerBase

from labkit.kernels.memory import return_freed_memory
from labkit.models.policies import policy_for
from labkit.models.policy import Policy
from labkit.system.errors import UserError
from labkit.weights.checkpoint.files import first_line

if TYPE_CHECKING:
    from gguf import ReaderTensor, TensorNameMap

SUFFIX = ".gguf"
MAGIC = b"GGUF"
VERSIONS = (2, 3)
ARCHITECTURES = ("llama", "gpt2", "bloom", "qwen2", "qwen3")  # that labkit and transformers' reader of GGUF know
DAMAGE = (ArithmeticError, AttributeError, LookupError, OSError, TypeError, ValueError)  # what readers of it raise


class GgufFile:
    """An opened file. Raises UserError for one that is damaged, of another version or of an unknown architecture."""

    def __init__(self, path: Path) -> None:
        self.path = path
        _check_header(path)
        try:
            self.tensors, self._values = _read(path)
        except DAMAGE as error:
            raise self._damaged(error) from error
        self.architecture = str(self.value("general.architecture"))
        if self.architecture not in ARCHITECTURES:
            raise UserError(
                f"{path} is of architecture {self.architecture!r}; expected one of {', '.join(ARCHITECTURES)}"
            )

    def value(self, key: str) -> object:
        """A value of the file's metadata, but for lists; None where it has none."""
        return self._values.get(key)

    @cached_property
    def config(self) -> PretrainedConfig:
        """As transformers reads it from the metadata."""
        try:
            config: PretrainedConfig = AutoConfig.from_pretrained(
                self.path.parent, gguf_file=self.path.name, trust_remote_code=False
            )
        except DAMAGE as error:
            raise self._damaged(error) from error
        return_freed_memory()  # of a vocabulary, which was read beside it
        self._complete(config)
        config.architectures = [self.policy_of(config).architecture]
        return config

    def _complete(self, config: PretrainedConfig) -> None:
        """With the sizes that transformers does not read from the metadata of every architecture."""
        sizes = {"max_position_embeddings": "context_length", "head_dim": "attention.key_length"}
        for name, key in sizes.items():
            found = self.value(f"{self.architecture}.{key}")
            if found is not None and hasattr(config, name):
                setattr(config, name, int(str(found)))

    @staticmethod
    def policy_of(config: PretrainedConfig) -> Policy:
        return policy_for(config)

    def names(self, policy: Policy) -> dict[str, str]:
        """Hugging Face's name -> GGUF's, of every tensor of the model that the file has or should have.

        Raises UserError for tensors that the model does not have.
        """
        from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

        config = policy.model_config(self.config)
        kind = next(each for each, name in MODEL_ARCH_NAMES.items() if name == self.architecture)
        known = get_tensor_name_map(kind, config.num_layers)
        found = {name: self._name(known, name) for name in policy.expected(config)}
        names = {name: stored for name, stored in found.items() if stored is not None}
        head = f"{policy.head}.weight"
        if config.tied_head and "output.weight" in self.tensors:
            names[head] = "output.weight"
        held = self.tensors
        extra = {name for name in held.keys() - set(names.values()) if not name.startswith("rope_")}
        missing = {stored for stored in names.values() if stored not in held} | (found.keys() - names.keys())
        if extra or missing:
            kinds = (("missing", missing), ("extra", extra))
            told = "; ".join(f"{len(some)} {kind}: {', '.join(sorted(some)[:8])}" for kind, some in kinds if some)
            raise UserError(
                f"the tensors of {self.path} do not fit {policy.architecture} with {config.num_layers} layers "
                f"({told}); download or convert it again"
            )
        return names

    @staticmethod
    def _name(known: TensorNameMap, name: str) -> str | None:
        """GGUF's name for Hugging Face's, which the map of some models has without the model's own prefix."""
        spellings = (name, name.partition(".")[2])
        return next((got for each in spellings if (got := known.get_name(each, (".weight", ".bias")))), None)

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The file's own, padding on the left, with its chat template."""
        try:
            tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
                self.path.parent, gguf_file=self.path.name, padding_side="left", trust_remote_code=False
            )
        except Exception as error:  # the library of tokenizers raises no other class
            raise UserError(f"transformers cannot read the tokenizer of {self.path} ({first_line(error)})") from error
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        return tokenizer

    def generation_config(self) -> GenerationConfig:
        """The special tokens of the file."""
        kinds = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
        ids = {name: self.value(f"tokenizer.ggml.{kind}_token_id") for name, kind in kinds.items()}
        return GenerationConfig(**{name: int(str(found)) for name, found in ids.items() if found is not None})

    def _damaged(self, error: Exception) -> UserError:
        return UserError(f"{self.path} is damaged or cut off ({first_line(error)}); download or convert it again")


def _read(path: Path) -> tuple[dict[str, ReaderTensor], dict[str, object]]:
    """The tensors by GGUF's names, and the values that are no lists: the reader makes several objects for each word of
    a vocabulary, more than the weights of a small model take.
    """
    from gguf import GGUFReader, GGUFValueType

    reader = GGUFReader(path)
    single = {key: field for key, field in reader.fields.items() if field.types[:1] != [GGUFValueType.ARRAY]}
    return {tensor.name: tensor for tensor in reader.tensors}, {key: one.contents() for key, one in single.items()}


def _check_header(path: Path) -> None:
    try:
        with path.open("rb") as file:
            magic, version = file.read(4), int.from_bytes(file.read(4), "little")
    except OSError as error:
        raise UserError(f"{path} can't be read ({error.strerror}); expected a GGUF file") from None
    if magic != MAGIC:
        raise UserError(f"{path} begins with {magic!r}, expected {MAGIC!r}: it is no GGUF file")
    if version not in VERSIONS:
        raise UserError(
            f"{path} is of GGUF version {version}; expected {' or '.join(map(str, VERSIONS))}: convert it again"
        )
