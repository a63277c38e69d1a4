"""Sources of a model's weights: seeded random numbers or a checkpoint. They are read one tensor at a time."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from pathlib import Path

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from labkit.models.chat_template import end_of_turn
from labkit.models.config import ModelConfig
from labkit.models.config_file import read_config
from labkit.models.dtypes import FLOAT_DTYPES, dtype_of
from labkit.models.policies import known_policy, policy_for
from labkit.models.policy import Policy
from labkit.models.shards import Cut, cut_of
from labkit.models.tensor_names import some_of, stored_buffers
from labkit.models.token_ids import check_token_ids
from labkit.models.tokenizer import byte_tokenizer
from labkit.system.errors import UserError, first_line
from labkit.system.json_file import read_json
from labkit.weights.checkpoint.files import TensorFile
from labkit.weights.checkpoint.mxfp4 import TensorInFile, with_stacks, without_mxfp4
from labkit.weights.checkpoint.saved import saved_weights
from labkit.weights.gguf.file import GgufFile
from labkit.weights.gguf.tensors import FLOATS, GgufTensors
from labkit.weights.gguf.tokenizer import read_tokenizer
from labkit.weights.hf_tensors import fill
from labkit.weights.listed_files import index_files
from labkit.weights.of_transformers import OfTransformers
from labkit.weights.protocol import TensorSource, identity_of_files, require_tied

CHUNK = 1 << 20  # random numbers that are drawn at once, in a buffer besides the tensor
ADAPTER = "adapter_config.json"
GENERATION = "generation_config.json"
TOKENIZER_SETTINGS = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


@dataclass(frozen=True)
class ModelSource:
    """A model that is described but not loaded: its config, its tokenizer, and its tensors one at a time.

    `origin`: a description of where the weights come from. Every result must carry it.
    """

    name: str
    origin: str
    hf_config: PretrainedConfig
    weights: TensorSource
    folder: Path | None = None  # the checkpoint's folder, if there is one
    gguf: Path | None = None  # the GGUF file of the weights, or of their packed checkpoint

    def names(self) -> set[str]:
        """The names of all tensors, as in the Hugging Face model."""
        return self.weights.names()

    def get(self, hf_name: str, dtype: torch.dtype | None = None, cut: Cut | None = None) -> Tensor:
        """One tensor, or the part of it that `cut` takes.

        Without a `dtype` it has its stored type. A tensor of the stored type may be mapped from a file. Random tensors
        are drawn as float32 and rounded to `dtype`; they do not depend on earlier calls.
        """
        return self.weights.get(hf_name, dtype, cut)

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The checkpoint's own tokenizer, padding on the left, or else a byte-level tokenizer.

        Raises UserError for a tokenizer that is damaged, needs code of the checkpoint, or has more tokens than the
        model.
        """
        if isinstance(self.weights, GgufTensors):
            return self._fitting(read_tokenizer(self.weights.file.metadata))
        if self.folder and any((self.folder / file).exists() for file in TOKENIZER_FILES):
            return self._fitting(_tokenizer(self.folder))
        return byte_tokenizer(self.hf_config.vocab_size, getattr(self.hf_config, "max_position_embeddings", None))

    def _fitting(self, tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
        # Added tokens, such as one for padding, may lie beyond the model's vocabulary; `vocab_size` leaves them out.
        if (size := tokenizer.vocab_size) > self.hf_config.vocab_size:
            raise UserError(
                f"the tokenizer of {self.name} has {size} tokens, the model {self.hf_config.vocab_size}; they do not "
                "belong together"
            )
        return tokenizer

    @property
    def generation_config(self) -> GenerationConfig | None:
        """The checkpoint's own generation config, or None, read anew each time. Raises UserError for a damaged file."""
        if isinstance(self.weights, GgufTensors):
            return self.weights.file.generation_config()
        return _generation_config(self.folder) if self.folder and (self.folder / GENERATION).exists() else None

    @property
    def ends(self) -> frozenset[int]:
        """The tokens that end an answer, from the generation config, the tokenizer and its chat template."""
        config = self.generation_config
        listed = None if config is None else config.eos_token_id
        of_turn = None if self.tokenizer.chat_template is None else end_of_turn(self.tokenizer)
        tokens = [*(listed if isinstance(listed, list) else [listed]), self.tokenizer.eos_token_id, of_turn]
        return frozenset(token for token in tokens if token is not None)

    def hf_model(self, dtype: torch.dtype) -> PreTrainedModel:
        """The vanilla Hugging Face model, in evaluation mode.

        It is built without memory and filled tensor by tensor, so it needs no more than its weights and one tensor.
        """
        dtype_of(dtype, FLOAT_DTYPES)
        if isinstance(self.weights, OfTransformers):
            return self.weights.model(dtype)
        model = empty_model(self.hf_config, dtype)
        fill(model, self.weights, copies=isinstance(self.weights, Checkpoint))
        model.tie_weights()
        if self.generation_config is not None:
            model.generation_config = self.generation_config
        return model.eval()


class RandomWeights:
    """Random weights as Hugging Face would initialise the model, except that norm weights and biases are random too.

    Linears and embeddings are N(0, initializer_range), biases N(0, 0.02), norm weights N(1, 0.1). Each tensor has a
    generator of its own, seeded by `seed` and the tensor's name.
    """

    def __init__(self, hf_config: PretrainedConfig, seed: int) -> None:
        self._seed = seed
        self.identity = f"random, seed {seed}"
        self._matrix_std = float(getattr(hf_config, "initializer_range", getattr(hf_config, "init_std", 0.02)))
        self._shapes = hf_shapes(hf_config)
        self._drawn = torch.empty(CHUNK)  # one buffer for all: a new one for each tensor would leave holes in the heap
        self._buffered = ("", -1)  # the tensor and the number of the chunk in the buffer
        self._generator = torch.Generator()

    def names(self) -> set[str]:
        return set(self._shapes)

    def get(self, name: str, dtype: torch.dtype | None = None, cut: Cut | None = None) -> Tensor:
        if name not in self._shapes:
            raise KeyError(f"no tensor {name!r} in this model; names() lists them")
        shape = self._shapes[name]
        if cut is None or cut.dim != 0 or len(cut.ranges) != 1 or cut.whole != shape[0]:
            whole = Cut(0, ((0, shape[0]),), shape[0])
            return cut_of(name, self.get(name, dtype, whole), cut)
        ((first, last),) = cut.ranges
        row = math.prod(shape[1:])
        tensor = torch.empty((last - first, *shape[1:]), dtype=dtype or torch.float32)
        numbers, begin, end = tensor.view(-1), first * row, last * row
        while begin < end:
            chunk = self._chunk(name, begin // CHUNK)[begin % CHUNK :][: end - begin]
            numbers[: len(chunk)] = chunk
            numbers, begin = numbers[len(chunk) :], begin + len(chunk)
        return tensor

    def _chunk(self, name: str, index: int) -> Tensor:
        """Numbers from index * CHUNK on of a flattened tensor. Chunks are drawn in order, so the next chunk is drawn
        directly, and an earlier one means starting again.
        """
        shape = self._shapes[name]
        mean, std = 0.0, self._matrix_std
        if len(shape) == 1:
            mean, std = (0.0, 0.02) if name.endswith(".bias") else (1.0, 0.1)
        if self._buffered[0] != name or self._buffered[1] > index:
            digest = blake2b(f"{self._seed}:{name}".encode(), digest_size=8).digest()
            self._generator.manual_seed(int.from_bytes(digest) >> 1)
            self._buffered = (name, -1)
        for drawn in range(self._buffered[1] + 1, index + 1):
            count = min(CHUNK, math.prod(shape) - drawn * CHUNK)
            self._drawn[:count].normal_(mean, std, generator=self._generator)
        self._buffered = (name, index)
        return self._drawn[: min(CHUNK, math.prod(shape) - index * CHUNK)]


class Checkpoint:
    """The tensors of these files by today's names, mapped from disk. No code in a file is run."""

    def __init__(self, files: list[Path], policy: Policy, config: ModelConfig) -> None:
        opened = [TensorFile(path) for path in files]
        self.identity, self.copies_to_convert = identity_of_files(files), True
        stored = with_stacks({name: TensorInFile(file, name) for file in opened for name in file.names()})
        current = policy.current_names(config, stored)
        self._places = {current[name]: place for name, place in stored.items() if name in current}
        head, tokens = f"{policy.head}.weight", f"{policy.tokens}.weight"
        if config.tied_head and head in self._places:
            self._places.setdefault(tokens, self._places[head])
        policy.check(config, self._places)
        if config.tied_head:
            require_tied(policy, self)

    def names(self) -> set[str]:
        return set(self._places)

    def get(self, name: str, dtype: torch.dtype | None = None, cut: Cut | None = None) -> Tensor:
        if name not in self._places:
            raise KeyError(f"no tensor {name!r} in this checkpoint; names() lists them")
        place = self._places[name]
        tensor = place.present(cut_of(name, place.get(), cut))
        return tensor if dtype is None else tensor.to(dtype)


def checkpoint_source(folder: Path, *, name: str, origin: str, any_architecture: bool = False) -> ModelSource:
    """The model in a folder that transformers wrote. Raises UserError where it is unknown, incomplete or damaged.

    any_architecture: also take a model without a policy row; only its `hf_model` can be used.
    """
    refuse_adapter(folder)
    hf_config = read_config(folder)
    if any_architecture and known_policy(hf_config) is None:
        weights = OfTransformers(folder, some_weight_files(folder))
        return ModelSource(name, origin, hf_config, weights, folder)
    policy = policy_for(hf_config)
    config = policy.model_config(without_mxfp4(hf_config))
    if saved := saved_weights(folder, policy, config):
        return ModelSource(name, origin, hf_config, saved, folder)
    return ModelSource(name, origin, hf_config, Checkpoint(some_weight_files(folder), policy, config), folder)


def gguf_source(path: Path, *, name: str, origin: str) -> ModelSource:
    """The model in a GGUF file. Raises UserError where it is unknown, incomplete or damaged.

    The origin says how many tensors are dequantised, by type.
    """
    file = GgufFile(path)
    tensors = GgufTensors(file, policy_for(file.config), hf_shapes)
    if not tensors.quantised:
        file.config.dtype = FLOATS[tensors.kind(f"{tensors.policy.tokens}.weight")]
    if tensors.inexact:
        counts = ", ".join(f"{count} in {kind}" for kind, count in tensors.inexact.items())
        origin = f"{origin} ({counts}: dequantised)"
    return ModelSource(name, origin, file.config, tensors, gguf=path)


def some_weight_files(folder: Path) -> list[Path]:
    """As `weight_files`, but raises UserError for a folder without weights."""
    refuse_adapter(folder)
    if files := weight_files(folder):
        return files
    if parts := [*folder.glob("model-*-of-*.safetensors"), *folder.glob("pytorch_model-*-of-*.bin")]:
        index = f"{min(parts).name.partition('-')[0]}{parts[0].suffix}.index.json"
        raise UserError(
            f"{folder} holds {some_of(path.name for path in parts)}, but no {index}, which lists the files of a "
            "divided checkpoint; download it too"
        )
    raise UserError(f"{folder} holds no weights; expected model*.safetensors or pytorch_model*.bin")


def refuse_adapter(folder: Path) -> None:
    """Raises UserError for a folder with an adapter: the adapter would have to be applied to the model's weights."""
    path = folder / ADAPTER
    if not path.is_file():
        return
    values = read_json(path, "the config of an adapter that peft writes")
    base = values.get("base_model_name_or_path") if isinstance(values, dict) else None
    raise UserError(
        f"{path} describes an adapter of {base or 'a model'}, which is not applied to the weights; merge it with peft: "
        f"AutoPeftModelForCausalLM.from_pretrained({str(folder)!r}).merge_and_unload().save_pretrained(...), and "
        f"take that folder; or remove {ADAPTER} to load the weights without it"
    )


def weight_files(folder: Path) -> list[Path]:
    """The files of the weights: safetensors, else PyTorch's, else none. As in transformers, a whole file is preferred
    to an index.

    Raises UserError for an index that is damaged or that lists a missing file.
    """
    for stem, suffix in (("model", "safetensors"), ("pytorch_model", "bin")):
        if (folder / f"{stem}.{suffix}").is_file():
            return [folder / f"{stem}.{suffix}"]
        index = folder / f"{stem}.{suffix}.index.json"
        if index.is_file():
            files = index_files(index)
            if absent := [file.name for file in files if not file.is_file()]:
                raise UserError(f"{folder} lacks {some_of(absent)}, which {index.name} lists; download it again")
            return files
    return []


def _tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    for name in TOKENIZER_SETTINGS:
        if (folder / name).is_file():
            read_json(folder / name, "the settings that save_pretrained writes")
    try:
        return AutoTokenizer.from_pretrained(folder, padding_side="left", trust_remote_code=False)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise UserError(
            f"transformers cannot read the tokenizer of {folder} ({first_line(error)}); expected the files that "
            "save_pretrained writes; code that comes with a checkpoint is never run"
        ) from error


def _generation_config(folder: Path) -> GenerationConfig:
    read_json(folder / GENERATION, "the settings that save_pretrained writes")
    try:
        config = GenerationConfig.from_pretrained(folder)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise UserError(
            f"transformers cannot read {folder / GENERATION} ({first_line(error)}); correct it or remove it"
        ) from error
    check_token_ids(vars(config), str(folder / GENERATION))
    return config


def hf_shapes(hf_config: PretrainedConfig) -> dict[str, tuple[int, ...]]:
    """The shapes of the tensors in a checkpoint of the Hugging Face model by name, without a tied head."""
    model = _meta_model(copy.deepcopy(hf_config), torch.float32)  # transformers notes the dtype in the config
    return {name: tuple(tensor.shape) for name, tensor in (*model.named_parameters(), *stored_buffers(model).items())}


def _meta_model(hf_config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(hf_config, dtype=dtype, trust_remote_code=False)
    except (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise UserError(
            f"transformers cannot build the model of this {type(hf_config).__name__} ({first_line(error)}); "
            "correct its config.json"
        ) from error


def empty_model(hf_config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The model with parameters on the meta device, and with its buffers (frequencies, masks) filled."""
    model = _meta_model(hf_config, dtype)
    fill_buffers(model)
    return model


def fill_buffers(model: PreTrainedModel) -> None:
    """Computes the buffers of a model on the meta device."""
    for name, buffer in list(model.named_buffers()):
        module, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(module), leaf, torch.empty_like(buffer, device="cpu"))
    model.initialize_weights()
