"""The table of sides: every way to run a model that can be compared.

The help of the command line, `labkit sides`, the choices in notebooks, errors and the loaders read this table. It
imports no torch, so that the help is quick. A new side is a row here, and the `Loader` that the row names.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from labkit.system.errors import UserError
from labkit.system.nearest import did_you_mean

PRECISION = "PRECISION"  # in the name of a row: any precision of the engine

Device = Literal["any", "CPU", "GPU"]
Weights = Literal["memory", "files", "disk", "stages"]
Models = Literal["any", "listed", "LLaMA-like", "GGUF"]

WEIGHTS: dict[Weights, str] = {
    "memory": "in memory, packed or quantised when the side is loaded",
    "files": "in memory, from files that are written for the side",
    "disk": "on the disk, in files that are written for the side; a step reads what is not resident",
    "stages": "in memory, spread over the stages of --pp",
}
MODELS: dict[Models, str] = {
    "any": "every causal language model of transformers",
    "listed": "the architectures of docs/models.md",
    "LLaMA-like": "listed architectures with LLaMA's names of modules",
    "GGUF": "a GGUF file",
}


@dataclass(frozen=True)
class SideRow:
    """What is known about a side before it is loaded. A name that ends with ":PRECISION" stands for many sides."""

    name: str
    sentence: str
    loader: str  # module and class of its `Loader`, in this package
    device: Device = "any"
    weights: Weights = "memory"
    models: Models = "listed"
    package: str = ""  # a package to install with pip
    instead: str = ""  # the side to use where this one's device is missing
    divisible: bool = False  # can run on ranks: NAME-tp2, NAME-pp2, NAME-ep2
    precision: str = ""  # of the engine; empty: the dtype of the comparison, or the name has it
    peer: str = ""  # the runtime that `labkit peers install` installs
    samples: bool = True  # can choose tokens by sampling, with transformers' settings
    own_type: bool = False  # the weights have a type of their own, which the dtype of the comparison does not change

    @property
    def prefix(self) -> str:
        """The name without "PRECISION"; empty for a single side."""
        return self.name.removesuffix(PRECISION) if self.name.endswith(f":{PRECISION}") else ""

    @property
    def needs(self) -> str:
        """The command that installs what the side needs; empty where labkit's installation is enough."""
        if self.peer:
            return f"labkit peers install {self.peer}"
        return f"pip install {self.package}" if self.package else ""


def _vanilla(name: str, sentence: str, loader: str, **fields: Any) -> SideRow:
    """A side that transformers runs from memory."""
    return SideRow(name, sentence, f"vanilla_sides:{loader}", **{"models": "any"} | fields)


def _fused(name: str, sentence: str, precision: str = "", models: Models = "any") -> SideRow:
    """The engine with resident weights. Models without a row run with hooks."""
    return SideRow(name, sentence, "fused_sides:Fused", models=models, divisible=True, precision=precision)


def _disk(name: str, sentence: str, loader: str, package: str = "") -> SideRow:
    """A side with weights on the disk."""
    return SideRow(name, sentence, f"disk_sides:{loader}", device="CPU", weights="disk", package=package)


ROWS = (
    _vanilla("hf-eager", "transformers, op by op", "Eager"),
    _vanilla("hf-gemm", "hf-eager with labkit's GEMM", "Gemm", device="CPU", models="listed", instead="hf-graph"),
    _vanilla("hf-static", "hf-eager with a static KV cache", "StaticCache"),
    _vanilla("hf-compile", "transformers with torch.compile", "Compiled"),
    _vanilla("hf-graph", "transformers in a CUDA graph", "Graphed", device="GPU", instead="hf-static", samples=False),
    _vanilla("accelerate", "hf-eager with accelerate's hooks", "Accelerate", package="accelerate"),
    _fused("fused", "labkit's engine"),
    _fused("fused-int8", "the engine with int8 weights", "int8+head"),
    _fused("fused-int4", "the engine with int4 weights in groups of 32", "int4+head"),
    _fused("fused-int4-64", "the engine with int4 weights in groups of 64", "int4-64+head"),
    _fused("fused-int4-128", "the engine with int4 weights in groups of 128", "int4-128+head"),
    _fused("fused-stored", "the engine with the codes of a GGUF file", "stored", "GGUF"),
    _fused("fused:PRECISION", "the engine in any precision, such as fused:int4-64"),
    _disk("fused-streamed", "the engine with offloaded layers", "Streamed"),
    _disk("fused-streamed:PRECISION", "fused-streamed in any precision, such as fused-streamed:int8", "Streamed"),
    _disk("hf-disk", "transformers with device_map disk", "HfDisk", "accelerate"),
    _disk("accelerate-disk", "accelerate's disk_offload", "AccelerateDisk", "accelerate"),
    SideRow(
        "hf-pipeline",
        "transformers' own pipeline",
        "hf_pipeline:HfPipeline",
        device="CPU",
        weights="stages",
        models="LLaMA-like",
    ),
)


