"""Checkpoints that DeepSpeed wrote for several ranks: `non_tp` files that all ranks share, and `tp` files per rank.

`tp` lists the files of all ranks of the first part, then of all ranks of the second part, and so on. Tensors have their
Hugging Face names. A rank's file holds a slice of each tensor, along the dimension in which its shape differs from the
model's. QKV that is stored as query rows, then key rows, then value rows (GPT-2) is cut within each of the three; QKV
that is stored head by head (NeoX, BLOOM) is cut as a whole. A tensor of the model's own shape is the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from labkit.models.config import ModelConfig
from labkit.models.policy import Policy
from labkit.system.errors import UserError
from labkit.weights.checkpoint.divided import DividedWeights, by_thirds, replicated, same_names, side_by_side
from labkit.weights.checkpoint.files import TensorFile
from labkit.weights.checkpoint.pieces import Divided, FilePart
from labkit.weights.protocol import require_tied


def tensor_parallel_weights(
    non_tp: Sequence[Path],
    tp: Sequence[Path],
    size: int,
    policy: Policy,
    config: ModelConfig,
    shapes: Mapping[str, tuple[int, ...]],
) -> DividedWeights:
    """The weights in the files that `size` ranks wrote. `shapes`: shapes of the whole model's tensors, by name.

    Raises UserError for files that are missing, damaged or of another model, and for parts that do not make up the
    model.
    """
    if size < 1 or len(tp) % size:
        raise UserError(
            f"tp lists {len(tp)} files for tp_size {size}; expected a multiple of tp_size: every part of every rank"
        )
    head, tokens = f"{policy.head}.weight", f"{policy.tokens}.weight"
    shared, divided = ([TensorFile(path) for path in paths] for paths in (non_tp, tp))
    current = policy.current_names(config, (stored for file in (*shared, *divided) for stored in file.names()))
    tensors: dict[str, Divided] = {}
    for file in shared:
        for stored in sorted(file.names() & current.keys()):
            tensors[current[stored]] = replicated(stored, [file], [file.get(stored)])
    for begin in range(0, len(tp), size):
        files = divided[begin : begin + size]
        for stored in (name for name in same_names(files) if name in current):
            name = current[stored]
            thirds = not policy.interleaved_qkv and len(policy.qkv) == 1 and f".{policy.qkv[0]}." in name
            shape = shapes.get(tokens if config.tied_head and name == head else name)
            tensors[name] = _divided(stored, files, shape, thirds)
    if config.tied_head and head in tensors:
        tensors.setdefault(tokens, tensors[head])
    policy.check(config, tensors)
    weights = DividedWeights(tensors)
    if config.tied_head:
        require_tied(policy, weights)
    return weights


def _divided(stored: str, files: Sequence[TensorFile], shape: tuple[int, ...] | None, thirds: bool) -> Divided:
    if shape is None:  # no weight of this model: a buffer, or a name that `policy.check` reports
        return Divided((), 0, ())
    tensors = [file.get(stored) for file in files]
    if all(tuple(tensor.shape) == shape for tensor in tensors):
        return replicated(stored, files, tensors)
    alike = all(tensor.ndim == len(shape) for tensor in tensors)
    dims = {dim for tensor in tensors for dim in range(len(shape)) if alike and tensor.shape[dim] != shape[dim]}
    lengths = [tensor.shape[min(dims)] for tensor in tensors] if dims else []
    if len(dims) != 1 or sum(lengths) != shape[min(dims)]:
        sizes = ", ".join(f"{list(tensor.shape)} in {file.path}" for file, tensor in zip(files, tensors, strict=True))
        raise UserError(
            f"{stored} is {sizes}, which do not make up the model's {list(shape)}; "
            "all shards must come from one save of this model"
        )
    ranges = by_thirds(lengths) if thirds else side_by_side(lengths)
    reads = [partial(file.get, stored) for file in files]
    parts = tuple(FilePart(read, taken) for read, taken in zip(reads, ranges, strict=True))
    return Divided(shape, dims.pop(), parts)
