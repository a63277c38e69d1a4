"""Cases of a mixture of experts: the choice, and the MLPs of the chosen ones."""

from dataclasses import dataclass, replace

from ..mlp_gemm.cases import MlpCase
from ..shapes import ExpertsShape, LayerShape, Sizes


def _experts(shape: LayerShape) -> ExpertsShape:
    assert shape.experts is not None
    return shape.experts


@dataclass(frozen=True)
class RouteCase:
    """bias + residual + norm + a logit for each expert, and the gate of a shared expert."""

    shape: LayerShape

    def bytes(self, rows: int, sizes: Sizes) -> int:
        """The matrix, which has no scales, its bias, the norms, and the bias of the attention output."""
        shape = self.shape
        vectors = shape.norm_numbers * (2 if shape.output_norms else 1)
        if "attn_out" in shape.biases:
            vectors += shape.hidden
        if "router" in shape.biases:
            vectors += _experts(shape).count
        return sizes.vector * vectors + sizes.matrix * self._outputs * shape.hidden

    def flops(self, rows: int) -> int:
        """Multiplications and additions of the product."""
        return 2 * rows * self._outputs * self.shape.hidden

    @property
    def _outputs(self) -> int:
        experts = _experts(self.shape)
        return experts.count + experts.shared_gate


@dataclass(frozen=True)
class ExpertsCase:
    """Both matrices of the experts that rows choose."""

    shape: LayerShape

    def bytes(self, rows: int, sizes: Sizes) -> int:
        """The matrices of as many experts as rows choose on average, each once."""
        return round(_experts(self.shape).read(rows) * self._bytes_of_one(sizes))

    def flops(self, rows: int) -> int:
        """Multiplications and additions of the products."""
        shape = self.shape
        up_rows = shape.intermediate * (2 if shape.gated else 1)
        return 2 * rows * _experts(shape).chosen * shape.hidden * (up_rows + shape.intermediate)

    def _bytes_of_one(self, sizes: Sizes) -> int:
        shape = self.shape
        up_rows = shape.intermediate * (2 if shape.gated else 1)
        up = sizes.of_matrix(up_rows, shape.hidden, bias="ff1" in shape.biases)
        return up + sizes.of_matrix(shape.hidden, shape.intermediate, bias="ff2" in shape.biases)


def shared_shape(shape: LayerShape) -> LayerShape:
    """The shape of the shared expert. Its norm is that of the choice."""
    return replace(
        shape,
        intermediate=_experts(shape).shared,
        experts=None,
        shared_norm=True,
        output_norms=False,
        parallel=True,
        biases=frozenset(),
    )


def shared_case(shape: LayerShape) -> MlpCase:
    """Region 3 of the shared expert."""
    return MlpCase(shared_shape(shape))
