"""The options of `init_inference`: DeepSpeed-Inference's names and meanings, checked strictly."""

from pathlib import Path
from typing import Annotated, Any, Literal, Self

import torch
from pydantic import AliasChoices, BeforeValidator, Field, ValidationError, field_validator, model_validator

from labkit.engine.ignored_options import IGNORED, without_ignored
from labkit.engine.offload.deepspeed import offload_of, without_training
from labkit.engine.offload.options import KvOffload, Offload
from labkit.models.dtypes import DTYPES, dtype_of
from labkit.system.bounds import MOST_RANKS
from labkit.system.errors import UnsupportedError, UserError, UserTypeError
from labkit.system.home import expanded
from labkit.system.json_file import read_json
from labkit.system.validation import Strict, all_problems, one_problem
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


class TensorParallel(Strict):
    enabled: bool = True
    tp_size: int = Field(default=1, ge=1, le=MOST_RANKS)
    tp_grain_size: int = 64
    mpu: Any = None
    tp_group: Any = None

    @property
    def ranks(self) -> int:
        """Number of ranks that share the model."""
        return self.tp_size if self.enabled else 1


class ExpertParallel(Strict):
    """DeepSpeed's `moe`. The ranks of `tensor_parallel` are divided into `ep_size` parts with different experts.

    moe_experts: the numbers of experts, which the model knows: [1], or the model's own number.
    """

    enabled: bool = True
    ep_size: int = Field(default=1, ge=1, le=MOST_RANKS)
    moe_experts: list[int] = Field(default=[1], validation_alias=AliasChoices("moe_experts", "num_experts"))
    type: Literal["standard", "residual"] = "standard"

    @property
    def parts(self) -> int:
        """Number of parts of the experts."""
        return self.ep_size if self.enabled else 1

    @model_validator(mode="after")
    def _standard(self) -> Self:
        if self.enabled and self.type == "residual":
            raise UnsupportedError("moe: type='residual' is not supported yet; leave it out")
        return self


def _switched_off(value: Any) -> Any:
    return {"enabled": False} if value is None or value is False else value


class MicroBatches(Strict):
    """Numbers of micro-batches of a batch."""

    prompt: int = Field(ge=1)  # number for the prompt
    decode: int = Field(ge=1)  # number after the prompt

    @model_validator(mode="after")
    def _become_fewer(self) -> Self:
        if self.decode > self.prompt:
            raise UserError(
                f"pipeline_parallel: got micro_batches of {self.prompt} for the prompt and {self.decode} to decode; "
                "expected no more to decode, since micro-batches are joined and not divided"
            )
        return self


class PipelineParallel(Strict):
    """Layers on `pp_size` stages. A stage is one rank, or several ranks with tensor parallelism.

    schedule: when a micro-batch begins its next token. "queue": as soon as its previous token is chosen; rows that have
    ended leave. "rounds": in a fixed order; ended micro-batches keep their turns until all have ended. "barrier": once
    all micro-batches have their previous tokens. "naive": there is one micro-batch, and one stage works at a time.
    micro_batches: number of parts of a batch, or `MicroBatches`. "auto": one for each stage. With "queue", there is one
    after the prompt if the first tokens of a greedy search show that this is faster.
    layers: number of layers of each stage; None: balanced by bytes, with the LM head counted.
    """

    enabled: bool = True
    pp_size: int = Field(default=1, ge=1, le=MOST_RANKS)
    schedule: Literal["queue", "rounds", "barrier", "naive"] = "queue"
    micro_batches: Annotated[
        Literal["auto"] | Annotated[int, Field(ge=1)] | MicroBatches,
        one_problem("'auto', a number of at least 1, or a dict with prompt and decode"),
    ] = "auto"
    layers: list[Annotated[int, Field(ge=1)]] | None = None

    @property
    def stages(self) -> int:
        """Number of stages."""
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


