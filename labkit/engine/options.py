"""The options of `init_inference`: DeepSpeed-Inference's names and meanings, checked strictly."""

from pathlib import Path
from typing import Annotated, Any, Literal, Self

import torch
from pydantic import AliasChoices, Field, ValidationError, field_validator, model_validator

from labkit.engine.offload.deepspeed import offload_of, without_training
from labkit.engine.offload.options import KvOffload, Offload
from labkit.models.dtypes import DTYPES, dtype_of
from labkit.system.bounds import MOST_RANKS
from labkit.system.errors import UnsupportedError, UserError, UserTypeError
from labkit.system.home import expanded
from labkit.system.json_file import read_json
from labkit.system.validation import Strict, all_problems
from labkit.weights.quantise import Quantization

SPELLINGS = {
    "float": torch.float32,
    "fp32": torch.float32,
    "half": torch.float16,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
}
ALIASES = {
    "kernel_inject": "replace_with_kernel_inject",
    "tp": "tensor_parallel",
    "max_tokens": "max_out_tokens",
    "tm": "triangular_masking",
    "injection_dict": "injection_policy",
}
LATER = {
    "set_empty_params": False,
    "triton_autotune": False,
    "triangular_masking": True,
}


class TensorParallel(Strict):
    enabled: bool = True
    tp_size: int = Field(default=1, ge=1, le=MOST_RANKS)
    tp_grain_size: int = 64
    mpu: Any = None
    tp_group: Any = None

    @property
    def ranks(self) -> int:
        """How many processes share the model."""
        return self.tp_size if self.enabled else 1


class MicroBatches(Strict):
    """Into how many parts the rows of a batch are divided for the prompt, and how many they become then."""

    prompt: int = Field(ge=1)
    decode: int = Field(ge=1)

    @model_validator(mode="after")
    def _become_fewer(self) -> Self:
        if self.decode > self.prompt:
            raise UserError(
                f"pipeline_parallel: got micro_batches of {self.prompt} for the prompt and {self.decode} to decode; "
                "expected no more to decode, since micro-batches are joined and not divided"
            )
        return self


class PipelineParallel(Strict):
    """A model whose layers are on `pp_size` ranks, the stages; each of them may be several ranks of tensor parallelism.

    schedule: when a micro-batch's next token is begun. "queue": as soon as the one before is chosen; rows that have
    ended make room. "rounds": all micro-batches in a fixed order, those too that have ended, until all have. "barrier":
    once all have their tokens. "naive": there is one micro-batch, and one stage works at a time. micro_batches: into
    how many parts the rows of a batch are divided, a number or `MicroBatches`; "auto": as many as there are stages, or
    with "queue" one behind the prompt, where the first tokens of a greedy search show that this is faster. layers: how
    many each stage has; None: balanced by bytes, with the LM head counted.
    """

    enabled: bool = True
    pp_size: int = Field(default=1, ge=1, le=MOST_RANKS)
    schedule: Literal["queue", "rounds", "barrier", "naive"] = "queue"
    micro_batches: Literal["auto"] | Annotated[int, Field(ge=1)] | MicroBatches = "auto"
    layers: list[Annotated[int, Field(ge=1)]] | None = None

    @property
    def stages(self) -> int:
        """On how many ranks, or groups of them, the layers are."""
        return self.pp_size if self.enabled else 1

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.layers is not None and len(self.layers) != self.pp_size:
            raise UserError(
                f"pipeline_parallel: got layers={self.layers} for pp_size={self.pp_size}; expected a number of "
                "layers for each stage"
            )
        if isinstance(self.micro_batches, MicroBatches) and self.schedule != "queue":
            raise UserError(
                f"pipeline_parallel: micro-batches of the prompt become fewer with schedule='queue' alone, got "
                f"{self.schedule!r}; give one number for both"
            )
        if self.schedule == "naive" and self.micro_batches not in ("auto", 1):
            raise UserError(
                f"pipeline_parallel: schedule='naive' has one micro-batch, got micro_batches={self.micro_batches}; "
                "leave it out, or take the schedule 'queue'"
            )
        return self


class MixtureOfExperts(Strict):
    enabled: bool = True
    ep_size: int = 1
    moe_experts: list[int] = Field(default=[1], validation_alias=AliasChoices("moe_experts", "num_experts"))
    type: Literal["standard", "residual"] = "standard"

    @property
    def wanted(self) -> bool:
        return self.enabled and (self.ep_size > 1 or self.moe_experts != [1])


