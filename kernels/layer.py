"""The sequence of a layer, written once for the ops and for the kernels of a GPU's step.

`layer_step` in `decode_step/cpp_impl.cpp` is the same sequence in C++.

N rows (tokens of all sequences), H hidden, I intermediate, Hq query heads, D head_dim.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from labkit.stages import Stage


class Sum(NamedTuple):
    """A residual, and the products that a later region adds to it. float32 [N, H] each."""

    residual: Tensor
    products: tuple[Tensor, ...] = ()


class JoinedRegions(Protocol):
    """Kernels of a parallel layer that do the work of several regions. The attention runs between the two."""

    def qkv_and_mlp(self) -> tuple[Tensor, Tensor]:
        """Returns queries [N, Hq * D] and activations [N, I]. Keys and values go to the cache."""

    def outputs(self, context: Tensor, act: Tensor) -> Tensor:
        """Returns the residual with both outputs added, [N, H]."""


class Mixture(Protocol):
    """The experts of a layer, and its shared expert."""

    @property
    def shares_one(self) -> bool:
        """Whether there is a shared expert, an MLP that every row passes."""

    def route(self, attended: Sum) -> tuple[Any, Sum]:
        """Returns rows with their experts, and what the experts' output is added to."""

    def experts(self, routed: Any, onto: Sum) -> Sum: ...

    def mlp(self, routed: Any) -> Tensor:
        """Returns the activations [N, I] of the shared expert."""

    def mlp_out(self, act: Tensor, routed: Any, onto: Sum) -> Sum: ...


class Regions(Protocol):
    """The regions of one layer, for the weights and rows of one step.

    Ops leave a product for the next region to add. Kernels that add it themselves return a sum without products.
    """

    @property
    def parallel(self) -> bool:
        """Whether attention and MLP start from the same rows."""

    @property
    def joined(self) -> JoinedRegions | None:
        """Kernels that do the work of several regions; None: each region runs by itself."""

    @property
    def add_up(self) -> Callable[[Tensor], Tensor] | None:
        """Sums a product over the ranks of a model; None: there is one rank."""

    def qkv(self) -> tuple[Tensor, Tensor]:
        """Returns queries [N, Hq * D] and the residual [N, H]. Keys and values go to the cache."""

    def attention(self, queries: Tensor) -> Tensor:
        """Returns the context [N, Hq * D]."""

    def attn_out(self, context: Tensor, residual: Tensor) -> Sum: ...

    def mlp(self, attended: Sum) -> tuple[Tensor, Sum]:
        """Returns the activations [N, I], and what the MLP's output is added to."""

    def mlp_out(self, act: Tensor, onto: Sum) -> Sum: ...

    @property
    def mixture(self) -> "Mixture | None":
        """The experts that the layer has in place of an MLP that every row passes; None: it has none."""

    def residual_add(self, total: Sum) -> Tensor:
        """Returns the sum [N, H]."""


def run_layer(regions: Regions, around: Callable[[Stage], AbstractContextManager[object]]) -> Tensor:
    """Runs a layer and returns its output, hidden [N, H]. Each region runs within `around(stage)`."""
    if joined := regions.joined:
        with around(Stage.QKV_MLP):
            queries, act = joined.qkv_and_mlp()
        with around(Stage.ATTENTION):
            context = regions.attention(queries)
        with around(Stage.OUTPUTS):
            return joined.outputs(context, act)
    with around(Stage.QKV):
        queries, residual = regions.qkv()
    with around(Stage.ATTENTION):
        context = regions.attention(queries)
    with around(Stage.ATTN_OUT):
        total = regions.attn_out(context, residual)
    if regions.add_up and not regions.parallel:
        with around(Stage.ALL_REDUCE):
            total = _added_up(total, regions.add_up)
    if mixture := regions.mixture:
        total = _run_mixture(mixture, total, around)
    else:
        with around(Stage.MLP):
            act, total = regions.mlp(total)
        with around(Stage.MLP_OUT):
            total = regions.mlp_out(act, total)
    if regions.add_up:
        with around(Stage.ALL_REDUCE):
            total = _added_up(total, regions.add_up)
    if not total.products:
        return total.residual
    with around(Stage.RESIDUAL):
        return regions.residual_add(total)


def _run_mixture(mixture: Mixture, total: Sum, around: Callable[[Stage], AbstractContextManager[object]]) -> Sum:
    with around(Stage.ROUTE):
        routed, total = mixture.route(total)
    with around(Stage.EXPERTS):
        total = mixture.experts(routed, total)
    if not mixture.shares_one:
        return total
    with around(Stage.MLP):
        act = mixture.mlp(routed)
    with around(Stage.MLP_OUT):
        return mixture.mlp_out(act, routed, total)


def _added_up(total: Sum, add_up: Callable[[Tensor], Tensor]) -> Sum:
    """Replaces the products by their sum over all ranks."""
    own, *others = total.products
    for other in others:
        own += other
    return Sum(total.residual, (add_up(own),))
