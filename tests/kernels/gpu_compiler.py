"""Compiles the Triton kernels for a GPU that need not exist, to check what only the machine code shows.

A launcher compiles each kernel for its real arguments, which are tensors without memory (device "meta"). As a program,
`gpu_compiler.py OUT JOBS` runs in a process in which Triton does not interpret: JOBS is a JSON list with the fields of
each Job, and OUT receives a JSON list with the fields of each Compiled.
"""

import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from labkit.kernels import EmbeddingWeights, HeadWeights, LayerWeights, ModelWeights, gpu
from labkit.kernels.attention import triton_impl as attention_impl
from labkit.kernels.choice.triton_impl import DeviceChoice
from labkit.kernels.decode_step import DenseMlp, MixtureMlp, SharedExpert
from labkit.kernels.decode_step.triton_ends import Buffers, StepInputs, StepState
from labkit.kernels.decode_step.triton_impl import TritonStep
from labkit.kernels.experts.triton_impl import experts
from labkit.kernels.gemm.triton_impl import gemm
from labkit.kernels.mlp_gemm.triton_impl import mlp_gemm
from labkit.kernels.qkv_gemm.triton_impl import qkv_gemm
from labkit.kernels.route import Router
from labkit.kernels.route.triton_impl import route
from labkit.kernels.shapes import REAL, ExpertsShape, LayerShape
from labkit.kernels.tuned import Tile
from labkit.kernels.types import (
    NO_NORM,
    AttentionParams,
    Heads,
    LayerCache,
    Linear,
    MlpWeights,
    Norm,
    QkvWeights,
    Rotary,
    Rows,
    float_dtype,
    padded_head_dim,
)

TYPES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.int32: "i32",
    torch.int64: "i64",
}
TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
PROCESSORS = {80: 108, 90: 132}  # multiprocessors of an A100; of an H100 or H200
CAPACITY = 2048
GEMMA = LayerShape(
    "gemma-2-9b", 3584, Heads(16, 8, 256), 14336, 256000, "rms", gated=True, rotary=256, biases=frozenset(),
    output_norms=True,
)  # fmt: skip
MIXTRAL = LayerShape(
    "mixtral-8x7b", 4096, Heads(32, 8, 128), 14336, 32000, "rms", "silu", gated=True, rotary=128, biases=frozenset(),
    experts=ExpertsShape(8, 2),
)  # fmt: skip
QWEN_MOE = LayerShape(
    "qwen1.5-moe-a2.7b", 2048, Heads(16, 16, 128), 1408, 151936, "rms", "silu", gated=True, rotary=128,
    biases=frozenset({"qkv"}), experts=ExpertsShape(60, 4, shared=5632, shared_gate=True),
)  # fmt: skip
GPT_OSS = LayerShape(
    "gpt-oss-20b", 2880, Heads(64, 8, 64), 2880, 201088, "rms", "clamped_swiglu", gated=True, rotary=64, sinks=True,
    biases=frozenset({"qkv", "attn_out", "router", "ff1", "ff2"}), experts=ExpertsShape(32, 4),
)  # fmt: skip
SHAPES = (*REAL, GEMMA, MIXTRAL, QWEN_MOE, GPT_OSS)
CAPS = {GEMMA.model: (50.0, 30.0)}


@dataclass(frozen=True)
class Compiled:
    """Resources of one compiled kernel."""

    kernel: str
    types: str
    tile: Tile
    registers: int  # per thread
    stack: int  # bytes, of spilled registers
    shared: int  # bytes of shared memory
    streaming_loads: dict[int, int]  # bits -> loads that leave the caches first, for products with one row
    dependent: list[str]  # of programmatic dependent launch: "wait" and "launch_dependents"


