"""Models whose weights are divided among the ranks of a process group."""

import hashlib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor, nn

from labkit.engine.parallel.slicing.linear import GroupSum
from labkit.engine.parallel.slicing.plan import SlicingPlan, Unit
from labkit.engine.parallel.slicing.planner import plan_slicing
from labkit.engine.parallel.slicing.sliced import sliced_copy
from labkit.engine.parallel.slicing.sources import InjectionPolicy
from labkit.system.errors import UserError

Model = TypeVar("Model", bound=nn.Module)


def slice_model(
    model: Model, plan: SlicingPlan, rank: int, group: dist.ProcessGroup | None = None, *, consume: bool = False
) -> Model:
    """Returns a model of the same class with `rank`'s share of `model`'s weights, which sums over `group`.

    Forward and generate are the model's own. Every rank calls them with the same inputs and gets the same outputs,
    except attention weights, which are of the rank's own heads. For inference: parameters need no gradient.

    `model` stays usable. Cut weights are copies, so that the whole weights can be freed with the model; the other
    weights (embeddings, norms, LM head) share its memory. With `consume`, each cut weight is freed as soon as its share
    is taken, and `model` can't be used afterwards.

    Raises ValueError for a rank that the plan doesn't have.
    """
    if not 0 <= rank < plan.tp_size:
        raise UserError(f"rank {rank} is not one of the plan's {plan.tp_size} ranks")
    units: dict[str, tuple[Unit, ...]] = {name: block.units for block in plan.blocks for name in block.names}
    reduce = GroupSum(group) if plan.tp_size > 1 else _unchanged
    sliced: Model = sliced_copy(model, units, rank, reduce, consume=consume).eval()
    return sliced


def tensor_parallel_model(
    model: Model,
    *,
    rank: int,
    size: int,
    group: dist.ProcessGroup | None = None,
    injection_policy: InjectionPolicy | None = None,
    example: Mapping[str, Tensor] | None = None,
    consume: bool = False,
) -> Model:
    """Returns the rank's model, ready to run on all `size` ranks of `group` (None: all processes of torch.distributed).

    Calls `plan_slicing` and then `slice_model`. Every rank must call it with the same model. The first rank plans, so
    that the cuts are proved once.

    Raises their ValueErrors on every rank, and also for a group of another size, and for models of different structure.
    """

    def plan() -> SlicingPlan:
        return plan_slicing(model, size, injection_policy, example=example)

    agreed = plan() if size == 1 else _plan_of_rank_0(plan, _structure(model), size, group)
    return slice_model(model, agreed, rank, group, consume=consume)


def _plan_of_rank_0(
    plan: Callable[[], SlicingPlan], structure: str, size: int, group: dist.ProcessGroup | None
) -> SlicingPlan:
    """Returns the plan of the group's first rank on all ranks, or raises its error on all of them."""
    if (ranks := dist.get_world_size(group)) != size:
        raise UserError(f"the process group has {ranks} ranks, expected size={size}")
    sent: list[Any] = [None, None, structure]
    if dist.get_rank(group) == 0:
        try:
            sent[0] = plan()
        except BaseException as error:  # Ctrl-C, too: the other ranks wait for the message
            sent[1] = str(error) or type(error).__name__
            raise
        finally:
            dist.broadcast_object_list(sent, group=group, group_src=0)
    else:
        dist.broadcast_object_list(sent, group=group, group_src=0)
    made, problem, expected = sent
    if problem is not None:
        raise UserError(problem)
    alike: list[Any] = [None] * size
    dist.all_gather_object(alike, structure == expected, group=group)
    if not all(alike):
        odd = ", ".join(str(rank) for rank, same in enumerate(alike) if not same)
        raise UserError(f"ranks {odd} have another model than rank 0; give every rank the same one")
    agreed: SlicingPlan = made
    return agreed


def _unchanged(partial: Tensor) -> Tensor:
    return partial


def _structure(model: nn.Module) -> str:
    shapes = [(name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in model.named_parameters()]
    return hashlib.sha256(repr(shapes).encode()).hexdigest()
