"""The metadata of a GGUF file as fields of transformers' configs, as far as architectures have them in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from labkit.models.config_checks import check_fields
from labkit.system.errors import UserError
from labkit.weights.gguf.header import StoredTensor
from labkit.weights.gguf.metadata import Metadata

# llama.cpp computes with these. An architecture that does not name them as its own cannot have them.
SCALES = ("attention.scale", "attention.clamp_kqv", "logit_scale", "embedding_scale", "residual_scale")
EXPERTS = ("expert_count", "expert_shared_feed_forward_length", "leading_dense_block_count")
GROUPS = "expert_group_count"
PREDICTING = "nextn_predict_layers"  # layers after the last one, which guess further tokens
QUERY_BIAS = "blk.0.attn_q.bias"


@dataclass(frozen=True)
class Described:
    """The metadata of a file, by keys without its architecture, and its tensors."""

    architecture: str
    metadata: Metadata
    tensors: Mapping[str, StoredTensor]

    def key(self, name: str) -> str:
        return f"{self.architecture}.{name}"

    def size(self, name: str) -> int | None:
        return self.metadata.size(self.key(name))

    def needed_size(self, name: str) -> int:
        return self.metadata.needed_size(self.key(name))

    def number(self, name: str) -> float | None:
        return self.metadata.number(self.key(name))

    def flag(self, name: str) -> bool | None:
        return self.metadata.flag(self.key(name))

    def needed_number(self, name: str) -> float:
        value = self.number(name)
        if value is None:
            raise UserError(f"{self.metadata.path} has no {self.key(name)}; convert it again")
        return value

    @property
    def layers(self) -> int:
        """The number of layers, without the layers that guess further tokens."""
        count, predicting = self.needed_size("block_count"), self.size(PREDICTING) or 0
        if predicting and predicting >= count:
            raise UserError(
                f"{self.metadata.path}: {self.key(PREDICTING)} is {predicting}; expected less than "
                f"{self.key('block_count')}, {count}: convert it again"
            )
        return count - predicting

    def window_kinds(self, every: int) -> list[str]:
        """The kind of each layer's attention, as transformers names it. every: the last one of this many layers has no
        window, unless the file says which layers have one.
        """
        pattern = self.metadata.flags(self.key("attention.sliding_window_pattern"))
        pattern = [(index + 1) % every != 0 for index in range(self.layers)] if pattern is None else pattern
        if len(pattern) != self.layers:
            raise UserError(
                f"{self.metadata.path} has windows of {len(pattern)} of {self.layers} layers; convert it again"
            )
        if self.number("rope.freq_base_swa") not in (None, self.number("rope.freq_base")):
            raise UserError(f"{self.metadata.path}: {self.key('rope.freq_base_swa')} of its own is not supported")
        return ["sliding_attention" if windowed else "full_attention" for windowed in pattern]

    def numbers(self, **fields: str) -> dict[str, float]:
        """The numbers that the file has, by the names of transformers' fields."""
        values = {field: self.number(name) for field, name in fields.items()}
        return {field: value for field, value in values.items() if value is not None}


Fields = dict[str, Any]


@dataclass(frozen=True)
class GgufArchitecture:
    """An architecture of GGUF files.

    model_type: transformers' name, unless `read` gives another one.
    read: the fields of transformers' config; "partial_rotary_factor", "local_theta" and "truncate" (of YaRN) are of its
        `rope_parameters`.
    rotary: the positions are rotary, and the file may scale them.
    pairs_together: the two rows of a rotary pair of queries and keys lie next to each other.
    """

    model_type: str
    read: Callable[[Described], Fields]
    rotary: bool = True
    pairs_together: bool = False


def sizes_of(
    file: Described,
    *,
    scales: tuple[str, ...] = (),
    partial: bool = False,
    experts: tuple[str, ...] = (),
    inner: int | None = None,
) -> Fields:
    """The sizes of a model with rotary positions.

    scales: the keys of SCALES that the caller reads.
    partial: a part of a head may be rotated.
    experts: the keys of EXPERTS that the caller reads.
    inner: the width of the MLP if the file does not say it; None: it has to.
    """
    present = [key for key in SCALES if key not in scales and file.number(key)]
    present += [key for key in EXPERTS if key not in experts and file.size(key)]
    present += [GROUPS] if (file.size(GROUPS) or 1) > 1 else []
    present += ["attention.causal"] if file.flag("attention.causal") is False else []
    path = file.metadata.path
    if present:
        raise UserError(f"{path} has {file.key(present[0])}, which is not supported")
    width, heads = file.needed_size("embedding_length"), file.needed_size("attention.head_count")
    check_fields({"hidden_size": width, "num_attention_heads": heads}, str(path))
    head_dim = file.size("attention.key_length") or width // heads
    rotated = file.size("rope.dimension_count") or head_dim
    for key in ("attention.value_length", *(() if partial else ("rope.dimension_count",))):
        if (size := file.size(key) or head_dim) != head_dim:
            raise UserError(
                f"{path}: {file.key(key)} is {size} with heads of {head_dim}; expected {head_dim}: other sizes of "
                "values or of the rotary part are not supported"
            )
    if rotated > head_dim:
        raise UserError(f"{path}: {file.key('rope.dimension_count')} is {rotated} with heads of {head_dim}")
    kv_heads = file.size("attention.head_count_kv")
    inner = file.needed_size("feed_forward_length") if inner is None else file.size("feed_forward_length") or inner
    sizes = {
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": file.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads if kv_heads is None else kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": file.needed_size("context_length"),
    }
    return sizes | ({"partial_rotary_factor": rotated / head_dim} if partial else {})


def rms_of(file: Described) -> Fields:
    return {"rms_norm_eps": file.needed_number("attention.layer_norm_rms_epsilon")}