@dataclass
class Compiler(gpu.Launcher):
    """Compiles instead of launching, for compute capability `capability`: 80 is an A100, 90 an H100 or H200."""

    capability: int = 90
    compiled: dict[Any, Compiled] = field(default_factory=dict)

    def __call__(self, kernel: Any, grid: Sequence[int], tile: Tile, **arguments: Any) -> None:
        arguments["PDL"] = self.pdl
        constants = {p.name for p in kernel.params if p.is_constexpr}
        signature, attributes, values = {}, {}, {}
        for index, parameter in enumerate(kernel.params):
            value = arguments[parameter.name]
            if parameter.name in constants:
                signature[parameter.name], values[(index,)] = "constexpr", value
                continue
            signature[parameter.name] = _type(value)
            if isinstance(value, Tensor) or (isinstance(value, int) and value % 16 == 0):
                attributes[(index,)] = [["tt.divisibility", 16]]
        key = (kernel.__name__, *signature.items(), *values.items(), tile)
        if key in self.compiled:
            return
        source = ASTSource(fn=kernel, signature=signature, constexprs=values, attrs=attributes)
        options = {"num_warps": tile.warps, "num_stages": tile.stages, "launch_pdl": self.pdl}
        binary = triton.compile(source, target=GPUTarget("cuda", self.capability, 32), options=options)
        types = " ".join(name for name in signature.values() if name != "constexpr")
        streams = arguments.get("MP") == 1 and "w_ptr" in arguments
        self.compiled[key] = _read(kernel.__name__.lstrip("_").removesuffix("_kernel"), types, tile, binary, streams)


def _type(value: Any) -> str:
    if isinstance(value, Tensor):
        return "*" + TYPES[value.dtype]
    return "fp32" if isinstance(value, float) else "i32"


def _read(kernel: str, types: str, tile: Tile, binary: Any, streams: bool) -> Compiled:
    with TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(binary.asm["cubin"])
        usage = _tool("--dump-resource-usage", cubin)
        sass = _tool("--dump-sass", cubin) if streams else ""
    registers, stack = (int(re.search(rf"{key}:(\d+)", usage)[1]) for key in ("REG", "STACK"))  # type: ignore[index]
    loads = Counter(int(bits or 32) for bits in re.findall(r"\bLDG\.E\.EF\.?(\d*)", sass))
    dependent = sorted(set(re.findall(r"griddepcontrol\.(\w+)", binary.asm["ptx"])))
    return Compiled(kernel, types, tile, registers, stack, binary.metadata.shared, dict(loads), dependent)


def _tool(option: str, cubin: Path) -> str:
    return subprocess.run([TOOLS / "cuobjdump", option, cubin], capture_output=True, text=True, check=True).stdout


