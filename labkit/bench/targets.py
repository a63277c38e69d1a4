"""Cases of the benches and bars of their figures, as data in one place.

Some benches have their cases and bars in their own files, among them `every_model`, `traces` and `self_comparison`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from labkit.harness.compare.peers.llama_cpp import LLAMA_CPP, LLAMA_CPP_INT8, LLAMA_CPP_Q4_0, LLAMA_CPP_Q4_1
from labkit.stages import Stage

PROMPT = NEW = 128
MEMORY = 1.15  # peak memory / (weights + KV cache), at most


@dataclass(frozen=True)
class Sides:
    """The sides that are measured together: the candidate, the baseline and, if installed, a peer."""

    baseline: str
    candidate: str
    peer: str

    @property
    def names(self) -> tuple[str, str, str]:
        return self.baseline, self.candidate, self.peer


FUSED = Sides("hf-eager", "fused", LLAMA_CPP)
INT8 = Sides("fused", "fused-int8", LLAMA_CPP_INT8)
INT4 = Sides("fused-int8", "fused-int4", LLAMA_CPP_Q4_1)
INT4_64 = Sides("fused-int8", "fused-int4-64", LLAMA_CPP_Q4_0)
INT4_128 = Sides("fused-int8", "fused-int4-128", LLAMA_CPP_Q4_0)
INT4_ROWS = Sides("fused", "fused-int4", LLAMA_CPP_Q4_1)  # several sequences: the bar is the speed of bfloat16
PRECISIONS = {INT8: "int8", INT4: "int4-32", INT4_64: "int4-64", INT4_128: "int4-128", INT4_ROWS: "int4-32"}


@dataclass(frozen=True)
class Target:
    """One case, 128 + 128 tokens, and its bars. Ratios are least values of baseline / candidate; None: no bar."""

    model: str
    dtype: str  # of the sides whose weights are not quantised
    batch: int
    per_token: float  # ratio
    limit_share: float | None = None  # per token
    ttft: float | None = None  # ratio
    prompt_share: float | None = None  # of the limit, to the first token
    llama_cpp: float | None = None  # ratio per token; None: not compared
    llama_cpp_ttft: float = 1.0  # ratio, if llama.cpp is compared
    sides: Sides = FUSED

    @property
    def name(self) -> str:
        kind = PRECISIONS.get(self.sides, self.dtype)
        return f"{self.model} {kind}" + (f" batch {self.batch}" if self.batch > 1 else "")

    @property
    def key(self) -> tuple[str, str, int, str]:
        return self.model, self.dtype, self.batch, self.sides.candidate


_fp32 = partial(Target, dtype="float32", batch=1, limit_share=0.88, prompt_share=0.80, llama_cpp=1.15)
_bf16 = partial(Target, dtype="bfloat16", batch=1, limit_share=0.82, prompt_share=0.65, llama_cpp=1.2)
NO_SLOWER = 1 / 1.05  # than bfloat16, in cases where arithmetic is the limit
_int8 = partial(
    Target, dtype="bfloat16", batch=1, per_token=1.7, ttft=NO_SLOWER, limit_share=0.80, llama_cpp=1.7, sides=INT8
)
_int4 = partial(Target, dtype="bfloat16", batch=1, per_token=1.6, ttft=NO_SLOWER, limit_share=0.75, llama_cpp=1.4)
_rows = partial(Target, dtype="bfloat16", batch=8, per_token=NO_SLOWER)
_steps = partial(Target, limit_share=0.85)

TARGETS = (
    _fp32("gpt2", per_token=2.4, ttft=1.8),
    _bf16("gpt2", per_token=3.9, ttft=1.1),
    _fp32("gpt2-medium", per_token=2.6, ttft=1.5),
    _bf16("gpt2-medium", per_token=3.4, ttft=1.0),
    _fp32("bloom-560m", per_token=2.6, ttft=1.5),
    _bf16("bloom-560m", per_token=3.4, ttft=1.0),
    _fp32("llama-shape", per_token=2.6, ttft=1.5),
    _bf16("llama-shape", per_token=3.4, ttft=1.0),
    _fp32("smollm2-135m", per_token=2.6, ttft=1.5, limit_share=0.80, llama_cpp=1.3),
    _bf16("smollm2-135m", per_token=3.4, ttft=1.0, limit_share=0.80, llama_cpp=1.3),
    _fp32("gptj-shape", per_token=2.6, ttft=1.5, llama_cpp=None),
    _bf16("gptj-shape", per_token=2.6, ttft=1.0, llama_cpp=None),
    _steps("gpt2", "float32", 8, per_token=1.8),
    _steps("gpt2", "float32", 16, per_token=1.8),
    _steps("gpt2", "float32", 32, per_token=1.8),
    _steps("llama-shape", "float32", 8, per_token=1.8),
    _int8("gpt2"),
    _int8("gpt2-medium"),
    _int8("bloom-560m"),
    _int8("llama-shape"),
    _int8("smollm2-135m", limit_share=0.70),
    _int8("gptj-shape", llama_cpp=None),
    *(
        _int4(model, sides=sides, limit_share=0.60 if sides is INT4 else 0.75)
        for model in ("gpt2-medium", "bloom-560m", "llama-shape")
        for sides in (INT4, INT4_64, INT4_128)
    ),
    *(_int4("smollm2-135m", sides=sides, limit_share=0.60) for sides in (INT4, INT4_64)),  # 128 does not divide 576
    *(_rows(model, sides=sides) for model in ("gpt2-medium", "llama-shape") for sides in (INT8, INT4_ROWS)),
)


@dataclass(frozen=True)
class RegionTarget:
    """A shape whose regions are measured at batch 1."""

    model: str
    dtype: str
    context: int  # tokens in the cache


REGION_MODELS = ("gpt2", "gptj-shape", "llama-shape")
REGION_TARGETS = (
    *(RegionTarget(model, dtype, 128) for dtype in ("float32", "bfloat16", "int8") for model in REGION_MODELS),
    *(RegionTarget(model, "float32", 1023) for model in REGION_MODELS),
)
REGION_RATIOS = {Stage.QKV: 2.5, Stage.ATTENTION: 3.0, Stage.MLP: 3.0, Stage.RESIDUAL: 1.5}  # unfused / fused, at least
REGION_SHARE = 0.75  # of the limit, at least, for the two regions with a matrix

PARALLEL_MODELS = ("llama-shape", "gpt2-medium")
OF_LIMIT = 0.9  # (one thread / two ranks) / the ratio that the memory allows, at least
TO_TWO_THREADS = 1.05  # two ranks / two threads, at most
EXCHANGE_US, EXCHANGE_RATIO = 10.0, 5.0  # of a sum in a decode step: most time; least speedup over gloo
EXCHANGE_SIZES = range(4 * 1024, 16 * 1024 + 1)  # bytes of such a sum


@dataclass(frozen=True)
class PipelineTarget:
    """A batch that goes through two stages, and the least speedup of the queue per token; None: no bar."""

    batch: int
    naive: float | None = None  # over one batch at a time, on the same kernels
    transformers: float | None = None  # over transformers' pipeline


PIPELINE_MODEL = "llama-shape"
PIPELINE_TARGETS = (
    PipelineTarget(2),
    PipelineTarget(8, transformers=1.5),
    PipelineTarget(32, naive=1.7, transformers=1.8),
)
BUBBLE_POINTS = 5.0  # most percentage points between a bubble and the formula of its schedule
HAND_OVER_ROWS, HAND_OVER_WIDTH = 32, 1024
HAND_OVER_US = 30.0  # most time to hand these rows to the next stage


@dataclass(frozen=True)
class LlamaSizes:
    """The layers of the LLaMA that ranks load. Their number follows from its size."""

    hidden: int
    intermediate: int
    vocabulary: int
    heads: int


LOADED = LlamaSizes(hidden=2048, intermediate=5632, vocabulary=32000, heads=16)
LOAD_RATIO, LOAD_MEMORY = 3.0, 1.15  # least speedup; most memory less the largest tensor, relative to a rank's share
LOAD_PRECISIONS = ("float32", "bfloat16", "int8", "int8+head", "int4", "int4-64+head8", "int4-128+head")
PACKED_MEMORY = 1.15  # peak while one process loads / packed weights, at most


@dataclass(frozen=True)
class StreamTarget:
    """A case of streaming."""

    name: str
    precision: str
    resident: float = 0.0  # fraction of the layers that is resident
    prompt: int = 16  # tokens


STREAM_MODEL = "tinyllama-1.1b"
STREAM_WHOLE, STREAM_INT8, STREAM_INT4 = "bfloat16", "int8", "int4-128"
STREAM_TARGETS = (
    StreamTarget(STREAM_WHOLE, "bfloat16"),
    StreamTarget("bfloat16, half resident", "bfloat16", resident=0.5),
    StreamTarget("bfloat16, prompt of 2000", "bfloat16", prompt=2000),
    StreamTarget(STREAM_INT8, "int8"),
    StreamTarget(STREAM_INT4, "int4-128"),
)
STREAM_SHARE = 0.9  # of the disk's rate, at least
STREAM_BESIDE = 1.1  # most time of a step without unhidden computing / the disk's time
STREAM_HIDDEN = 0.8  # of the shorter of reading and computing, at least
STREAM_RATIOS = {(STREAM_WHOLE, STREAM_INT8): 1.8, (STREAM_INT8, STREAM_INT4): 1.7}  # of step times, at least


LARGER = 1.5  # bytes of the weights / memory of each side
LARGER_RATIO = 2.5  # other ways to run from the disk / streamed layers, per token, at least


@dataclass(frozen=True)
class GpuTarget:
    """A model, and the most milliseconds per token at batch 1 on an H200."""

    model: str
    float16_ms: float  # with float16 weights
    int8_ms: float  # with int8 weights


GPU_TARGETS = (
    GpuTarget("gpt-j-6b", 3.1, 1.7),
    GpuTarget("bloom-7b1", 3.8, 2.2),
    GpuTarget("llama-2-7b", 3.5, 1.8),
)
GPU_OF_TARGETS = "H200"  # part of the GPU's name
GPU_SHARE = 0.78  # of the limit at batch 1 on any other GPU, at least
GPU_RATIOS = {"hf-eager": 6.0, "hf-graph": 1.3}  # baseline / fused per token at batch 1, at least
GPU_BATCH_4 = 1.1  # time of a step at batch 4 / time at batch 1, at most

RANGES_MODEL, RANGES_COST = "gpt2", 0.01  # of a decode step, at most
TIMELINE_OPEN_S, TIMELINE_FRAMES = 2.0, 30.0  # seconds at most; frames a second at least
PAGE_MB = {100_000: 2.0, 1_000_000: 15.0}  # most size of a timeline's page by its events