def _peer(
    peer: str, loader: str, sides: dict[str, str], *, plain: str = "", weights: Weights = "files"
) -> tuple[SideRow, ...]:
    """The rows of a peer. `sides`: sentences by name. `plain`: the side in the dtype of the comparison; by default the
    side with the peer's name.
    """
    return tuple(
        SideRow(
            name,
            sentence,
            f"peers.{loader}",
            device="CPU",
            weights=weights,
            models="GGUF" if name.endswith("-gguf") else "listed",
            peer=peer,
            samples=weights == "memory",  # the others generate with a loop of their own
            own_type=name != (plain or peer),
        )
        for name, sentence in sides.items()
    )


LLAMA_CPP_SIDES = {
    "llama.cpp": "llama.cpp",
    "llama.cpp-q8_0": "llama.cpp with int8 weights in groups of 32",
    "llama.cpp-q4_0": "llama.cpp with int4 weights, a scale for each group of 32",
    "llama.cpp-q4_1": "llama.cpp with int4 weights, a scale and a minimum for each group of 32",
    "llama.cpp-gguf": "llama.cpp with the model's own GGUF file",
}
ONNXRUNTIME_SIDES = {"onnxruntime": "ONNX Runtime", "onnxruntime-int8": "ONNX Runtime with int8 weights"}
OPENVINO_SIDES = {"openvino": "OpenVINO", "openvino-int8": "OpenVINO with int8 weights"}
CTRANSLATE2_SIDES = {"ctranslate2": "CTranslate2", "ctranslate2-int8": "CTranslate2 with int8 weights"}
TORCHAO_SIDES = {
    "torchao-int8": "torchao, int8 weights, compiled",
    "torchao-int4": "torchao, int4 weights, compiled",
}
BITSANDBYTES_SIDES = {
    "bitsandbytes-int8": "bitsandbytes' LLM.int8()",
    "bitsandbytes-nf4": "bitsandbytes' 4-bit NF4",
}
DEEPSPEED_SIDES = {"deepspeed-zero": "DeepSpeed's ZeRO-Inference from files"}
PEER_ROWS = (
    *_peer("llama.cpp", "llama_cpp:LlamaCpp", LLAMA_CPP_SIDES),
    *_peer("onnxruntime", "onnxruntime:OnnxRuntime", ONNXRUNTIME_SIDES),
    *_peer("openvino", "openvino:OpenVino", OPENVINO_SIDES),
    *_peer("ctranslate2", "ctranslate2:CTranslate2", CTRANSLATE2_SIDES),
    *_peer("torchao", "torchao:TorchAo", TORCHAO_SIDES, weights="memory"),
    *_peer("bitsandbytes", "bitsandbytes:BitsAndBytes", BITSANDBYTES_SIDES, weights="memory"),
    *_peer("deepspeed", "deepspeed:DeepSpeed", DEEPSPEED_SIDES, plain="deepspeed-zero", weights="disk"),
)
SIDES = {row.name: row for row in (*ROWS, *PEER_ROWS)}
IN_PROCESS = tuple(row.name for row in ROWS if row.weights == "memory" and not row.prefix)  # choices of notebooks


def side_row(name: str, *, others: Iterable[str] = ()) -> SideRow:
    """The row of the side `name`, without an ending for ranks. `others`: further names that the error lists.

    UserError for an unknown name.
    """
    if name in SIDES and not SIDES[name].prefix:
        return SIDES[name]
    for row in SIDES.values():
        if row.prefix and name.startswith(row.prefix):
            return row
    known = (*SIDES, *others)
    raise UserError(
        f"unknown side {name!r}{did_you_mean(name, known)}; expected one of {', '.join(known)}; `labkit sides` "
        "describes them"
    )


def names_in_help() -> str:
    """The names for the help of an option; sides of peers are only mentioned."""
    return (
        f"{', '.join(row.name for row in ROWS)}; on ranks: fused-tp2, fused-pp2-naive, fused-ep2; or a side of a peer"
    )
