"""Megatron-LM's checkpoints of GPT-2: one file for each of its model-parallel ranks.

Linears are [out, in]. A rank has some rows of the embedding, of the first MLP matrix and of QKV, and some columns of
the two matrices whose outputs the ranks add up; all other tensors are on every rank. QKV rows are [3, heads, D] in
version 0, [heads, D, 3] in version 1.0 and [heads, 3, D] in version 2.0.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from torch import Tensor

from labkit.models.config import ModelConfig
from labkit.models.policies import GPT2
from labkit.models.policy import Policy
from labkit.system.errors import UserError
from labkit.weights.checkpoint.divided import DividedWeights, by_thirds, replicated, same_names, side_by_side
from labkit.weights.checkpoint.files import TensorFile
from labkit.weights.checkpoint.pieces import Divided, FilePart

VERSIONS = (0.0, 1.0, 2.0)
IN_LAYER = {  # Megatron's module -> its role
    "input_layernorm": "norm1",
    "attention.query_key_value": "qkv",
    "attention.dense": "attn_out",
    "post_attention_layernorm": "norm2",
    "mlp.dense_h_to_4h": "ff1",
    "mlp.dense_4h_to_h": "ff2",
}
OUTSIDE = {"word_embeddings": "tokens", "position_embeddings": "positions", "final_layernorm": "final_norm"}
NAME = re.compile(r"(?:layers\.(\d+)\.(?:self_)?([a-z0-9_.]+)|([a-z_]+))\.(weight|bias)$")
ROWS = {"tokens", "qkv", "ff1"}  # cut along their outputs
COLUMNS = {"attn_out", "ff2"}  # matrices cut along their inputs; their biases are on every rank


def megatron_weights(
    paths: Sequence[Path], version: float | None, policy: Policy, config: ModelConfig
) -> DividedWeights:
    """The weights of a GPT-2 in these files, one for each rank that wrote it.

    version: of the layout of QKV; None: the version in the files, or else 0. Raises UserError for another architecture,
    for an unknown version, and for files that are missing, damaged or of another model.
    """
    if policy is not GPT2:
        raise UserError(
            f"a Megatron checkpoint is read as {GPT2.architecture}, got {policy.architecture}; pass a GPT-2"
        )
    files = [TensorFile(path) for path in paths]
    arrange = _arrangement(_version(files, version), config.head_dim)
    with_optimizer = any(name.startswith("model.") for name in files[0].names())
    tensors: dict[str, Divided] = {}
    for stored in same_names(files, "model." if with_optimizer else ""):
        role, name = _hf_name(stored, policy)
        tensors[name] = _divided(stored, role, files, arrange, config)
    policy.check(config, tensors)
    return DividedWeights(tensors)


def _version(files: Sequence[TensorFile], described: float | None) -> float:
    for file in files:
        own = next((value for name, value in file.other.items() if name.endswith("checkpoint_version")), None)
        if own is not None and described is not None and float(own) != described:
            raise UserError(
                f"the description says version {described}, but {file.path} says {own}; correct the description"
            )
        described = described if own is None else float(own)
    version = 0.0 if described is None else described
    if version not in VERSIONS:
        raise UserError(f"Megatron version {version} is unknown; expected one of {', '.join(map(str, VERSIONS))}")
    return version


def _arrangement(version: float, head_dim: int) -> Callable[[Tensor], Tensor]:
    """A function that puts a file's QKV rows in order: query rows of all heads, then key rows, then value rows."""

    def arrange(tensor: Tensor) -> Tensor:
        if version == 0.0:
            return tensor
        if version == 1.0:
            by_head = tensor.unflatten(0, (-1, head_dim, 3)).movedim(2, 0)
        else:
            by_head = tensor.unflatten(0, (-1, 3, head_dim)).transpose(0, 1)
        return by_head.reshape(tensor.shape)

    return arrange


def _hf_name(stored: str, policy: Policy) -> tuple[str | None, str]:
    """The role of a tensor and its name in Hugging Face's GPT-2; None and its stored name where GPT-2 has no such
    tensor.
    """
    match = NAME.search(stored)
    if match is None:
        return None, stored
    layer, inside, outside, kind = match.groups()
    role = OUTSIDE.get(outside) if layer is None else IN_LAYER.get(inside)
    if role is None:
        return None, stored
    own = policy.modules(role)[0]
    return role, f"{own}.{kind}" if layer is None else f"{policy.layers}.{layer}.{own}.{kind}"


def _divided(
    stored: str, role: str | None, files: Sequence[TensorFile], arrange: Callable[[Tensor], Tensor], config: ModelConfig
) -> Divided:
    tensors = [file.get(stored) for file in files]
    if role is None:
        return Divided(tuple(tensors[0].shape), 0, ())
    matrix = tensors[0].ndim == 2
    if role not in ROWS and not (role in COLUMNS and matrix):
        return replicated(stored, files, tensors)
    dim = 0 if role in ROWS else 1
    shapes = [tuple(tensor.shape) for tensor in tensors]
    if len(set(shapes)) > 1:
        odd = next(index for index, shape in enumerate(shapes) if shape != shapes[0])
        raise UserError(
            f"{stored} is {list(shapes[0])} in {files[0].path} and {list(shapes[odd])} in {files[odd].path}; "
            "all shards must come from one save of one model"
        )
    lengths = [shape[dim] for shape in shapes]
    whole = list(shapes[0])
    whole[dim] = sum(lengths)
    ranges = side_by_side(lengths)
    if role == "tokens":  # Megatron pads the vocabulary
        whole[0] = min(whole[0], config.vocab_size)
        ranges = [((begin, min(end, whole[0])),) for ((begin, end),) in ranges if begin < whole[0]]
    if role == "qkv":
        if lengths[0] % (3 * config.head_dim):
            raise UserError(
                f"{stored} has {lengths[0]} rows in {files[0].path}, expected a multiple of 3 heads of "
                f"{config.head_dim}; check that the checkpoint and the model belong together"
            )
        ranges = by_thirds(lengths)
    transposed = matrix and role != "tokens"
    reads = [partial(_read, tensor, arrange if role == "qkv" else None, transposed) for tensor in tensors]
    parts = tuple(FilePart(read, taken) for read, taken in zip(reads, ranges, strict=False))
    return Divided(tuple(whole[::-1] if transposed else whole), 1 - dim if transposed else dim, parts)


def _read(tensor: Tensor, arrange: Callable[[Tensor], Tensor] | None, transposed: bool) -> Tensor:
    tensor = arrange(tensor) if arrange else tensor
    return tensor.T if transposed else tensor
