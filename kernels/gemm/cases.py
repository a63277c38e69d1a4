"""Cases of the plain product: attention output, second MLP matrix and LM head of every shape."""

from dataclasses import dataclass

from ..shapes import ODD, REAL, LayerShape, Sizes


@dataclass(frozen=True)
class GemmCase:
    """x [rows, inputs] W^T, with W [outputs, inputs]."""

    name: str
    outputs: int
    inputs: int
    bias: bool

    def bytes(self, rows: int, sizes: Sizes) -> int:
        """The matrix once, and its bias."""
        return sizes.of_matrix(self.outputs, self.inputs, bias=self.bias)

    def flops(self, rows: int) -> int:
        """Multiplications and additions."""
        return 2 * rows * self.outputs * self.inputs


def cases_of(shape: LayerShape) -> tuple[GemmCase, ...]:
    """The products of a layer that are not part of a region, and the LM head."""
    context = shape.heads.query * shape.heads.dim
    return (
        GemmCase(f"{shape.model}-attn_out", shape.hidden, context, "attn_out" in shape.biases),
        GemmCase(f"{shape.model}-mlp_out", shape.hidden, shape.intermediate, "ff2" in shape.biases),
        GemmCase(f"{shape.model}-lm_head", shape.vocabulary, shape.hidden, "head" in shape.biases),
    )


CASES = tuple(case for shape in (*ODD, *REAL) for case in cases_of(shape))
SMALL = tuple(case for shape in ODD for case in cases_of(shape))
