"""Errors of stored matrices relative to the model's own, matrix by matrix, and the spread of numbers in a matrix.

Only one matrix of the model is in memory at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import pad

from labkit.engine.team_size import torch_threads
from labkit.harness.frozen_record import FrozenRecord
from labkit.kernels.memory import Heap
from labkit.kernels.types import Linear, float_dtype
from labkit.models.config import ModelConfig
from labkit.models.policies import model_config_of
from labkit.models.shards import shard
from labkit.system.errors import UserError
from labkit.system.progress import Progress, unheard
from labkit.weights.build import Unsaved, has_codes
from labkit.weights.canonical import RowBlocks, Weight
from labkit.weights.precision import STORED, Precision, precision_of
from labkit.weights.quantise import HEAD, LAYER, Quantization, Scheme, check_schemes, stored_bytes
from labkit.weights.source import ModelSource
from labkit.weights.spec import WeightSpec

GROUP = 32  # inputs of the groups that are drawn next to whole rows
BINS = 121
READ = Heap(torch.device("cpu"))
AT_ONCE = 1 << 24  # numbers that are stored and read back at a time


class MatrixError(FrozenRecord):
    """The error of one stored matrix."""

    layer: int | None  # None: not in a layer
    matrix: str  # canonical role, such as "qkv"
    lost: float  # sum of the squares of the differences
    norm: float  # sum of the squares of the numbers

    @property
    def error(self) -> float:
        """Frobenius norm of the difference / Frobenius norm of the matrix."""
        return error_of([self])


class StoredMatrices(FrozenRecord):
    """The matrices of all layers in one precision, without the LM head."""

    precision: str  # name in `labkit.weights.precision`
    layer_bytes: int  # of these matrices, scales included
    errors: tuple[MatrixError, ...] = Field(min_length=1)  # layer by layer

    @property
    def error(self) -> float:
        """The relative Frobenius error of all matrices together."""
        return error_of(self.errors)

    @property
    def exact(self) -> bool:
        """Whether every number was restored exactly, because the weights were such codes before."""
        return not any(matrix.lost for matrix in self.errors)


class Histogram(FrozenRecord):
    """Counts of numbers in bins of equal width, starting at `begin`."""

    begin: float
    width: float
    counts: tuple[int, ...]

    @property
    def middles(self) -> list[float]:
        return [self.begin + (index + 0.5) * self.width for index in range(len(self.counts))]


class Spread(FrozenRecord):
    """The spread of the numbers of one matrix, in units of their standard deviation. A scale has to cover the largest
    magnitude of its row or group.
    """

    layer: int
    matrix: str
    group: int  # inputs of a group
    numbers: Histogram
    rows: Histogram  # of the largest magnitudes in rows
    groups: Histogram  # of the largest magnitudes in groups
    row_median: float  # of the largest magnitudes in rows
    group_median: float  # of the largest magnitudes in groups


def error_of(errors: Sequence[MatrixError]) -> float:
    """The relative Frobenius error of several matrices together; 0 for matrices of zeros."""
    norm = math.fsum(matrix.norm for matrix in errors)
    return math.sqrt(math.fsum(matrix.lost for matrix in errors) / norm) if norm else 0.0


def reason_against(source: ModelSource, name: str) -> str | None:
    """The reason why this model cannot have the precision `name`; None if it can. UserError for an unknown name."""
    precision = precision_of(name)
    if name == STORED and not has_codes(source):
        return "the model's file holds no codes"
    if precision.quant is None:
        return None
    try:
        check_schemes(shard(model_config_of(source.hf_config)), Quantization(**precision.quant))
    except UserError as error:
        return str(error)
    return None


@contextmanager
def one_thread() -> Iterator[None]:
    """Runs torch's ops on one thread inside this context. Matrices of this size gain little from more threads, and if
    other programs use some of the processors, the threads of an op wait for each other far longer than they compute.
    """
    with torch_threads(1):
        yield


@one_thread()
def matrix_errors(
    source: ModelSource, names: Sequence[str], progress: Progress | None = None
) -> tuple[StoredMatrices, ...]:
    """The errors of the layers' matrices in each of these precisions. The model can have all of them."""
    config, weights, follow = model_config_of(source.hf_config), _weights(source), progress or unheard
    precisions = {name: precision_of(name) for name in names}
    errors_by_name: dict[str, list[MatrixError]] = {name: [] for name in names}
    for layer in range(config.num_layers):
        follow(layer, config.num_layers, f"errors of layer {layer + 1} of {config.num_layers}")
        tensors = weights.layer(layer, READ.empty)
        for matrix in (name for name in LAYER if name in tensors):
            rows = _matrix(tensors[matrix]).whole()
            for name, precision in precisions.items():
                errors_by_name[name].append(_error(precision, matrix, RowBlocks.of(rows), layer))
    follow(config.num_layers, config.num_layers, "errors of the LM head")
    return tuple(
        StoredMatrices(precision=name, layer_bytes=layer_bytes(config, precisions[name]), errors=tuple(errors))
        for name, errors in errors_by_name.items()
    )


