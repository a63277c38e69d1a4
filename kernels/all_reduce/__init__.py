"""The exchange between the ranks of a model: sums, once or twice in a layer, and gathered parts."""

from torch import Tensor

from ..dispatch import choose
from .exchange import Exchange, all_of_ranks, slot_bytes, sum_of_ranks
from .reference import all_gather as reference_all_gather
from .reference import all_reduce as reference_all_reduce
from .symmetric import MOST_BYTES, one_shot

__all__ = ["Exchange", "all_gather", "all_reduce", "slot_bytes"]


def all_reduce(x: Tensor, exchange: Exchange, *, impl: str) -> Tensor:
    """x float32, each rank's part, contiguous -> the sum over the ranks of `exchange`, with the same bits on all ranks.

    "cpp" uses the memory that the ranks of one machine share. "reference" uses torch.distributed, which on GPUs is
    NCCL. "triton" does so too, but for few rows each GPU adds up the parts in one kernel if it can read the memory of
    the other GPUs. Raises RuntimeError if another rank has ended.
    """
    run = choose("all_reduce", impl, reference=reference_all_reduce, cpp=sum_of_ranks, triton=_on_gpus)
    return run(x, exchange)


def all_gather(x: Tensor, exchange: Exchange, *, impl: str) -> Tensor:
    """x of one shape and type on all ranks, contiguous -> [ranks, *x.shape], by rank. `impl` as for `all_reduce`."""
    reference = reference_all_gather
    return choose("all_gather", impl, reference=reference, cpp=all_of_ranks, triton=reference)(x, exchange)


def _on_gpus(x: Tensor, exchange: Exchange) -> Tensor:
    if x.is_cuda and x.numel() * x.element_size() <= MOST_BYTES:
        if x.device not in exchange.on_gpu:
            exchange.on_gpu[x.device] = one_shot(exchange, x.device)
        if slots := exchange.on_gpu[x.device]:
            return slots.sum(x)
    return reference_all_reduce(x, exchange)
