"""One row per architecture: how a Hugging Face config and its tensors become a `ModelConfig` and canonical weights.

A row names the modules of its model by role. The same names find the tensors in a checkpoint and place the stage
annotations on a vanilla model. Adding an architecture is a new row, usually a `replace` of a close relative.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PretrainedConfig

from labkit.models.config import ModelConfig, Shapes
from labkit.models.config_checks import check_fields
from labkit.models.hf_config import (
    Fields,
    read_bloom,
    read_gpt2,
    read_gpt_neo,
    read_gpt_neox,
    read_gptj,
    read_llama,
    read_mistral,
    read_opt,
    read_qwen2,
    read_qwen3,
)
from labkit.models.shards import Cut, Shard
from labkit.system.errors import UserError

LINEARS = ("qkv", "attn_out", "ff1", "ff2")

GetTensor = Callable[[str, Cut | None], Tensor]  # Hugging Face's name -> the tensor, or the part that the cut takes


@dataclass(frozen=True, kw_only=True)
class Policy:
    """Where one architecture keeps its weights, and how to read its config.

    Module names are dotted paths: those of a layer relative to the layer, the others from the model. Several modules
    for one role (`qkv`, `ff1`) are concatenated along their output rows. `positions`, `embed_norm`, `project_in`,
    `project_out` and `final_norm` are missing from the models of a row that can do without them (OPT, encoders).

    `positions_from_mask`: which positions transformers gives the tokens of a `forward` that has no `position_ids`.
    True: a token's position is the number of visible tokens before it, counted in the attention mask. False: it is the
    number of all slots before it, whatever the mask hides. (`generate` itself counts in the mask, and passes
    `position_ids` to the models that take them.)
    """

    architecture: str
    model_type: str
    read: Callable[[PretrainedConfig], Fields]
    layers: str
    norm1: str
    qkv: tuple[str, ...]
    attention: str
    attn_out: str
    norm2: str | None
    ff1: tuple[str, ...]
    ff2: str
    tokens: str
    positions: str | None = None
    embed_norm: str | None = None
    project_in: str | None = None
    final_norm: str | None = None
    project_out: str | None = None
    head: str = "lm_head"
    q_norm: str | None = None
    k_norm: str | None = None
    transposed: bool = False  # linears are stored [in, out] (GPT-2's Conv1D)
    interleaved_qkv: bool = False  # QKV rows are stored [heads, 3, head_dim] (NeoX, BLOOM)
    renamed: tuple[tuple[str, str], ...] = ()  # module names of older checkpoints -> today's
    positions_from_mask: bool = False

    @property
    def embed(self) -> tuple[str, ...]:
        """The modules that make the first hidden state."""
        return tuple(name for name in (self.tokens, self.positions, self.embed_norm, self.project_in) if name)

    def model_config(self, hf_config: PretrainedConfig) -> ModelConfig:
        """The engine's description of the model.

        Raises UserError naming a field of a wrong type or size, or a switch that would not be computed exactly.
        """
        where = f"config of {self.architecture}"
        check_fields(vars(hf_config), where)
        try:
            fields = self.read(hf_config)
            return ModelConfig(architecture=self.architecture, positions_from_mask=self.positions_from_mask, **fields)
        except UserError as error:
            raise UserError(f"{where}: {error}") from error

    def top_tensors(self, shard: Shard, get: GetTensor) -> dict[str, Tensor]:
        """Canonical weights outside the layers, `shard.top_shapes` filled by `get(hf_name, cut)`."""
        return self._fill(shard, shard.top_shapes, "", get)

    def layer_tensors(self, shard: Shard, index: int, get: GetTensor) -> dict[str, Tensor]:
        """Canonical weights of one layer, `shard.layer_shapes` filled by `get(hf_name, cut)`.

        Tensors stored as one are views of what `get` returns; ValueError names a tensor of the wrong shape.
        """
        return self._fill(shard, shard.layer_shapes, f"{self.layers}.{index}.", get)

    def expected(self, config: ModelConfig) -> set[str]:
        """Hugging Face's names of all tensors that the model reads."""
        names = {part for name in config.top_shapes() for part in self._parts(name, "")}
        for index in range(config.num_layers):
            layer = f"{self.layers}.{index}."
            names |= {part for name in config.layer_shapes() for part in self._parts(name, layer)}
        return names

    def check(self, config: ModelConfig, names: Iterable[str]) -> None:
        """ValueError naming the tensors that are missing from, or unknown among, the `names` of a checkpoint."""
        expected, given = self.expected(config), set(names)
        allowed = expected | {f"{self.head}.weight"} if config.tied_head else expected
        missing = expected - given
        extra = {name for name in given - allowed if not _is_buffer(name)}
        if missing or extra:
            kinds = (("missing", missing), ("extra", extra))
            found = [f"{len(those)} {kind}: {_some(those)}" for kind, those in kinds if those]
            raise UserError(
                f"the tensors do not fit {self.architecture} with {config.num_layers} layers ({'; '.join(found)}); "
                "check that the checkpoint and its config.json belong together"
            )

    def current_name(self, stored: str) -> str:
        """Today's name of a tensor in a checkpoint, which may be older or hold the bare decoder without its prefix."""
        for old, new in self.renamed:
            if stored.startswith(f"{old}."):
                stored = new + stored.removeprefix(old)
        prefix = self.layers.split(".")[0]
        return stored if stored.startswith((f"{prefix}.", f"{self.head}.")) else f"{prefix}.{stored}"

    def stored_names(self, canonical: str, index: int | None = None) -> tuple[str, ...]:
        """Hugging Face's names of the tensors that make up a canonical weight, of layer `index` if of one."""
        return self._parts(canonical, "" if index is None else f"{self.layers}.{index}.")

    def stored(
        self, config: ModelConfig, canonical: str, tensor: Tensor, index: int | None = None
    ) -> dict[str, Tensor]:
        """A whole canonical weight, of layer `index` if of one -> Hugging Face's tensors that it is made of."""
        names = self.stored_names(canonical, index)
        role = canonical.split(".")[0]
        if len(names) == 3:
            rows = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
            parts = list(tensor.split([heads * config.head_dim for heads in rows]))
        else:
            parts = list(tensor.chunk(len(names)))
        if self.interleaved_qkv and role == "qkv":
            by_kind = tensor.view(3, config.num_heads, config.head_dim, *tensor.shape[1:])
            parts = [by_kind.transpose(0, 1).reshape(tensor.shape)]
        if self.transposed and role in LINEARS:
            parts = [part.T if part.ndim == 2 else part for part in parts]
        return dict(zip(names, parts, strict=True))

    def _parts(self, canonical: str, layer: str) -> tuple[str, ...]:
        role, kind = canonical.split(".")
        modules = getattr(self, "tokens" if role == "embed" else role)
        return tuple(f"{layer}{module}.{kind}" for module in ([modules] if isinstance(modules, str) else modules))

    def _fill(self, shard: Shard, shapes: Shapes, layer: str, get: GetTensor) -> dict[str, Tensor]:
        tensors = {}
        for name, shape in shapes.items():
            parts = self._parts(name, layer)
            cuts = self._cuts(shard, name, len(parts))
            got = [get(part, cut) for part, cut in zip(parts, cuts, strict=True)]
            tensor = self._arrange(shard.local, name, got)
            if tuple(tensor.shape) != shape:
                raise UserError(
                    f"{' + '.join(parts)} gives {name} of shape {list(tensor.shape)}, expected {list(shape)}; "
                    "check that the checkpoint and its config.json belong together"
                )
            tensors[name] = tensor
        return tensors

    def _cuts(self, shard: Shard, name: str, parts: int) -> list[Cut | None]:
        """What the shard holds of each stored part of a canonical weight, in the layout that it is stored in."""
        cut, config, (role, kind) = shard.cut(name), shard.config, name.split(".")
        if cut is None:
            return [None] * parts
        if role == "qkv" and parts == 3:
            key = shard.of_heads(shard.kv, config.num_kv_heads)
            return [shard.of_heads(shard.query, config.num_heads), key, key]
        if role == "qkv" and self.interleaved_qkv:
            heads = (3 * head + part for head in shard.query for part in range(3))
            cut = shard.of_heads(heads, 3 * config.num_heads)
        if role == "ff1" and parts == 2:
            return [shard.of_inner()] * 2
        if self.transposed and role in LINEARS and kind == "weight":
            cut = replace(cut, dim=1 - cut.dim)
        return [cut]

    def _arrange(self, config: ModelConfig, name: str, parts: list[Tensor]) -> Tensor:
        role = name.split(".")[0]
        if self.transposed and role in LINEARS:
            parts = [part.T if part.ndim == 2 else part for part in parts]
        tensor = parts[0] if len(parts) == 1 else torch.cat(parts)
        if self.interleaved_qkv and role == "qkv" and tensor.shape[0] == 3 * config.num_heads * config.head_dim:
            by_head = tensor.view(config.num_heads, 3, config.head_dim, *tensor.shape[1:])
            tensor = by_head.transpose(0, 1).reshape(tensor.shape)
        return tensor


