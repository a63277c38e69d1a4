"""llama.cpp's files: quantised by llama.cpp itself, and what is stored in one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from labkit.harness.stored_weights import StoredWeights
from labkit.system.errors import RunError

FLOATS = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}  # all else is multiplied with rows rounded to int8
HEADS = ("output.weight", "token_embd.weight")  # the second where the head is tied


def quantise(api: Any, plain: Path, target: Path, kind: str) -> None:
    """Write the model of `plain` with weights of a type, "Q4_0", as llama.cpp's own `llama-quantize` does: it chooses
    another one for the LM head, and for matrices whose rows are no whole number of blocks.
    """
    settings = api.llama_model_quantize_default_params()
    settings.ftype = getattr(api, f"LLAMA_FTYPE_MOSTLY_{kind}")
    if status := api.llama_model_quantize(str(plain).encode(), str(target).encode(), settings):
        raise RunError(f"llama.cpp cannot write {kind}: llama_model_quantize failed with status {status}")


def stored_in(file: Path, gguf: Any) -> StoredWeights:
    """What the matrices of a file are stored in; `gguf` is the package of this name."""
    read = gguf.GGUFReader(file)
    tensors = {tensor.name: tensor for tensor in read.tensors}
    head = next(tensors[name] for name in HEADS if name in tensors)
    layers = [tensor for name, tensor in tensors.items() if name.startswith("blk.") and len(tensor.shape) > 1]
    name = _type_of(read, gguf) or max(layers, key=lambda tensor: int(tensor.n_elements)).tensor_type.name
    return StoredWeights(
        name=name,
        bits=_bits(layers),
        head=head.tensor_type.name,
        head_bits=_bits([head]),
        computes=FLOATS.get(name, "int8"),
    )


def _type_of(read: Any, gguf: Any) -> str | None:
    """What the file says of itself, "Q4_K_M"; None where it says nothing."""
    field = read.fields.get("general.file_type")
    return None if field is None else gguf.LlamaFileType(field.contents()).name.partition("_")[2]


def _bits(tensors: list[Any]) -> float:
    return 8 * sum(int(tensor.n_bytes) for tensor in tensors) / sum(int(tensor.n_elements) for tensor in tensors)
