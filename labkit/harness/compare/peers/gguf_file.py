"""llama.cpp's files: quantising one with llama.cpp, and the stored types in one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from labkit.harness.stored_weights import StoredWeights
from labkit.system.errors import RunError

# Types in which prompts are computed. Matrices of other types are multiplied with rows rounded to int8.
FLOATS = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
HEADS = ("output.weight", "token_embd.weight")  # the second name is that of a tied head


def quantise(api: Any, plain: Path, target: Path, kind: str) -> None:
    """Writes the model of `plain` with weights of the type `kind`, such as "Q4_0", as llama.cpp's `llama-quantize`
    does. It chooses another type for the LM head, and for matrices with rows that are no whole number of blocks.
    """
    settings = api.llama_model_quantize_default_params()
    settings.ftype = getattr(api, f"LLAMA_FTYPE_MOSTLY_{kind}")
    if status := api.llama_model_quantize(str(plain).encode(), str(target).encode(), settings):
        raise RunError(f"llama.cpp cannot write {kind}: llama_model_quantize failed with status {status}")


def stored_in(file: Path, gguf: Any) -> StoredWeights:
    """Stored types of the matrices in a file. `gguf` is the package of this name."""
    reader = gguf.GGUFReader(file)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    head = next(tensors[name] for name in HEADS if name in tensors)
    layers = [tensor for name, tensor in tensors.items() if name.startswith("blk.") and len(tensor.shape) > 1]
    name = _type_of(reader, gguf) or max(layers, key=lambda tensor: int(tensor.n_elements)).tensor_type.name
    return StoredWeights(
        name=name,
        bits=_bits(layers),
        head=head.tensor_type.name,
        head_bits=_bits([head]),
        computes=FLOATS.get(name, "int8"),
    )


def _type_of(reader: Any, gguf: Any) -> str | None:
    """Type that the file names itself, such as "Q4_K_M"; None where it names none."""
    field = reader.fields.get("general.file_type")
    return None if field is None else gguf.LlamaFileType(field.contents()).name.partition("_")[2]


def _bits(tensors: list[Any]) -> float:
    return 8 * sum(int(tensor.n_bytes) for tensor in tensors) / sum(int(tensor.n_elements) for tensor in tensors)