def meta(*sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(sizes, dtype=dtype, device="meta")


@dataclass(frozen=True)
class Model:
    """A model of one layer, and the inputs and outputs of a call with `tokens` new tokens for each sequence."""

    shape: LayerShape
    dtype: torch.dtype
    batch: int
    tokens: int = 1
    int8_cache: bool = False
    # bits, inputs per group (0: a row) and numbers per group, also for the LM head and the tied embedding;
    # None: int8 by row, without head and embedding
    codes: tuple[int, int, int] | None = None

    def linear(self, outputs: int, inputs: int, *, bias: bool = False) -> Linear:
        bias_vector = meta(outputs) if bias else None
        if self.dtype != torch.int8:
            return Linear(meta(outputs, inputs, dtype=self.dtype), bias_vector, outputs, inputs, "rows")
        bits, group, numbers = self.codes or (8, 0, 1)
        group = group or inputs
        words = meta(outputs, inputs * bits // 32, 4, dtype=torch.int8)
        scales = meta(outputs, inputs // group, numbers, dtype=torch.float16)
        return Linear(words, bias_vector, outputs, inputs, "words", scales, group, bits)

    def norm(self) -> Norm:
        hidden = self.shape.hidden
        return Norm(self.shape.norm, meta(hidden), meta(hidden) if self.shape.norm == "layer" else None, 1e-5)

    def output_norm(self) -> Norm:
        return self.norm() if self.shape.output_norms else NO_NORM

    @property
    def caps(self) -> tuple[float | None, float | None]:
        """Caps of scores and of logits."""
        return CAPS.get(self.shape.model, (None, None))

    @property
    def layer(self) -> LayerWeights:
        shape, width = self.shape, self.shape.heads.query * self.shape.heads.dim
        outputs, heads = width + 2 * shape.heads.kv * shape.heads.dim, meta(shape.heads.query)
        return LayerWeights(
            QkvWeights(self.norm(), self.linear(outputs, shape.hidden, bias="qkv" in shape.biases)),
            AttentionParams(
                0.1, slopes=heads if shape.alibi else None, cap=self.caps[0], sinks=heads if shape.sinks else None
            ),
            self.linear(shape.hidden, width),
            meta(shape.hidden) if "attn_out" in shape.biases else None,
            self.mlp if shape.experts is None else self.mixture(shape.experts),
            shared_norm=shape.parallel,
        )

    @property
    def mlp(self) -> DenseMlp:
        shape = self.shape
        up = self.linear(shape.intermediate * (2 if shape.gated else 1), shape.hidden, bias="ff1" in shape.biases)
        return DenseMlp(
            MlpWeights(self.norm(), up, shape.activation, shape.gated, self.output_norm()),
            self.linear(shape.hidden, shape.intermediate),
            meta(shape.hidden) if "ff2" in shape.biases else None,
            self.output_norm(),
        )

    def mixture(self, experts: ExpertsShape) -> MixtureMlp:
        shape, stored, count = self.shape, float_dtype(self.dtype), experts.count
        bias = meta(count) if "router" in shape.biases else None
        router = Linear(meta(count, shape.hidden, dtype=stored), bias, count, shape.hidden, "rows")
        shared = None
        if experts.shared:
            region = MlpWeights(NO_NORM, self.linear(2 * experts.shared, shape.hidden), shape.activation, gated=True)
            gate = Linear(meta(1, shape.hidden, dtype=stored), None, 1, shape.hidden, "rows")
            shared = SharedExpert(region, self.linear(shape.hidden, experts.shared), gate)
        return MixtureMlp(
            Router(self.norm(), router, experts.chosen, renormalised=True),
            own=range(count),
            ups=self.linear(count * 2 * shape.intermediate, shape.hidden, bias="ff1" in shape.biases),
            outs=self.linear(count * shape.hidden, shape.intermediate, bias="ff2" in shape.biases),
            activation=shape.activation,
            gated=True,
            hidden=shape.hidden,
            shared=shared,
        )

    @property
    def weights(self) -> ModelWeights:
        shape, stored = self.shape, float_dtype(self.dtype)
        sizes = (shape.vocabulary, shape.hidden)
        tied = self.linear(*sizes) if self.codes else None
        table = None if tied else meta(*sizes, dtype=stored)
        head = tied or Linear(meta(*sizes, dtype=stored), None, *sizes, "rows")
        return ModelWeights(
            layers=(self.layer,),
            heads=shape.heads,
            hidden=shape.hidden,
            intermediate=shape.experts.shared or 1 if shape.experts else shape.intermediate,
            embedding=EmbeddingWeights(table, tied, shape.hidden, range(shape.vocabulary), Norm()),
            final_norm=self.norm(),
            head=HeadWeights(head, range(shape.vocabulary), shape.vocabulary, cap=self.caps[1]),
            parallel_residual=shape.parallel,
            residual_from_norm=False,
        )

    @property
    def rows(self) -> Rows:
        positions = meta(self.batch * self.tokens, dtype=torch.int32)
        tables = meta(self.batch, CAPACITY, dtype=torch.int32) if self.shape.alibi else None
        return Rows(self.batch, self.tokens, positions, meta(self.batch, dtype=torch.int32), None, tables)

    @property
    def rotary(self) -> Rotary | None:
        half = self.shape.rotary // 2
        return Rotary(meta(CAPACITY, half), meta(CAPACITY, half), self.shape.interleaved) if half else None

    @property
    def cache(self) -> LayerCache:
        heads = self.shape.heads
        sizes = (self.batch, heads.kv, CAPACITY, padded_head_dim(heads.dim))
        counter = meta(1, dtype=torch.int32)
        dtype = torch.int8 if self.int8_cache else float_dtype(self.dtype)
        keys, values = (meta(*sizes, dtype=dtype) for _ in range(2))
        scales = [meta(*sizes[:3], dtype=torch.float16) if self.int8_cache else None for _ in range(2)]
        return LayerCache(keys, values, 5, counter, *scales)

    def step(self, launch: gpu.Launcher, *, chooses: bool = False) -> None:
        """Launches all kernels of a decode step. chooses: it samples a token by rules."""
        rows, weights = self.rows, self.weights
        state = StepState(meta(self.batch, dtype=torch.int64), rows.positions, meta(1, dtype=torch.int32))
        buffers = Buffers(weights, self.batch, torch.device("meta"))
        step = TritonStep(weights, launch)
        inputs = StepInputs(state, buffers, rows, self.rotary, [self.cache])
        choice = DeviceChoice(buffers.logits, CAPACITY, samples=True) if chooses else None
        step(inputs, lambda *_: nullcontext(), greedy=not chooses, choice=choice)

    def ops(self, launch: gpu.Launcher) -> None:
        """Launches the ops of a layer one by one, as a prompt does."""
        w, rows, cache, stored = self.layer, self.rows, self.cache, float_dtype(self.dtype)
        count, heads = self.batch * self.tokens, self.shape.heads
        queries = meta(count, heads.query * heads.dim, dtype=stored)
        hidden = meta(count, self.shape.hidden)
        act = meta(count, self.shape.intermediate, dtype=stored)
        qkv_gemm(hidden, w.qkv, heads, self.rotary, rows, cache, queries, None, launch)
        attention_impl.attention(queries, w.attention, heads, rows, cache, queries, launch)
        gemm(queries, w.attn_out, hidden, launch, bias=w.attn_bias, residual=hidden)
        if isinstance(w.mlp, DenseMlp):
            mlp_gemm(hidden, hidden, w.attn_bias, w.mlp.region, act, hidden, launch)
            return
        choice = route(hidden, hidden, w.attn_bias, w.mlp.router, launch)
        experts(choice.normed, choice.chosen, choice.shares, w.mlp.experts, hidden, launch)


@dataclass(frozen=True)
class Job:
    """What to compile: a decode step for `batch` sequences, or with `tokens` the ops for one prompt.

    chooses: the step samples tokens by rules.
    """

    model: str
    dtype: str
    capability: int
    batch: int = 1
    tokens: int = 0
    pdl: bool = False
    int8_cache: bool = False
    codes: tuple[int, int, int] | None = None
    chooses: bool = False

    def run(self) -> list[Compiled]:
        """The compiled kernels, each form once."""
        shape = next(shape for shape in SHAPES if shape.model == self.model)
        model = Model(shape, getattr(torch, self.dtype), self.batch, self.tokens or 1, self.int8_cache, self.codes)
        attention_impl.processors = cache(lambda: PROCESSORS[self.capability])
        launch = Compiler(pdl=self.pdl, capability=self.capability)
        if self.tokens:
            model.ops(launch)
        else:
            model.step(launch, chooses=self.chooses)
        return list(launch.compiled.values())


if __name__ == "__main__":
    jobs = [Job(**fields) for fields in json.loads(sys.argv[2])]
    Path(sys.argv[1]).write_text(json.dumps([[asdict(kernel) for kernel in job.run()] for job in jobs]))