@one_thread()
def head_error(source: ModelSource, name: str) -> MatrixError:
    """The error of the LM head, which may also be the embedding, in the precision `name`."""
    top = _weights(source).top(READ.empty)
    head = next(role for role in reversed(HEAD) if role in top)
    return _error(precision_of(name), head, _matrix(top[head]), None)


def layer_bytes(config: ModelConfig, precision: Precision) -> int:
    """Bytes of the matrices of all layers with their scales, without the padding of a layout."""
    layers, dtype = map(config.layer_shapes, range(config.num_layers)), precision.dtype or torch.float32
    matrices = [(name, shape) for shapes in layers for name, shape in shapes.items() if name in LAYER]
    return sum(stored_bytes((rows, columns), dtype, _scheme(precision, name)) for name, (rows, columns) in matrices)


def spread_of(source: ModelSource, layer: int, matrix: str, group: int = GROUP) -> Spread:
    """The spread of a matrix's numbers. `matrix`: its canonical role; `group`: inputs of a group (the last may have
    fewer).
    """
    numbers = _matrix(_weights(source).layer(layer, READ.empty)[f"{matrix}.weight"]).whole()
    deviations = numbers / numbers.std()
    magnitudes = deviations.abs()
    rows = magnitudes.amax(dim=1)
    groups = pad(magnitudes, (0, -magnitudes.shape[1] % group)).unflatten(1, (-1, group)).amax(dim=2)
    most = float(rows.max())
    return Spread(
        layer=layer,
        matrix=matrix,
        group=group,
        numbers=_histogram(deviations, -most, most),
        rows=_histogram(rows, 0.0, most),
        groups=_histogram(groups, 0.0, most),
        row_median=float(rows.median()),
        group_median=float(groups.median()),
    )


def _weights(source: ModelSource) -> Unsaved:
    return Unsaved(WeightSpec.of(source.hf_config, torch.float32), source)


def _matrix(weight: Weight) -> RowBlocks:
    assert not isinstance(weight, Linear)
    return RowBlocks.of(weight)


def _scheme(precision: Precision, name: str) -> Scheme | None:
    return Quantization(**precision.quant).of(name) if precision.quant else None


def _stored(precision: Precision, name: str, rows: Tensor) -> Tensor:
    """Rows of a matrix in float32, after storing them and reading them back."""
    scheme = _scheme(precision, name)
    if scheme is None:
        return rows.to(float_dtype(precision.dtype or torch.float32)).float()
    scales, group = scheme.scales(rows)
    codes = scheme.codes(rows, scales, group)
    outputs, inputs = rows.shape
    return Linear(codes, None, outputs, inputs, "rows", scales, group, scheme.bits).floats()


def _blocks(matrix: RowBlocks) -> Iterator[Tensor]:
    outputs, inputs = matrix.shape
    step = max(1, AT_ONCE // inputs)
    return (matrix.rows(begin, min(begin + step, outputs)) for begin in range(0, outputs, step))


def _error(precision: Precision, name: str, matrix: RowBlocks, layer: int | None) -> MatrixError:
    lost, norm = 0.0, 0.0
    for rows in _blocks(matrix):
        lost += _squares(_stored(precision, name, rows) - rows)
        norm += _squares(rows)
    return MatrixError(layer=layer, matrix=name.removesuffix(".weight"), lost=lost, norm=norm)


def _squares(numbers: Tensor) -> float:
    return float(torch.linalg.vector_norm(numbers, dtype=torch.float64)) ** 2


def _histogram(numbers: Tensor, low: float, high: float) -> Histogram:
    counts = torch.histc(numbers.flatten(), BINS, low, high)
    return Histogram(begin=low, width=(high - low) / BINS, counts=tuple(int(count) for count in counts))