class Options(Strict):
    """DeepSpeed's options, with labkit's own: `impl`, `kv_dtype`, `consume_model`, `dependent_launch`, `offload`,
    `kv_offload` and `pipeline_parallel`.

    dtype: of the weights; default the model's own, and int8 where `quant` is given: it stands for quantised weights of
    any number of bits. With int8 the tokens may depend on the number of ranks: scales are those of whole rows, but the
    ranks' sums are added up in another order. quantization_setting: `groups`, or `(mlp_extra_grouping, groups)` in
    either order, of DeepSpeed's MoQ, see `FlatGroups`. kv_dtype: of keys and values in the cache, int8, or None for the
    type of the weights, bfloat16 beside int8 ones. replace_with_kernel_inject: accepted and always so, the engine has
    no other mode. max_out_tokens, min_out_tokens: accepted; the KV cache grows as needed, so neither limits anything.
    impl: "auto" (Triton where a GPU is, else C++ where a compiler is, else the reference), "triton", "cpp" or
    "reference"; use_triton: the same as "triton". enable_cuda_graph: play decode steps on a GPU as a CUDA graph; None:
    yes, unless a profiler looks on, which sees more of steps that are launched. dependent_launch: start each kernel of
    a step while the one before it ends (compute capability 9.0 on).
    consume_model: take the weights out of the given model while packing, so that they are in memory once; the model
    object can't be used afterwards.
    checkpoint: the weights, in place of the given model's: a folder, or DeepSpeed's description as a dict or JSON file,
    whose file names are relative to base_dir. save_mp_checkpoint_path: a folder to write the weights to as they are
    packed, a file for each rank, which loads without packing. offload: fetch layers that do not fit into memory when
    their turn comes, from a file or, beside a GPU, from the host's memory, see `Offload`; DeepSpeed's
    `zero_optimization` and `aio` are translated to it. kv_offload: keep keys and values in a file or, beside a GPU, in
    the host's memory, and only those of a few layers where they are computed with, see `KvOffload`. pipeline_parallel:
    the layers on several ranks, one after the other, which work on different parts of a batch at a time, see
    `PipelineParallel`.
    """

    dtype: torch.dtype | None = None
    kv_dtype: torch.dtype | None = None
    replace_with_kernel_inject: bool = False
    tensor_parallel: TensorParallel = TensorParallel()
    pipeline_parallel: PipelineParallel = PipelineParallel()
    moe: MixtureOfExperts = MixtureOfExperts()
    quant: Quantization = Quantization()
    triangular_masking: bool = True
    return_tuple: bool = True
    training_mp_size: int = 1
    max_out_tokens: int = Field(default=1024, ge=1)
    min_out_tokens: int = Field(default=1, ge=1)
    transposed_mode: bool = False
    replace_method: str | None = None
    checkpoint: dict[str, Any] | str | Path | None = None
    base_dir: str = ""
    set_empty_params: bool = False
    save_mp_checkpoint_path: str | Path | None = None
    injection_policy: dict[Any, Any] | None = None
    quantization_setting: Any = None
    enable_cuda_graph: bool | None = None
    use_triton: bool = False
    triton_autotune: bool = False
    impl: Literal["auto", "cpp", "reference", "triton"] = "auto"
    consume_model: bool = False
    dependent_launch: bool = False
    offload: Offload | None = None
    kv_offload: KvOffload | None = None

    @field_validator("moe", mode="before")
    @classmethod
    def _moe(cls, value: Any) -> Any:
        return {"enabled": False} if value is None or value is False else value

    @field_validator("dtype", "kv_dtype", mode="before")
    @classmethod
    def _dtype(cls, value: Any) -> Any:
        if isinstance(value, str):
            return dtype_of(value.removeprefix("torch."), DTYPES | SPELLINGS)
        return value

    @field_validator("dtype", "kv_dtype")
    @classmethod
    def _known_dtype(cls, value: torch.dtype | None) -> torch.dtype | None:
        return value if value is None else dtype_of(value)

    @model_validator(mode="before")
    @classmethod
    def _quantised(cls, values: Any) -> Any:
        """`quant` implies dtype=int8; `quantization_setting` becomes a part of `quant`."""
        if not isinstance(values, dict):
            return values
        values = dict(values)
        quant, setting = values.get("quant"), values.pop("quantization_setting", None)
        if setting is not None:
            if quant not in (None, {}) and not isinstance(quant, dict):
                raise UserError("quantization_setting: pass quant as a dict beside it, or leave it out")
            values["quant"] = quant = {**(quant or {}), "flat": _flat_groups(setting)}
        wants = bool(quant) and not (isinstance(quant, dict) and quant.get("enabled") is False)
        if wants and values.get("dtype") is None:
            values["dtype"] = torch.int8
        return values

    @model_validator(mode="after")
    def _not_yet(self) -> Self:
        for name, default in LATER.items():
            if getattr(self, name) != default:
                raise UnsupportedError(f"{name}={getattr(self, name)!r} is not supported yet; leave it at {default!r}")
        if self.base_dir and self.checkpoint is None:
            raise UserError("base_dir says where the files of checkpoint are; pass checkpoint too, or leave it out")
        if self.quant.enabled and self.quant != Quantization() and self.dtype != torch.int8:
            raise UserError(
                f"quant asks for quantised weights, got dtype={self.dtype} too; leave dtype out, or pass torch.int8"
            )
        if self.dtype == torch.int8 and not (self.quant.enabled and self.quant.weight.enabled):
            raise UserError("dtype=int8 asks for quantised weights and quant for none; leave one of them out")
        if self.use_triton and self.impl not in ("auto", "triton"):
            raise UserError(f"use_triton asks for impl='triton', got impl={self.impl!r} too; leave one of them out")
        if self.impl in ("cpp", "reference") and (self.enable_cuda_graph or self.dependent_launch):
            raise UserError(
                f"enable_cuda_graph and dependent_launch are for impl='triton', got impl={self.impl!r}; leave them out"
            )
        if self.offload is not None and self.save_mp_checkpoint_path is not None:
            raise UserError(
                "offload keeps the packed weights in its own path, got save_mp_checkpoint_path too; leave one out"
            )
        if self.offload is not None and self.impl == "reference":
            raise UserError("offload needs the C++ or Triton kernels, got impl='reference'; leave impl out")
        fetched = [name for name in ("offload", "kv_offload") if getattr(self, name) is not None]
        if fetched and (self.enable_cuda_graph or self.dependent_launch):
            raise UserError(
                f"got {fetched[0]} beside enable_cuda_graph or dependent_launch, for which weights, keys and values "
                "must stay where they are; leave one of them out"
            )
        if self.kv_offload is not None and self.impl == "reference":
            raise UserError("kv_offload needs the C++ or Triton kernels, got impl='reference'; leave impl out")
        self._refuse_beside_pipeline()
        if self.moe.wanted:
            raise UnsupportedError("moe is not supported yet; leave it out")
        if self.tensor_parallel.mpu is not None:
            raise UnsupportedError(
                "tensor_parallel.mpu is not supported yet; pass its group, mpu.get_model_parallel_group(), as tp_group"
            )
        return self

    def _refuse_beside_pipeline(self) -> None:
        if self.pipeline_parallel.stages == 1:
            return
        if self.tensor_parallel.tp_group is not None:
            raise UserError(
                "pipeline_parallel makes the groups of its ranks itself; leave tensor_parallel.tp_group out"
            )
        for name in ("offload", "save_mp_checkpoint_path"):
            if getattr(self, name) is not None:
                raise UnsupportedError(f"{name} together with pipeline_parallel is not supported yet; leave one out")


