"""The description of a transformer in the engine's own terms, independent of Hugging Face."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from labkit.system.errors import UserError

if TYPE_CHECKING:
    import torch

NORMS = ("layer", "rms")
ACTIVATIONS = ("gelu", "gelu_tanh", "relu", "silu", "relu_squared", "clamped_swiglu")  # see `MlpWeights`
POSITIONS = ("learned", "rotary", "alibi")
SCORES = ("softmax", "sigmoid")
PER_LAYER = ("attention_scales", "windows", "rotary_tables", "dense_layers")
MAY_BE_EMPTY = ("rotary_tables", "dense_layers")
CHOICE_BIAS = "router.choice_bias"  # canonical name
KV_SCALE_BYTES = 2  # float16: one scale for a head's keys and one for its values, per position of an int8 cache
SIZES = (
    *("hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim"),
    *("intermediate_size", "vocab_size", "embedding_size"),
)

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class RotarySpec:
    """Rotation of the first `dim` numbers of every query and key head.

    At position p, pair k turns by the angle `p * inv_freq[k]`, its cosine and sine multiplied by `attention_scaling`.
    The pairs are (0, 1), (2, 3), … when `interleaved` (GPT-J), else (k, k + dim / 2) (LLaMA, NeoX).
    """

    dim: int
    interleaved: bool
    inv_freq: tuple[float, ...]
    attention_scaling: float = 1.0

    def __post_init__(self) -> None:
        if self.dim != 2 * len(self.inv_freq):
            raise UserError(
                f"a rotary of {self.dim} dimensions needs {self.dim / 2} frequencies, got {len(self.inv_freq)}"
            )


@dataclass(frozen=True)
class ExpertsSpec:
    """The mixture of experts that layers have in place of an MLP.

    count: number of experts. chosen: how many of them a row passes, those with the largest scores.
    renormalised: the scores of the chosen experts are divided by their sum.
    scores: "softmax" of the router's logits, or the "sigmoid" of each logit.
    choice_bias: the layers have a `router.choice_bias`, which is added to the scores for the choice alone.
    factor: the share of an expert is its score times this number.
    shared: width of the shared expert, an MLP that every row passes; 0: the mixture has none.
    shared_gate: its output is multiplied by the sigmoid of a gate.
    held: the experts of a rank, [first, end); None: all. The router chooses among all of them.
    """

    count: int
    chosen: int
    renormalised: bool
    shared: int = 0
    shared_gate: bool = False
    held: tuple[int, int] | None = None
    scores: str = "softmax"
    choice_bias: bool = False
    factor: float = 1.0

    @property
    def own(self) -> range:
        """The experts of a rank."""
        return range(self.count) if self.held is None else range(*self.held)

    def __post_init__(self) -> None:
        for name in ("count", "chosen"):
            if type(value := getattr(self, name)) is not int or value < 1:
                raise UserError(f"experts.{name} = {value!r}; expected an integer of at least 1")
        if self.chosen > self.count:
            raise UserError(f"got {self.chosen} experts for each token of {self.count} experts; expected at most all")
        if self.scores not in SCORES:
            raise UserError(f"experts.scores = {self.scores!r}; expected one of {', '.join(SCORES)}")
        if not math.isfinite(self.factor):
            raise UserError(f"experts.factor = {self.factor}; expected a finite number")
        if type(self.shared) is not int or self.shared < 0 or (self.shared_gate and not self.shared):
            raise UserError(
                f"experts.shared = {self.shared!r}, shared_gate = {self.shared_gate}; expected an MLP's width, or 0"
            )


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder-only transformer, or the layers of an encoder: its sizes, and what its layers compute.

    A layer computes `h += attn(norm1(h)); h += mlp(norm2(h))`, unless one of the fields below changes that.
    `layer_shapes` and `top_shapes` name every weight: these canonical names are all that the engine reads.
    """

    architecture: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    embedding_size: int  # differs from hidden_size in OPT-350m: projected in and out
    max_positions: int | None  # None: no limit of the model's own (ALiBi)
    norm: str
    norm_eps: float
    activation: str
    gated: bool  # mlp(x) = ff2(activation(gate(x)) * up(x))
    position: str
    position_offset: int = 0  # row of the position table that belongs to position 0 (OPT: 2)
    positions_from_mask: bool = False  # for a forward without position_ids: see `Policy.positions_from_mask`
    takes_position_ids: bool = True  # see `Policy.takes_position_ids`
    rotary: RotarySpec | None = None
    other_rotaries: tuple[RotarySpec, ...] = ()  # with other frequencies; for a layer without a rotation they are 0
    rotary_tables: tuple[int, ...] = ()  # per layer: 0 for `rotary`, 1 for the first of the others, …; empty: all 0
    short_positions: int | None = None  # `long_rotaries` replace `rotaries` in texts with more positions (Phi-4-mini)
    long_rotaries: tuple[RotarySpec, ...] = ()  # in the order of `rotaries`; empty: they are for texts of any length
    attention_scales: tuple[float, ...]  # per layer, multiplies q·k
    windows: tuple[int | None, ...]  # per layer: the query at i sees the keys i - window < j <= i; None: all j <= i
    biases: frozenset[str] = frozenset()  # of "qkv", "attn_out", "router", "ff1", "ff2", "head"
    parallel_residual: bool = False  # h + attn(norm1(h)) + mlp(norm2(h))
    shared_norm: bool = False  # norm2 is norm1 (GPT-J)
    input_norms: bool = True  # False: no norm1 and norm2, as in OLMo 2, which has output_norms alone
    pre_norm: bool = True  # False: h = norm1(h + attn(h)); h = norm2(h + mlp(h)) (OPT-350m, BERT)
    causal: bool = True  # False: an encoder without embeddings and heads, in which all tokens see each other
    residual_from_norm: bool = False  # the residual is norm(h) instead of h (a BLOOM option)
    final_norm: bool = True
    embedding_norm: bool = False  # of the embedding's rows, to which positions were added (BLOOM, BART)
    positions_after_norm: bool = False  # they are added to the normed rows instead (BlenderbotSmall)
    qk_norm: bool = False  # RMS norm over each query and key head before the rotation (Qwen3)
    qk_norm_whole: bool = False  # it is over all query heads together, and all key heads (OLMo 2)
    output_norms: bool = False  # h += attn_out_norm(attn(norm1(h))); h += mlp_out_norm(mlp(norm2(h))) (Gemma 2)
    norm_offset: float = 0.0  # added to the stored weights of all norms (Gemma: 1)
    norm_bias: bool = True  # of layer norms (Cohere: none)
    residual_scale: float = 1.0  # h += residual_scale * attn(norm1(h)), and so the MLP (Granite)
    embedding_scale: float = 1.0  # multiplies the rows of the embedding, rounded to its type (Gemma)
    attention_sinks: bool = False  # each head has a score that takes part in the softmax without a value (GPT-OSS)
    attention_cap: float | None = None  # a score s becomes cap * tanh(s / cap) before the mask (Gemma 2)
    logit_cap: float | None = None  # the same for a logit
    logit_scale: float = 1.0  # multiplies the logits (Cohere, Granite)
    tied_head: bool = False
    experts: ExpertsSpec | None = None  # `intermediate_size` is the width of an expert
    dense_layers: tuple[bool, ...] = ()  # per layer: it has an MLP instead of experts; empty: none has
    dense_size: int = 0  # the width of this MLP

    def __post_init__(self) -> None:
        for field, allowed in (("norm", NORMS), ("activation", ACTIVATIONS), ("position", POSITIONS)):
            if (value := getattr(self, field)) not in allowed:
                raise UserError(f"{field} = {value!r} is unknown; expected one of {allowed}")
        for field in SIZES:
            size = getattr(self, field)
            if type(size) is not int or size < 1:
                raise UserError(f"{field} = {size!r}; expected an integer of at least 1")
        if self.num_heads % self.num_kv_heads:
            raise UserError(
                f"{self.num_heads} query heads cannot share {self.num_kv_heads} key/value heads evenly; "
                f"use a number of key/value heads that divides {self.num_heads}"
            )
        if self.output_norms and (self.parallel_residual or self.residual_from_norm or not self.pre_norm):
            raise UserError("output_norms need a sequential layer whose residual is not normed")
        if self.residual_scale != 1 and (self.position == "learned" or self.embedding_norm or self.output_norms):
            raise UserError("a residual_scale needs rows that come from the embedding alone, and no output_norms")
        if (self.residual_scale != 1 or self.logit_scale != 1) and not (self.final_norm and self.pre_norm):
            raise UserError("residual_scale and logit_scale need a final norm")
        if self.embedding_norm and self.embedding_size != self.hidden_size:
            raise UserError("an embedding_norm needs an embedding of the hidden size")
        if self.experts and (self.parallel_residual or self.residual_from_norm or not self.pre_norm):
            raise UserError("experts need a sequential layer whose residual is not normed")
        if self.dense_layers and (self.experts is None or self.dense_size < 1):
            raise UserError(f"dense_layers with dense_size = {self.dense_size}; expected an MLP's width, and experts")
        if self.dense_layers and self.biases & {"router", "ff1", "ff2"}:
            raise UserError(
                f"dense_layers beside experts with biases of {sorted(self.biases)}; expected no such biases"
            )
        if self.activation == "clamped_swiglu" and not self.gated:
            raise UserError("the activation 'clamped_swiglu' is one of gated MLPs; expected gated = True")
        if not self.input_norms and not (self.output_norms and self.norm == "rms"):
            raise UserError("layers without input_norms need output_norms of kind 'rms'")
        for per_layer in PER_LAYER:
            got = len(getattr(self, per_layer))
            if got != self.num_layers and (got or per_layer not in MAY_BE_EMPTY):
                raise UserError(f"{per_layer} has {got} entries for {self.num_layers} layers; give one per layer")
        if any(window is not None and window < 1 for window in self.windows):
            raise UserError(f"windows = {self.windows}; expected at least 1 token, or None")
        if (self.position == "rotary") != (self.rotary is not None):
            raise UserError(
                f"position = {self.position!r} with rotary = {self.rotary}; give a RotarySpec exactly when 'rotary'"
            )
        if max(self.rotary_tables, default=0) > len(self.other_rotaries):
            raise UserError(f"rotary_tables = {self.rotary_tables}; expected at most {len(self.other_rotaries)}")
        if len({(rotary.dim, rotary.interleaved) for rotary in (*self.rotaries, *self.long_rotaries)}) > 1:
            raise UserError("rotations of several sizes or kinds of pairs; expected other frequencies alone")
        self._check_long_texts()
        if self.rotary and self.rotary.dim > self.head_dim:
            raise UserError(f"{self.rotary.dim} rotary dimensions do not fit in heads of {self.head_dim}")

    def _check_long_texts(self) -> None:
        short, count = self.short_positions, len(self.long_rotaries)
        if count != (0 if short is None else len(self.rotaries)) or (short is not None and short < 1):
            raise UserError(
                f"short_positions = {short} with {count} long_rotaries; expected None without any, or at least 1 with "
                f"one for each of the {len(self.rotaries)} rotations"
            )

    @property
    def rotaries(self) -> tuple[RotarySpec, ...]:
        """All rotations, in the order of the tables; empty without a rotation."""
        return () if self.rotary is None else (self.rotary, *self.other_rotaries)

    def with_layers(self, numbers: Iterable[int]) -> ModelConfig:
        """The same model with these of its layers, by their numbers; one may come several times."""
        numbers = tuple(numbers)
        changes: dict[str, Any] = {"num_layers": len(numbers)}
        for name in PER_LAYER:
            if values := getattr(self, name):
                changes[name] = tuple(values[number] for number in numbers)
        return replace(self, **changes)

    def has_experts(self, layer: int) -> bool:
        """Whether a layer has a mixture of experts."""
        return self.experts is not None and not (self.dense_layers and self.dense_layers[layer])

    def layer_shapes(self, layer: int | None = None) -> Shapes:
        """The weights of a layer: canonical name -> shape; linears are [out, in]. layer: its number; None: the weights
        that any layer has.

        `qkv` holds the rows of all query heads, then all keys, then all values; a gated `ff1` the gate's rows, then
        the up projection's. With experts `ff1` and `ff2` hold the rows of the first expert, then the rows of the
        second, and so on; a layer with an MLP instead has `dense_ff1` and `dense_ff2`. Biases that a model does not
        have are absent, and so is `norm2` when it is shared.
        """
        hidden, layers = self.hidden_size, range(self.num_layers) if layer is None else [layer]
        query, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        shapes = self._norm_shapes("norm1") if self.input_norms else {}
        shapes |= self._linear_shapes("qkv", query + 2 * kv, hidden)
        if self.qk_norm:
            of_query, of_key = (query, kv) if self.qk_norm_whole else (self.head_dim, self.head_dim)
            shapes |= {"q_norm.weight": (of_query,), "k_norm.weight": (of_key,)}
        if self.attention_sinks:
            shapes |= {"sinks.weight": (self.num_heads,)}
        shapes |= self._linear_shapes("attn_out", hidden, query)
        if self.output_norms:
            shapes |= self._norm_shapes("attn_out_norm") | self._norm_shapes("mlp_out_norm")
        if self.input_norms and not self.shared_norm:
            shapes |= self._norm_shapes("norm2")
        if not all(map(self.has_experts, layers)):
            prefix, inner = ("dense_", self.dense_size) if self.experts else ("", self.intermediate_size)
            shapes |= self._linear_shapes(f"{prefix}ff1", self._wide * inner, hidden)
            shapes |= self._linear_shapes(f"{prefix}ff2", hidden, inner)
        if self.experts and any(map(self.has_experts, layers)):
            shapes |= self._mixture_shapes(self.experts)
        return shapes

    @property
    def _wide(self) -> int:
        """Rows of a first matrix for each of its MLP's numbers."""
        return 2 if self.gated else 1

    def _mixture_shapes(self, experts: ExpertsSpec) -> Shapes:
        hidden, inner, wide, own = self.hidden_size, self.intermediate_size, self._wide, len(experts.own)
        shapes = self._linear_shapes("router", experts.count, hidden)
        if experts.choice_bias:
            shapes |= {CHOICE_BIAS: (experts.count,)}
        shapes |= self._linear_shapes("ff1", own * wide * inner, hidden)
        shapes |= self._linear_shapes("ff2", own * hidden, inner)
        if experts.shared:
            shared = experts.shared
            shapes |= {"shared_ff1.weight": (wide * shared, hidden), "shared_ff2.weight": (hidden, shared)}
        return shapes | ({"shared_gate.weight": (1, hidden)} if experts.shared_gate else {})

    def top_shapes(self) -> Shapes:
        """The weights outside the layers: canonical name -> shape. A tied head has no `head.weight` of its own, and an
        encoder has no such weights.
        """
        if not self.causal:
            return {}
        shapes: Shapes = {"embed.weight": (self.vocab_size, self.embedding_size)}
        if self.position == "learned":
            assert self.max_positions is not None
            shapes["positions.weight"] = (self.max_positions + self.position_offset, self.hidden_size)
        if self.embedding_norm:
            shapes |= self._norm_shapes("embed_norm")
        if self.embedding_size != self.hidden_size:
            shapes["project_in.weight"] = (self.hidden_size, self.embedding_size)
            shapes["project_out.weight"] = (self.embedding_size, self.hidden_size)
        if self.final_norm:
            shapes |= self._norm_shapes("final_norm")
        head = self._linear_shapes("head", self.vocab_size, self.embedding_size)
        return shapes | {name: shape for name, shape in head.items() if not (self.tied_head and name == "head.weight")}

    def weight_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of all weights, a tied head counted once."""
        layers = sum(_elements(self.layer_shapes(layer)) for layer in range(self.num_layers))
        return dtype.itemsize * (layers + _elements(self.top_shapes()))

    def kv_bytes_per_token(self, dtype: torch.dtype, kv_dtype: torch.dtype | None = None) -> int:
        """Bytes of keys, values and their scales that one token of one sequence takes in the cache of an engine with
        matrices of `dtype`. kv_dtype: as `init_inference` takes it.
        """
        size = kv_dtype.itemsize if kv_dtype else max(2, dtype.itemsize)  # with int8 matrices the cache is bfloat16
        scale = KV_SCALE_BYTES if size == 1 else 0
        return self.num_layers * 2 * self.num_kv_heads * (self.head_dim * size + scale)

    def _norm_shapes(self, name: str) -> Shapes:
        shapes: Shapes = {f"{name}.weight": (self.hidden_size,)}
        return shapes | {f"{name}.bias": (self.hidden_size,)} if self.norm == "layer" and self.norm_bias else shapes

    def _linear_shapes(self, name: str, rows: int, columns: int) -> Shapes:
        shapes: Shapes = {f"{name}.weight": (rows, columns)}
        return shapes | {f"{name}.bias": (rows,)} if name in self.biases else shapes


def alibi_slopes(num_heads: int) -> tuple[float, ...]:
    """The slope of each head: the score of query i and key j gains `-slope * (i - j)` (Press et al., arXiv 2108.12409).

    For n = 2^m heads a geometric series from 2^(-8/n); other counts continue with every other slope of 2n heads.
    """
    power = 2 ** math.floor(math.log2(num_heads))
    slopes = [2.0 ** (-8 * k / power) for k in range(1, power + 1)]
    between = [2.0 ** (-8 * k / (2 * power)) for k in range(1, 2 * (num_heads - power), 2)]
    return tuple(slopes + between)


def _elements(shapes: Shapes) -> int:
    return sum(math.prod(shape) for shape in shapes.values())