class Options(Strict):
    """DeepSpeed's options, with labkit's own: `impl`, `kv_dtype`, `consume_model`, `dependent_launch`, `offload`,
    `kv_offload` and `pipeline_parallel`. `IGNORED` has the options of DeepSpeed that change nothing.

    dtype: of the weights; default: the model's type, or int8 with `quant`. int8 stands for quantised weights of any
    number of bits. With int8 the tokens may depend on the number of ranks: each scale is of a whole row, but the order
    in which the ranks' sums are added differs.
    quantization_setting: `groups`, or `(mlp_extra_grouping, groups)` in either order, of DeepSpeed's MoQ, see
    `FlatGroups`.
    kv_dtype: of keys and values in the cache: int8, or None for the type of the weights (bfloat16 for int8 weights).
    impl: "auto" (Triton with a GPU, else C++ with a compiler, else the reference), "triton", "cpp" or "reference".
    use_triton: the same as impl="triton".
    enable_cuda_graph: replays decode steps on a GPU as a CUDA graph; None: yes, unless a profiler listens, which sees
    more of launched steps.
    dependent_launch: starts each kernel of a step while the previous one ends (compute capability 9.0 or later); None:
    in CUDA graphs that no profiler is to see, since overlapping kernels have no times of their own.
    consume_model: removes the weights from the passed model while packing, so that they are in memory once. The model
    object can't be used afterwards.
    checkpoint: weights to use instead of the model's: a folder, or DeepSpeed's description as a dict or JSON file, with
    file names relative to base_dir.
    save_mp_checkpoint_path: folder to which the weights are written while packing, one file for each rank. It loads
    without packing.
    offload: layers on disk, or with a GPU in the host's memory, fetched when their turn comes, see `Offload`.
    DeepSpeed's `zero_optimization` and `aio` are translated to it.
    kv_offload: keys and values on disk, or with a GPU in the host's memory, with a few layers resident, see
    `KvOffload`.
    moe: experts on different ranks, see `ExpertParallel`; `ep_size` alone stands for it, too.
    pipeline_parallel: layers on several ranks, which work on different micro-batches at a time, see `PipelineParallel`.
    """

    dtype: torch.dtype | None = None
    kv_dtype: torch.dtype | None = None
    tensor_parallel: TensorParallel = TensorParallel()
    pipeline_parallel: PipelineParallel = PipelineParallel()
    moe: Annotated[ExpertParallel, BeforeValidator(_switched_off)] = ExpertParallel()
    quant: Quantization = Quantization()
    checkpoint: Annotated[dict[str, Any] | str | Path | None, one_problem("a path or a dict")] = None
    base_dir: str = ""
    save_mp_checkpoint_path: Annotated[str | Path | None, one_problem("a path")] = None
    injection_policy: dict[Any, Any] | None = None
    quantization_setting: Any = None
    enable_cuda_graph: bool | None = None
    use_triton: bool = False
    impl: Literal["auto", "cpp", "reference", "triton"] = "auto"
    consume_model: bool = False
    dependent_launch: bool | None = None
    offload: Offload | None = None
    kv_offload: KvOffload | None = None

    @field_validator("dtype", "kv_dtype", mode="before")
    @classmethod
    def _known_dtype(cls, value: Any) -> Any:
        if isinstance(value, str):
            return dtype_of(value, DTYPES | SPELLINGS)
        return dtype_of(value) if isinstance(value, torch.dtype) else value

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
                raise UserError("quantization_setting: pass quant as a dict with it, or leave quant out")
            values["quant"] = quant = {**(quant or {}), "flat": _flat_groups(setting)}
        enabled = bool(quant) and not (isinstance(quant, dict) and quant.get("enabled") is False)
        if enabled and values.get("dtype") is None:
            values["dtype"] = torch.int8
        return values

    @model_validator(mode="after")
    def _refuse_contradictions(self) -> Self:
        if self.base_dir and self.checkpoint is None:
            raise UserError("base_dir says where the files of checkpoint are; pass checkpoint too, or leave it out")
        if self.quant.enabled and self.quant.model_fields_set and self.dtype != torch.int8:
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
        offloads = [name for name in ("offload", "kv_offload") if getattr(self, name) is not None]
        if offloads and self.impl == "reference":
            raise UserError(f"{offloads[0]} needs the C++ or Triton kernels, got impl='reference'; leave impl out")
        if offloads and (self.enable_cuda_graph or self.dependent_launch):
            raise UserError(
                f"got {offloads[0]} with enable_cuda_graph or dependent_launch, which need weights, keys and values "
                "at fixed addresses; leave one of them out"
            )
        self._refuse_with_pipeline()
        if self.tensor_parallel.mpu is not None:
            raise UnsupportedError(
                "tensor_parallel.mpu is not supported yet; pass its group, mpu.get_model_parallel_group(), as tp_group"
            )
        return self

    def _refuse_with_pipeline(self) -> None:
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
    """Merges a dict or JSON file with keywords, and translates old spellings. Raises ValueError for a key with two
    values, and for an unknown key, with a list of the known keys.
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
    known = Options.model_fields.keys() | IGNORED.keys()
    if unknown := sorted(merged.keys() - known):
        raise UserError(f"unknown option {', '.join(unknown)}; expected one of {', '.join(sorted(known))}")
    try:
        return Options(**without_ignored(merged))
    except ValidationError as error:
        for problem in error.errors():
            if isinstance(own := problem.get("ctx", {}).get("error"), UserError):  # our own message is complete
                raise own from None
        raise UserError(f"init_inference options: {all_problems(error)}") from None


def _translate_zero(merged: dict[str, Any]) -> None:
    """Replaces `zero_optimization` and `aio` by `offload`."""
    zero, aio = merged.pop("zero_optimization", None), merged.pop("aio", None)
    offload = offload_of(zero, aio)
    if offload is not None and merged.get("offload") is not None:
        raise UserError("got offload and zero_optimization.offload_param, which mean the same; leave one of them out")
    if offload is not None:
        merged["offload"] = offload


def _flat_groups(setting: Any) -> dict[str, Any]:
    """Reads DeepSpeed's `quantization_setting`: groups, or a pair of mlp_extra_grouping and groups. Its tutorial and
    its code have the pair in different orders, so both are accepted.
    """
    pair = list(setting) if isinstance(setting, list | tuple) else [False, setting]
    if sorted(type(item).__name__ for item in pair) != ["bool", "int"]:
        raise UserError(
            f"quantization_setting: got {setting!r}, expected a number of groups or (mlp_extra_grouping, groups), for "
            "example (True, 64)"
        )
    extra, groups = sorted(pair, key=lambda item: not isinstance(item, bool))
    return {"groups": groups, "mlp_extra_grouping": extra}


def _translated(key: str, value: Any) -> tuple[str, Any]:
    """Returns today's name and value of an option that may have an old spelling."""
    if key == "mp_size":
        return "tensor_parallel", {"tp_size": value}
    if key == "ep_size":
        return "moe", {"ep_size": value}
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