def find_policy(hf_config: PretrainedConfig) -> Policy | None:
    """As `policy_for`; None where there is no row."""
    named = getattr(hf_config, "architectures", None) or []
    for policy in POLICIES.values():
        if policy.architecture in named or (not named and policy.model_type == hf_config.model_type):
            return policy
    return None


def policy_for(hf_config: PretrainedConfig, also: Iterable[str] = ()) -> Policy:
    """The row of a Hugging Face config, by its architecture, or by its model type when it names none. `also`: what the
    caller takes besides, for the ValueError that lists all.
    """
    if policy := find_policy(hf_config):
        return policy
    named = getattr(hf_config, "architectures", None) or []
    unknown = ", ".join(named) or f"model type {hf_config.model_type!r}"
    raise UserError(f"unknown architecture {unknown}; expected one of {', '.join((*POLICIES, *also))}")


def model_config_of(hf_config: PretrainedConfig) -> ModelConfig:
    """The engine's description of the model of a Hugging Face config. Raises UserError as `policy_for` does, and for a
    field that is wrong or not supported.
    """
    return policy_for(hf_config).model_config(hf_config)


def _is_buffer(name: str) -> bool:
    """Masks and frequencies that older checkpoints store beside the weights."""
    return name.endswith((".attn.bias", ".attention.bias", ".masked_bias", ".rotary_emb.inv_freq"))


