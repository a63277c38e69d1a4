"""The tensors of a GGUF file by Hugging Face's names: as floats, as the stored codes, or as canonical weights."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PretrainedConfig

from labkit.kernels.codes import quantize
from labkit.kernels.types import Linear
from labkit.models.config import CHOICE_BIAS, ModelConfig, Shapes
from labkit.models.policy import LINEARS, Policy
from labkit.models.shards import Cut, Shard
from labkit.system.errors import UserError
from labkit.system.mapped_file import require_mapped
from labkit.weights.canonical import CanonicalLayers, Empty, Weight, is_matrix
from labkit.weights.gguf.architectures import ARCHITECTURES
from labkit.weights.gguf.file import GgufFile
from labkit.weights.gguf.header import StoredTensor
from labkit.weights.protocol import finite, identity_of_files

GROUP = 32  # numbers that share a scale in every type below
# Types whose blocks become codes and scales of labkit's without loss. The numbers of MXFP4 are halves of integers up to
# 12, which 4 bits cannot count.
BITS = {"Q8_0": 8, "Q4_0": 4, "Q4_1": 4, "MXFP4": 8}
STORED_BITS = BITS | {"MXFP4": 4}
DOUBLED = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=torch.int8)  # MXFP4's numbers
FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True)
class FileTensor:
    """A tensor as the file has it: [outputs, inputs], or a vector.

    shape: as a matrix or a vector. A file has the matrices of experts in three dimensions, and a matrix of one row as a
    vector, or a vector as a matrix of one row.
    """

    tensor: StoredTensor
    shape: tuple[int, ...]
    order: Tensor | None  # the row of the file for each of Hugging Face's rows; None: the same
    transposed: bool  # Hugging Face has it as [inputs, outputs]

    @property
    def kind(self) -> str:
        return str(self.tensor.kind.name)

    @property
    def matrix(self) -> bool:
        return len(self.shape) == 2

    def rows(self, cut: Cut | None) -> tuple[np.ndarray, Cut | None]:
        """The stored rows that a cut of Hugging Face's tensor takes, in Hugging Face's order, and the remaining cut of
        their inputs.
        """
        data = self.tensor.rows.reshape(-1, self.tensor.rows.shape[-1]) if self.matrix else self.tensor.rows.reshape(-1)
        if cut is not None and self.transposed:
            cut = Cut(1 - cut.dim, cut.ranges, cut.whole)
        if cut is not None and cut.whole != self.shape[cut.dim]:
            raise UserError(f"has {self.shape[cut.dim]} in dimension {cut.dim}, expected {cut.whole}")
        if cut is None or cut.dim != 0:
            return data if self.order is None else data[self.order.numpy()], cut
        if self.order is not None:
            return data[torch.cat([self.order[begin:end] for begin, end in cut.ranges]).numpy()], None
        pieces = [data[begin:end] for begin, end in cut.ranges]
        return (pieces[0] if len(pieces) == 1 else np.concatenate(pieces)), None


class GgufTensors:
    """The tensors of a file, as a source of weights. `get` returns floats, `codes` and `scales` the stored numbers."""

    def __init__(self, file: GgufFile, policy: Policy, shapes_of: Callable[[PretrainedConfig], Shapes]) -> None:
        """shapes_of: a config -> the shapes of its model's tensors by Hugging Face's names.

        Raises UserError for tensors of a type that cannot be dequantised, and for shapes that are not the model's.
        """
        self.identity = identity_of_files(file.files)
        config = policy.model_config(file.config)
        self.file, self.policy = file, (policy := policy.in_gguf(config))
        names = file.names(policy)  # before a model of as many layers as the metadata claims is described
        shapes = shapes_of(file.config) | _shapes_of_experts(policy, config)
        _check_kinds(file)
        self._heads = (config.num_heads, config.num_kv_heads)
        self._norm_offset = config.norm_offset
        self._experts = config.experts.count if config.experts else 0
        self._stored = {
            name: self._described(name, file.tensors[stored], shapes[name]) for name, stored in names.items()
        }

    def names(self) -> set[str]:
        return set(self._stored)

    def kind(self, name: str) -> str:
        """GGUF's name of a tensor's type."""
        return self._stored[name].kind

    @property
    def quantised(self) -> bool:
        """Whether any tensor is stored in codes."""
        return any(stored.kind not in FLOATS for stored in self._stored.values())

    @property
    def inexact(self) -> dict[str, int]:
        """The types that labkit has to dequantise, and how many tensors have each."""
        kinds = [stored.kind for stored in self._stored.values() if stored.kind not in (*FLOATS, *BITS)]
        return {kind: kinds.count(kind) for kind in sorted(set(kinds))}

    def get(self, name: str, dtype: torch.dtype | None = None, cut: Cut | None = None) -> Tensor:
        """The tensor in floats, or the cut's part of it."""
        from gguf.quants import dequantize

        if name not in self._stored:
            raise KeyError(f"no tensor {name!r} in this file; names() lists them")
        stored = self._stored[name]
        rows, rest = self._rows(name, cut)
        if stored.kind == "BF16":
            numbers = torch.from_numpy(rows.view(np.int16).copy()).view(torch.bfloat16)
        elif stored.kind in FLOATS:
            numbers = torch.from_numpy(np.array(rows, copy=True))
        else:
            numbers = torch.from_numpy(dequantize(rows, stored.tensor.kind))
        numbers = numbers if rest is None else rest(numbers)
        numbers = numbers.T if stored.transposed else numbers
        if self._norm_offset and name.endswith("norm.weight"):  # the file's norms have it added
            numbers = numbers.float() - self._norm_offset
        return numbers if dtype is None else numbers.to(dtype, copy=True)

    def codes(self, name: str, cut: Cut | None) -> Tensor:
        """The int8 codes of a tensor of one of the types in BITS, in Hugging Face's shape."""
        blocks, rest = self._blocks(name, cut)
        packed = blocks[..., -(GROUP * STORED_BITS[self.kind(name)] // 8) :]
        if self.kind(name) == "Q8_0":
            codes = torch.from_numpy(packed.copy()).view(torch.int8)
        else:  # byte j of a block has number j in its low nibble and number 16 + j in its high one
            nibbles = torch.from_numpy(packed.copy())
            nibbles = torch.cat((nibbles & 15, nibbles >> 4), dim=2)
            codes = DOUBLED[nibbles.int()] if self.kind(name) == "MXFP4" else nibbles.view(torch.int8) - 8
        codes = codes.flatten(1)
        codes = codes if rest is None else rest(codes)
        return codes.T if self._stored[name].transposed else codes

    def scales(self, name: str, cut: Cut | None) -> Tensor:
        """The scales of a tensor of one of the types in BITS, float16 [outputs, groups, 1 or 2], not transposed. Raises
        UserError for scales that float16 does not have.
        """
        blocks, rest = self._blocks(name, cut)
        numbers = 2 if self.kind(name) == "Q4_1" else 1
        if self.kind(name) == "MXFP4":
            scales = self._halved_powers(name, torch.from_numpy(blocks[..., :1].copy()))
        else:
            scales = torch.from_numpy(blocks[..., : 2 * numbers].copy()).view(torch.float16)
        if rest is None:
            return scales
        if any(end % GROUP for bounds in rest.ranges for end in bounds):
            raise UserError(
                f"groups of {GROUP} inputs of {name} cannot be cut at {rest.ranges}, between two ranks; use a tp_size "
                "that cuts elsewhere"
            )
        ranges = tuple((begin // GROUP, end // GROUP) for begin, end in rest.ranges)
        return Cut(rest.dim, ranges, rest.whole // GROUP)(scales)

    def _halved_powers(self, name: str, exponents: Tensor) -> Tensor:
        """The scales of MXFP4's doubled numbers, by their exponents with the bias 127. Numbers with the exponent 0
        become zeros: they are at most 6 * 2^-127.
        """
        scales = torch.where(exponents == 0, 0.0, torch.exp2(exponents.float() - 128)).half()
        if bool(((scales == 0) != (exponents == 0)).any()) or not scales.isfinite().all():
            raise UserError(
                f"{self.file.path}: {name} has scales from 2^{int(exponents.min()) - 127} to "
                f"2^{int(exponents.max()) - 127}, which float16 does not have; use dtype=torch.bfloat16"
            )
        return scales

    def _blocks(self, name: str, cut: Cut | None) -> tuple[np.ndarray, Cut | None]:
        """The stored blocks, uint8 [outputs, blocks, bytes of a block], and the remaining cut of the inputs."""
        rows, rest = self._rows(name, cut)
        return rows.reshape(len(rows), self._stored[name].shape[1] // GROUP, -1), rest

    def _rows(self, name: str, cut: Cut | None) -> tuple[np.ndarray, Cut | None]:
        try:
            rows, rest = self._stored[name].rows(cut)
        except ValueError as error:
            raise UserError(f"{name} {error}; check that the file and the model belong together") from None
        require_mapped(rows.ctypes.data, rows.nbytes, self.file.path)
        return rows, rest

    def _described(self, name: str, tensor: StoredTensor, shape: tuple[int, ...]) -> FileTensor:
        linears = [module for role in LINEARS for module in self.policy.modules(role)]
        linear = name.endswith(".weight") and any(f".{module}." in name for module in linears)
        transposed = self.policy.transposed and linear
        expected = shape[::-1] if transposed else shape
        rows = math.prod(tensor.shape[:-1])
        flat = tensor.shape[-1:] if len(expected) == rows == 1 else (rows, tensor.shape[-1])
        if flat != expected or (len(tensor.shape) == 3 and tensor.shape[0] != self._experts):
            raise UserError(
                f"{self.file.path}: {tensor.name} is of shape {list(tensor.shape)}, expected {list(expected)} as the "
                "file's metadata says; download or convert it again"
            )
        if len(shape) == 1 and tensor.kind.name not in FLOATS:  # blocks of a vector cannot be cut or put in order
            raise UserError(
                f"{self.file.path}: the vector {tensor.name} is stored as {tensor.kind.name}; expected "
                f"{', '.join(FLOATS)}: convert it again"
            )
        return FileTensor(tensor, expected, self._order(name, shape[0]), transposed)

    def _order(self, name: str, rows: int) -> Tensor | None:
        """The file's order of rows: llama.cpp puts the two rows of a rotary pair next to each other for LLaMA and its
        relatives, and sorts BLOOM's QKV rows by kind.
        """
        heads, kv_heads = self._heads
        together = ARCHITECTURES[self.file.architecture].pairs_together
        if together and (".q_proj." in name or ".k_proj." in name):
            count = heads if ".q_proj." in name else kv_heads
            return torch.arange(rows).view(count, -1, 2).transpose(1, 2).reshape(-1)
        if self.file.architecture == "bloom" and ".query_key_value." in name:
            return torch.arange(rows).view(3, heads, -1).transpose(0, 1).reshape(-1)
        return None


class NativeWeights(CanonicalLayers):
    """A rank's canonical weights, made of a file's codes without quantising anew.

    A matrix whose tensors are all of one type in BITS keeps its codes and scales. A floating-point matrix becomes
    bfloat16. Matrices of all other types, such as K-quants, are dequantised and then quantised to 8 bits in groups of
    32.
    """

    def __init__(self, tensors: GgufTensors, part: Shard) -> None:
        super().__init__(part)
        self._tensors = tensors

    def load(self, name: str, index: int | None, empty: Empty) -> Weight:
        part, tensors, policy = self.part, self._tensors, self._tensors.policy
        if not is_matrix(name):
            return policy.tensor(part, name, index, self._floats)
        kinds = {tensors.kind(stored) for stored in policy.stored_names(name, index)}
        if len(kinds) == 1 and (kind := min(kinds)) in BITS:
            codes = policy.tensor(part, name, index, tensors.codes)
            scales = finite(policy.assembled(part, name, index, tensors.scales), name)
            outputs, inputs = codes.shape
            return Linear(codes, None, outputs, inputs, "rows", scales, GROUP, BITS[kind])
        rows = policy.tensor(part, name, index, self._floats)
        outputs, inputs = rows.shape
        if kinds <= FLOATS.keys():
            return Linear(rows.bfloat16(), None, outputs, inputs, "rows")
        codes, scales = quantize(rows, GROUP)
        return Linear(codes, None, outputs, inputs, "rows", scales, GROUP)

    def _floats(self, name: str, cut: Cut | None) -> Tensor:
        return finite(self._tensors.get(name, None, cut), name)


def _shapes_of_experts(policy: Policy, config: ModelConfig) -> Shapes:
    """The shapes of the tensors of experts, by the names that the row has for them in a file."""
    if (experts := config.experts) is None:
        return {}
    hidden, inner, count = config.hidden_size, config.intermediate_size, experts.count
    of_roles: Shapes = {
        "ff1.weight": (count * inner, hidden),
        "ff2.weight": (count * hidden, inner),
        "router.weight": (count, hidden),
        "ff1.bias": (count, inner),
        "ff2.bias": (count, hidden),
        "router.bias": (count,),
        CHOICE_BIAS: (count,),
        "shared_ff1.weight": (experts.shared, hidden),
    }
    roles = [name for name in config.layer_shapes() if name in of_roles]
    shapes: Shapes = {}
    for index in filter(config.has_experts, range(config.num_layers)):
        for name in roles:
            shapes |= dict.fromkeys(policy.stored_names(name, index), of_roles[name])
    return shapes


def _check_kinds(file: GgufFile) -> None:
    """Tries to dequantise one block of zeros of each type. Raises UserError for a type that cannot be dequantised."""
    from gguf import GGML_QUANT_SIZES
    from gguf.quants import dequantize

    for kind in {tensor.kind for tensor in file.tensors.values() if tensor.kind.name not in FLOATS}:
        try:
            dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
        except NotImplementedError:
            named = next(tensor.name for tensor in file.tensors.values() if tensor.kind == kind)
            raise UserError(
                f"{file.path}: {named} is stored as {kind.name}; expected {', '.join(FLOATS)} or codes that the "
                "package gguf dequantises, such as Q4_K: convert it again"
            ) from None
