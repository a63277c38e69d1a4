"""How far stored matrices are from the model's own, matrix by matrix, and where in a matrix the large numbers are.

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

from labkit.harness.records import FrozenRecord
from labkit.kernels.memory import Heap
from labkit.kernels.types import Linear, float_dtype
from labkit.models.config import ModelConfig
from labkit.models.policies import policy_for
from labkit.models.shards import shard
from labkit.system.errors import UserError
from labkit.system.progress import Progress, unheard
from labkit.weights.build import Unsaved, has_codes
from labkit.weights.canonical import RowBlocks, Weight
from labkit.weights.precision import STORED, Precision, precision_of
from labkit.weights.quantise import HEAD, LAYER, Quantization, Scheme, check_schemes
from labkit.weights.source import ModelSource

GROUP = 32  # inputs of the groups that are drawn beside whole rows
BINS = 121
READ = Heap(torch.device("cpu"))
AT_ONCE = 1 << 24  # numbers that are stored and read back at once


class MatrixError(FrozenRecord):
    """What storing one matrix lost. `lost` and `norm`: sums of the squares of the differences and of the numbers.

    layer: None outside the layers. matrix: its canonical role, such as "qkv".
    """

    layer: int | None
    matrix: str
    lost: float
    norm: float

    @property
    def error(self) -> float:
        """The Frobenius norm of the difference over that of the matrix."""
        return error_of([self])


class StoredMatrices(FrozenRecord):
    """A way to store the matrices of the layers, by its name in `labkit.weights.precision`, without the LM head.

    layer_bytes: of these matrices, scales included. errors: layer by layer.
    """

    precision: str
    layer_bytes: int
    errors: tuple[MatrixError, ...] = Field(min_length=1)

    @property
    def error(self) -> float:
        """Of all matrices together, as for one."""
        return error_of(self.errors)

    @property
    def exact(self) -> bool:
        """Whether every number came back, because the weights were such codes before."""
        return not any(each.lost for each in self.errors)


class Histogram(FrozenRecord):
    """Counts of numbers in bins of one width, from `begin` on."""

    begin: float
    width: float
    counts: tuple[int, ...]

    @property
    def middles(self) -> list[float]:
        return [self.begin + (index + 0.5) * self.width for index in range(len(self.counts))]


class Spread(FrozenRecord):
    """The numbers of one matrix in its standard deviations, and the largest magnitude in each row and in each group of
    `group` inputs, which a scale has to reach.
    """

    layer: int
    matrix: str
    group: int
    numbers: Histogram
    rows: Histogram
    groups: Histogram
    row_median: float
    group_median: float


def error_of(errors: Sequence[MatrixError]) -> float:
    """The relative Frobenius error of matrices together; 0 for matrices of zeros."""
    norm = math.fsum(each.norm for each in errors)
    return math.sqrt(math.fsum(each.lost for each in errors) / norm) if norm else 0.0


def reason_against(source: ModelSource, name: str) -> str | None:
    """Why this model cannot have the precision of this name; None: it can. UserError for an unknown name."""
    precision = precision_of(name)
    if name == STORED and not has_codes(source):
        return "the model's file holds no codes"
    if precision.quant is None:
        return None
    try:
        check_schemes(shard(_config(source)), Quantization(**precision.quant))
    except UserError as error:
        return str(error)
    return None


@contextmanager
def one_thread() -> Iterator[None]:
    """Ops of torch run on one thread inside: matrices of this size gain little by more, and where other programs have
    some of the processors, the threads of an op wait for each other far longer than they compute.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@one_thread()
def matrix_errors(
    source: ModelSource, names: Sequence[str], progress: Progress | None = None
) -> tuple[StoredMatrices, ...]:
    """What each precision of these names, which the model can have, loses in the matrices of the layers."""
    config, weights, follow = _config(source), _weights(source), progress or unheard
    precisions = {name: precision_of(name) for name in names}
    found: dict[str, list[MatrixError]] = {name: [] for name in names}
    for layer in range(config.num_layers):
        follow(layer, config.num_layers, f"errors of layer {layer + 1} of {config.num_layers}")
        tensors = weights.layer(layer, READ.empty)
        for matrix in LAYER:
            rows = _matrix(tensors[matrix]).whole()
            for name, precision in precisions.items():
                found[name].append(_error(precision, matrix, RowBlocks.of(rows), layer))
    follow(config.num_layers, config.num_layers, "errors of the LM head")
    return tuple(
        StoredMatrices(precision=name, layer_bytes=layer_bytes(config, precisions[name]), errors=tuple(errors))
        for name, errors in found.items()
    )


@one_thread()
def head_error(source: ModelSource, name: str) -> MatrixError:
    """What the precision of this name loses in the LM head, which may be the embedding too."""
    top = _weights(source).top(READ.empty)
    head = next(role for role in reversed(HEAD) if role in top)
    return _error(precision_of(name), head, _matrix(top[head]), None)


def layer_bytes(config: ModelConfig, precision: Precision) -> int:
    """Bytes of the matrices of all layers with their scales, without what a layout pads."""
    shapes = config.layer_shapes()
    return config.num_layers * sum(_bytes(precision, name, shapes[name]) for name in LAYER)


def spread_of(source: ModelSource, layer: int, matrix: str, group: int = GROUP) -> Spread:
    """Where the large numbers of a matrix are. `matrix`: its canonical role; `group`: inputs, the last may be fewer."""
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


def _config(source: ModelSource) -> ModelConfig:
    return policy_for(source.hf_config).model_config(source.hf_config)


def _weights(source: ModelSource) -> Unsaved:
    policy = policy_for(source.hf_config)
    return Unsaved(policy, source, shard(policy.model_config(source.hf_config)), torch.float32)


def _matrix(weight: Weight) -> RowBlocks:
    assert not isinstance(weight, Linear)
    return RowBlocks.of(weight)


def _scheme(precision: Precision, name: str) -> Scheme | None:
    return Quantization(**precision.quant).of(name) if precision.quant else None


def _stored(precision: Precision, name: str, rows: Tensor) -> Tensor:
    """Some rows of a matrix, in float32, as they are read back."""
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


def _bytes(precision: Precision, name: str, shape: tuple[int, ...]) -> int:
    outputs, inputs = shape
    scheme = _scheme(precision, name)
    if scheme is None:
        return outputs * inputs * float_dtype(precision.dtype or torch.float32).itemsize
    scales = -(-inputs // scheme.group(outputs, inputs)) * (2 if scheme.asymmetric else 1)
    return outputs * (inputs * scheme.bits // 8 + scales * torch.float16.itemsize)


def _histogram(numbers: Tensor, low: float, high: float) -> Histogram:
    counts = torch.histc(numbers.flatten(), BINS, low, high)
    return Histogram(begin=low, width=(high - low) / BINS, counts=tuple(int(count) for count in counts))