def read_options(config: dict[str, Any] | str | Path | None, keywords: dict[str, Any]) -> Options:
    """Merges a dict or JSON file with keywords. Old spellings are translated; a key with two values is a ValueError,
    and so is an unknown one, with the known listed.
    """
    merged: dict[str, Any] = {}
    for source in (_as_dict(config), keywords):
        for key, value in source.items():
            name, value = _translated(key, value)
            if name in merged and merged[name] != value:
                raise UserError(f"{name} was given twice: {merged[name]!r} and {value!r}; give it once")
            merged[name] = value
    _translate_zero(merged)
    merged = without_training(merged)
    unknown = sorted(set(merged) - set(Options.model_fields))
    if unknown:
        raise UserError(
            f"unknown option {', '.join(unknown)}; expected one of {', '.join(sorted(Options.model_fields))}"
        )
    try:
        return Options(**merged)
    except ValidationError as error:
        for problem in error.errors():
            if isinstance(own := problem.get("ctx", {}).get("error"), UserError):  # it says all that is to be said
                raise own from None
        raise UserError(f"init_inference options: {all_problems(error)}") from None


def _translate_zero(merged: dict[str, Any]) -> None:
    """Puts `offload` in the place of DeepSpeed's spelling of it."""
    zero, aio = merged.pop("zero_optimization", None), merged.pop("aio", None)
    offload = offload_of(zero, aio)
    if offload is not None and merged.get("offload") is not None:
        raise UserError("got offload and zero_optimization.offload_param, which mean the same; leave one of them out")
    if offload is not None:
        merged["offload"] = offload


def _flat_groups(setting: Any) -> dict[str, Any]:
    """DeepSpeed's `quantization_setting`: groups, or a pair of mlp_extra_grouping and groups. Its tutorial and its code
    have the pair in different orders, so both are taken.
    """
    pair = list(setting) if isinstance(setting, list | tuple) else [False, setting]
    if sorted(type(each).__name__ for each in pair) != ["bool", "int"]:
        raise UserError(
            f"quantization_setting: got {setting!r}, expected a number of groups or (mlp_extra_grouping, groups), as "
            "(True, 64)"
        )
    extra, groups = sorted(pair, key=lambda each: not isinstance(each, bool))
    return {"groups": groups, "mlp_extra_grouping": extra}


def _translated(key: str, value: Any) -> tuple[str, Any]:
    if key == "mp_size":
        return "tensor_parallel", {"tp_size": value}
    return ALIASES.get(key, key), value


def _as_dict(config: dict[str, Any] | str | Path | None) -> dict[str, Any]:
    if config is None:
        return {}
    if isinstance(config, dict):
        return config
    if not isinstance(config, str | Path):
        raise UserTypeError(f"config: expected a dict or the path of a JSON file, got {type(config).__name__}")
    try:
        loaded = read_json(expanded(config), "an object of options")
    except FileNotFoundError:
        raise UserError(f"config file {str(config)!r} does not exist") from None
    if not isinstance(loaded, dict):
        raise UserError(f"config file {str(config)!r}: expected an object of options, got {type(loaded).__name__}")
    return loaded