def _some(names: set[str], most: int = 8) -> str:
    shown = sorted(names)[:most]
    return ", ".join(shown) + (f", … ({len(names) - most} more)" if len(names) > most else "")


GPT2 = Policy(
    architecture="GPT2LMHeadModel",
    model_type="gpt2",
    read=read_gpt2,
    layers="transformer.h",
    norm1="ln_1",
    qkv=("attn.c_attn",),
    attention="attn",
    attn_out="attn.c_proj",
    norm2="ln_2",
    ff1=("mlp.c_fc",),
    ff2="mlp.c_proj",
    tokens="transformer.wte",
    positions="transformer.wpe",
    final_norm="transformer.ln_f",
    transposed=True,
)
GPTJ = replace(
    GPT2,
    architecture="GPTJForCausalLM",
    model_type="gptj",
    read=read_gptj,
    qkv=("attn.q_proj", "attn.k_proj", "attn.v_proj"),
    attn_out="attn.out_proj",
    norm2=None,
    ff1=("mlp.fc_in",),
    ff2="mlp.fc_out",
    positions=None,
    transposed=False,
)
GPT_NEO = replace(
    GPT2,
    architecture="GPTNeoForCausalLM",
    model_type="gpt_neo",
    read=read_gpt_neo,
    qkv=("attn.attention.q_proj", "attn.attention.k_proj", "attn.attention.v_proj"),
    attention="attn.attention",
    attn_out="attn.attention.out_proj",
    transposed=False,
)
GPT_NEOX = Policy(
    architecture="GPTNeoXForCausalLM",
    model_type="gpt_neox",
    read=read_gpt_neox,
    layers="gpt_neox.layers",
    norm1="input_layernorm",
    qkv=("attention.query_key_value",),
    attention="attention",
    attn_out="attention.dense",
    norm2="post_attention_layernorm",
    ff1=("mlp.dense_h_to_4h",),
    ff2="mlp.dense_4h_to_h",
    tokens="gpt_neox.embed_in",
    final_norm="gpt_neox.final_layer_norm",
    interleaved_qkv=True,
    renamed=(("embed_out", "lm_head"),),
)
BLOOM = replace(
    GPT_NEOX,
    architecture="BloomForCausalLM",
    model_type="bloom",
    read=read_bloom,
    layers="transformer.h",
    qkv=("self_attention.query_key_value",),
    attention="self_attention",
    attn_out="self_attention.dense",
    tokens="transformer.word_embeddings",
    embed_norm="transformer.word_embeddings_layernorm",
    final_norm="transformer.ln_f",
    renamed=(),
    positions_from_mask=True,
)
OPT = Policy(
    architecture="OPTForCausalLM",
    model_type="opt",
    read=read_opt,
    layers="model.decoder.layers",
    norm1="self_attn_layer_norm",
    qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    attention="self_attn",
    attn_out="self_attn.out_proj",
    norm2="final_layer_norm",
    ff1=("fc1",),
    ff2="fc2",
    tokens="model.decoder.embed_tokens",
    positions="model.decoder.embed_positions",
    project_in="model.decoder.project_in",
    final_norm="model.decoder.final_layer_norm",
    project_out="model.decoder.project_out",
    positions_from_mask=True,
)
LLAMA = Policy(
    architecture="LlamaForCausalLM",
    model_type="llama",
    read=read_llama,
    layers="model.layers",
    norm1="input_layernorm",
    qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    attention="self_attn",
    attn_out="self_attn.o_proj",
    norm2="post_attention_layernorm",
    ff1=("mlp.gate_proj", "mlp.up_proj"),
    ff2="mlp.down_proj",
    tokens="model.embed_tokens",
    final_norm="model.norm",
)
MISTRAL = replace(LLAMA, architecture="MistralForCausalLM", model_type="mistral", read=read_mistral)
QWEN2 = replace(LLAMA, architecture="Qwen2ForCausalLM", model_type="qwen2", read=read_qwen2)
QWEN3 = replace(
    LLAMA,
    architecture="Qwen3ForCausalLM",
    model_type="qwen3",
    read=read_qwen3,
    q_norm="self_attn.q_norm",
    k_norm="self_attn.k_norm",
)

POLICIES: dict[str, Policy] = {
    policy.architecture: policy for policy in (GPT2, GPTJ, GPT_NEO, GPT_NEOX, BLOOM, OPT, LLAMA, MISTRAL, QWEN2, QWEN3)
}
