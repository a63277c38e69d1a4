"""What the ranks of a model tell each other: sums, once or twice in a layer, and parts that are put side by side."""

from torch import Tensor

from ..dispatch import choose
from .exchange import Exchange, all_of_ranks, slot_bytes, sum_of_ranks
from .reference import all_gather as reference_all_gather
from .reference import all_reduce as reference_all_reduce

__all__ = ["Exchange", "all_gather", "all_reduce", "slot_bytes"]


def all_reduce(x: Tensor, exchange: Exchange, *, impl: str) -> Tensor:
    """x float32, each rank's part, contiguous -> the sum over the ranks of `exchange`, the same bits on all of them.

    "cpp" is the memory that the ranks of one machine share; "reference" and "triton" are torch.distributed's, which on
    GPUs is NCCL. Raises RuntimeError where another rank has ended.
    """
    reference = reference_all_reduce
    return choose("all_reduce", impl, reference=reference, cpp=sum_of_ranks, triton=reference)(x, exchange)


def all_gather(x: Tensor, exchange: Exchange, *, impl: str) -> Tensor:
    """x of one shape and type on all ranks, contiguous -> [ranks, *x.shape], by rank. `impl` as for `all_reduce`."""
    reference = reference_all_gather
    return choose("all_gather", impl, reference=reference, cpp=all_of_ranks, triton=reference)(x, exchange)
