"""A policy says where one architecture keeps its weights, and how they become canonical weights and back."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import takewhile

import torch
from torch import Tensor
from transformers import PretrainedConfig

from labkit.models.config import CHOICE_BIAS, ModelConfig
from labkit.models.config_checks import check_fields
from labkit.models.expert_names import FIRST, GATE_APART, SECOND, ExpertNames
from labkit.models.hf_config import Fields
from labkit.models.qkv_rows import by_kind, by_kv_head, heads_of_rank, shapes_of_parts
from labkit.models.shards import Cut, Shard
from labkit.models.tensor_names import is_buffer, misfits, remedy, some_of
from labkit.system.errors import UserError

LINEARS = ("qkv", "attn_out", "ff1", "ff2")
PARAMETERS = {"sinks.weight": "sinks", CHOICE_BIAS: "choice_bias"}  # weights whose field names a tensor, not a module
# Names that torch.compile, FSDP, activation checkpointing and DeepSpeed insert into the names of tensors.
WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module")
STATE = "state_dict."  # the weights in a file that a trainer wrote, next to its own state
MOST_PREFIXES = 8  # parts of a common prefix of names, at most

GetTensor = Callable[[str, Cut | None], Tensor]  # Hugging Face's name -> the tensor, or the part that the cut takes


@dataclass(frozen=True, kw_only=True)
class Policy:
    """Says where one architecture keeps its weights, and how to read its config.

    Module names are dotted paths, relative to the layer for modules of a layer, else to the model. Several modules
    for one role (`qkv`, `ff1`) are concatenated along their output rows. `positions`, `embed_norm`, `project_in`,
    `project_out` and `final_norm` may be missing from a model although its row names them (OPT, encoders).

    `positions_from_mask`: the positions that transformers gives the tokens of a `forward` without `position_ids`.
    True: a token's position is the number of visible tokens before it, counted in the attention mask. False: it is the
    number of all tokens before it, hidden ones included. (`generate` itself counts in the mask, and passes
    `position_ids` to the models that take them.)
    `takes_position_ids`: whether the class's own `forward` takes them. False (BART): they are left out, in `generate`
    as well.
    """

    architecture: str
    model_type: str
    read: Callable[[PretrainedConfig], Fields]
    layers: str
    norm1: str
    qkv: tuple[str, ...]
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
    sinks: str = ""  # the tensor of attention sinks
    attn_out_norm: str | None = None
    mlp_out_norm: str | None = None
    router: str | None = None
    choice_bias: str = ""  # a tensor of a layer, not a module
    choice_bias_shape: tuple[int, ...] = (-1,)
    experts: ExpertNames | None = None  # with them `ff1` and `ff2` are the module of the experts
    shared_ff1: tuple[str, ...] = ()
    shared_ff2: str = ""
    shared_gate: str = ""
    dense_ff1: tuple[str, ...] = ()  # of layers with an MLP instead of experts
    dense_ff2: str = ""
    transposed: bool = False  # linears are stored [in, out] (GPT-2's Conv1D)
    interleaved_qkv: bool = False  # QKV rows are stored [KV heads, query heads of each + 2, head_dim] (NeoX, BLOOM)
    renamed: tuple[tuple[str, str], ...] = ()  # module names of older checkpoints -> today's
    renamed_in_layer: tuple[tuple[str, str], ...] = ()  # beginnings of names within a layer -> today's
    positions_from_mask: bool = False
    takes_position_ids: bool = True
    token_types: bool = False  # `forward` adds embeddings of token_type_ids
    unread: tuple[str, ...] = ()  # modules of a layer whose weights no forward of this class reads
    ignored: tuple[str, ...] = ()  # patterns of names of tensors that transformers leaves out when it loads the class
    covers: Callable[[PretrainedConfig], bool] = lambda hf: True  # False: a config that needs another computation
    # Tensors that the kernels need and the class does not have, by their names in a layer or in the model, with the
    # constant that they consist of: 0 for a bias that one of the linears of qkv lacks, 1 for norms without weights.
    filled: tuple[tuple[str, float], ...] = ()

    def model_config(self, hf_config: PretrainedConfig) -> ModelConfig:
        """The engine's description of the model.

        Raises UserError naming a field of a wrong type or size, or a switch that would not be computed exactly.
        """
        where = f"config of {self.architecture}"
        check_fields(vars(hf_config), where)
        try:
            fields = self.read(hf_config)
            return ModelConfig(
                architecture=self.architecture,
                positions_from_mask=self.positions_from_mask,
                takes_position_ids=self.takes_position_ids,
                **fields,
            )
        except UserError as error:
            raise UserError(f"{where}: {error}") from error

    def top_tensors(self, shard: Shard, get: GetTensor) -> dict[str, Tensor]:
        """Canonical weights outside the layers, see `tensor`."""
        return {name: self.tensor(shard, name, None, get) for name in shard.top_shapes}

    def layer_tensors(self, shard: Shard, index: int, get: GetTensor) -> dict[str, Tensor]:
        """Canonical weights of one layer, see `tensor`."""
        return {name: self.tensor(shard, name, index, get) for name in shard.shapes_of(index)}

    def tensor(self, shard: Shard, name: str, index: int | None, get: GetTensor) -> Tensor:
        """The canonical weight `name` of layer `index`, or outside the layers with `index` None, made of the tensors
        that `get(hf_name, cut)` returns.

        A weight that is stored as one tensor is a view of the tensor from `get`. Raises UserError naming a tensor of
        the wrong shape.
        """
        pieces = self.pieces(shard, name, index, get)
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def pieces(self, shard: Shard, name: str, index: int | None, get: GetTensor) -> list[Tensor]:
        """As `tensor`, in pieces: their rows one after the other are the rows of the weight."""
        pieces = self._arranged(shard, name, index, get)
        shape = [*pieces[0].shape]
        if len(pieces) > 1:
            shape[0] = sum(map(len, pieces))
        expected = [*(shard.top_shapes if index is None else shard.layer_shapes)[name]]
        if shape != expected:
            raise UserError(
                f"{' + '.join(self.stored_names(name, index))} gives {name} of shape {shape}, expected {expected}; "
                "check that the weights and the config belong together"
            )
        return pieces

    def assembled(self, shard: Shard, name: str, index: int | None, get: GetTensor) -> Tensor:
        """As `tensor`, for any tensors with a matrix's rows in their first dimension, such as its scales."""
        pieces = self._arranged(shard, name, index, get)
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def expected(self, config: ModelConfig) -> set[str]:
        """Hugging Face's names of all tensors that the model reads."""
        names = {stored for name in config.top_shapes() for stored in self.stored_names(name)}
        for index in range(config.num_layers):
            names |= {stored for name in config.layer_shapes(index) for stored in self.stored_names(name, index)}
        return {name for name in names if self._filling(name) is None}

    def as_stored(self, config: ModelConfig, names: Iterable[str]) -> Policy:
        """This row, for weights with these names: experts may be in stacks or apart."""
        if self.experts is None or config.experts is None:
            return self
        begin = self._begin_of_experts(config)
        within = {name.removeprefix(begin) for name in names if name.startswith(begin)}
        experts = self.experts.as_stored(config.experts.count, within)
        others = experts.other_names(self.choice_bias, self.shared_ff1, config.gated)
        return replace(self, experts=experts, **others)

    def in_checkpoint(self, config: ModelConfig) -> Policy:
        """This row, with the names of experts in a checkpoint of transformers."""
        if self.experts is None or not self.experts.apart[0]:
            return self
        return self.as_stored(config, [f"{self._begin_of_experts(config)}{self.experts.apart[1].format(0)}.weight"])

    def in_gguf(self, config: ModelConfig) -> Policy:
        """This row, with the names of experts in a GGUF file."""
        return self.as_stored(config, [f"{self._begin_of_experts(config)}{GATE_APART[1]}.weight"])

    def _begin_of_experts(self, config: ModelConfig) -> str:
        """The beginning of the names in the first layer with experts."""
        return f"{self.layers}.{next(filter(config.has_experts, range(config.num_layers)), 0)}."

    def check(self, config: ModelConfig, names: Iterable[str]) -> None:
        """Raises UserError naming the tensors that a checkpoint's `names` lack, or that the model does not have."""
        names = set(names)
        missing, extra = self._misfits(self.as_stored(config, names).expected(config), config, names)
        if missing or extra:
            raise UserError(
                f"the tensors do not fit {self.architecture} with {config.num_layers} layers "
                f"({misfits(missing, extra)}); "
                f"{remedy(missing, extra, architecture=self.architecture, layers=self.layers, head=self.head)}"
            )

    def _misfits(self, expected: set[str], config: ModelConfig, stored: set[str]) -> tuple[set[str], set[str]]:
        """The expected names that are not stored, and the stored names that the model does not have."""
        allowed = expected | {f"{self.head}.weight"} if config.tied_head else expected
        extra = {name for name in stored - allowed if not is_buffer(name) and not self._is_unread(name)}
        return expected - stored, extra

    def within_layer(self, name: str) -> str | None:
        """The name of a module or a tensor relative to its layer; None: it is in no layer."""
        return name.removeprefix(f"{self.layers}.").partition(".")[2] if name.startswith(f"{self.layers}.") else None

    def _is_unread(self, stored: str) -> bool:
        """Whether no forward of the class reads a tensor."""
        within = self.within_layer(stored) or ""
        unread = within.startswith(tuple(f"{name}." for name in self.unread))
        return unread or any(re.search(pattern, stored) for pattern in self.ignored)

    def current_name(self, stored: str) -> str:
        """Today's name of a tensor in a checkpoint. Older checkpoints have other names. Names of a bare decoder lack
        the prefix, and names of a compiled or distributed model have one more.
        """
        stored = ".".join(part for part in stored.split(".") if part not in WRAPPERS)
        while stored.startswith("module."):
            stored = stored.removeprefix("module.")
        for old, new in self.renamed:
            if stored.startswith(f"{old}."):
                stored = new + stored.removeprefix(old)
        prefix = self.layers.split(".")[0]
        if not stored.startswith((f"{prefix}.", f"{self.head}.")):
            stored = f"{prefix}.{stored}"
        within = self.within_layer(stored) or ""
        for old, new in self.renamed_in_layer:
            if within.startswith(old):
                return stored.removesuffix(within) + new + within.removeprefix(old)
        return stored

    def published_name(self, name: str) -> str:
        """The name in a checkpoint of a tensor of today's class, where `current_name` renames parts of layers."""
        within = self.within_layer(name) or ""
        for old, new in self.renamed_in_layer:
            if within.startswith(new):
                return name.removesuffix(within) + old + within.removeprefix(new)
        return name

    def current_names(self, config: ModelConfig, stored: Iterable[str]) -> dict[str, str]:
        """Today's names of the tensors of a whole checkpoint, by their stored names.

        A trainer writes its own module's prefix before all names. This takes away the common prefix whose removal
        leaves the fewest names that do not fit. A file with a `state_dict` has the model's tensors only there.
        """
        names, expected = set(stored), self.expected(config)
        names = {name for name in names if name.startswith(STATE)} or names
        first, last = min(names, default="").split("."), max(names, default="").split(".")
        pairs = takewhile(lambda pair: pair[0] == pair[1], zip(first[:-1], last[:MOST_PREFIXES], strict=False))
        shared = [part for part, _ in pairs]
        prefixes = ["".join(f"{part}." for part in shared[:parts]) for parts in range(len(shared) + 1)]
        ways = [{name: self.current_name(name.removeprefix(prefix)) for name in names} for prefix in prefixes]
        return min(ways, key=lambda way: sum(map(len, self._misfits(expected, config, set(way.values())))))

    def stored_names(self, canonical: str, index: int | None = None) -> tuple[str, ...]:
        """Hugging Face's names of the tensors of a canonical weight. `index`: its layer; None outside the layers."""
        role, kind = canonical.split(".")
        layer = "" if index is None else f"{self.layers}.{index}."
        if experts := self._experts_of(role):
            return tuple(f"{layer}{name}" for name in experts.of(role, kind))
        if field := PARAMETERS.get(canonical):
            return (f"{layer}{getattr(self, field)}",)
        return tuple(f"{layer}{module}.{kind}" for module in self.modules("tokens" if role == "embed" else role))

    def modules(self, role: str) -> tuple[str, ...]:
        """The modules of a role."""
        modules = getattr(self, role)
        return (modules,) if isinstance(modules, str) else modules

    def stored(
        self, config: ModelConfig, canonical: str, tensor: Tensor, index: int | None = None
    ) -> dict[str, Tensor]:
        """The Hugging Face tensors that make up a whole canonical weight. `index`: its layer; None: outside them."""
        names = self.stored_names(canonical, index)
        role = canonical.split(".")[0]
        if experts := self._experts_of(role):
            assert config.experts is not None
            parts = experts.stored(role, tensor, config.experts.count)
        elif role == "qkv" and len(names) == 3:
            rows = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
            parts = list(tensor.split([heads * config.head_dim for heads in rows]))
        else:
            parts = list(tensor.chunk(len(names)))
        if canonical == CHOICE_BIAS:
            parts = [tensor.view(self.choice_bias_shape)]
        if self.interleaved_qkv and role == "qkv":
            parts = [by_kv_head(tensor, config)]
        if self.transposed and role in LINEARS:
            parts = [part.T if part.ndim == 2 else part for part in parts]
        tensors = zip(names, parts, strict=True)
        return {name: part for name, part in tensors if self._filling(name) is None}

    def _filling(self, stored: str) -> float | None:
        """The constant of a tensor that the class lacks; None: it has the tensor."""
        within = self.within_layer(stored)
        return dict(self.filled).get(stored if within is None else within)

    def _cuts(self, shard: Shard, name: str, parts: int) -> list[Cut | None]:
        """The shard's part of each stored tensor of a canonical weight, in the layout of that tensor."""
        cut, config, (role, kind) = shard.cut(name), shard.config, name.split(".")
        if experts := self._experts_of(role):
            return experts.cuts(shard, role, kind, parts)
        if cut is None:
            return [None] * parts
        if role == "qkv" and parts == 3:
            key = shard.of_heads(shard.kv, config.num_kv_heads)
            return [shard.of_heads(shard.query, config.num_heads), key, key]
        if role == "qkv" and self.interleaved_qkv:
            cut = shard.of_heads(heads_of_rank(shard), config.num_heads + 2 * config.num_kv_heads)
        halves = {"ff1": shard.of_inner, "shared_ff1": shard.of_shared, "dense_ff1": shard.of_dense}
        if parts == 2 and role in halves:
            return [halves[role]()] * 2
        if self.transposed and role in LINEARS and kind == "weight":
            cut = replace(cut, dim=1 - cut.dim)
        return [cut]

    def _arranged(self, shard: Shard, name: str, index: int | None, get: GetTensor) -> list[Tensor]:
        """The stored tensors of a canonical weight in the engine's layout, for this rank."""
        stored, config, (role, kind) = self.stored_names(name, index), shard.local, name.split(".")
        if experts := self._experts_of(role):
            stored = experts.held(role, stored, shard)
        parts = [
            get(part, cut) if (number := self._filling(part)) is None else torch.full(shape, number)
            for part, cut, shape in zip(
                stored, self._cuts(shard, name, len(stored)), shapes_of_parts(shard, name, len(stored)), strict=True
            )
        ]
        if self.transposed and role in LINEARS:
            parts = [part.T if part.ndim == 2 else part for part in parts]
        if len(parts) > 1:
            self._check_joinable(config, name, dict(zip(stored, parts, strict=True)))
        elif self.interleaved_qkv and role == "qkv" and parts[0].shape[:1] == shard.layer_shapes["qkv.weight"][:1]:
            parts = [by_kind(parts[0], config)]
        if name == CHOICE_BIAS:
            parts = [part.flatten() for part in parts]
        if experts := self._experts_of(role):
            parts = experts.arranged(shard, role, kind, parts)
        return parts

    def _experts_of(self, role: str) -> ExpertNames | None:
        """Names of the experts, for the roles of their matrices."""
        return self.experts if role in (FIRST, SECOND) else None

    def _check_joinable(self, config: ModelConfig, name: str, parts: Mapping[str, Tensor]) -> None:
        """Raises UserError for parts of different widths: their rows cannot make one matrix. parts: by stored name."""
        if len({(part.ndim, part.shape[1:]) for part in parts.values()}) > 1 or not next(iter(parts.values())).ndim:
            width = [config.intermediate_size] if name == "ff2.weight" else [config.hidden_size]
            width = [] if name.endswith(".bias") else width
            shapes = {part: list(tensor.shape) for part, tensor in parts.items()}
            expected = ", ".join(["rows", *map(str, width)])
            wrong = [part for part, shape in shapes.items() if not shape or shape[1:] != width]
            faults = some_of(f"{part} is {shapes[part]}" for part in wrong)
            raise UserError(
                f"the parts of {name}, {some_of(shapes)}, cannot be joined: {faults}, expected [{expected}]; "
                "check that the weights and the config belong together"
            )
