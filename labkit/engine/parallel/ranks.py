"""What a rank of a tensor-parallel model does together with the others.

V vocabulary, each rank with `len(shard.vocab)` rows of it.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from hashlib import blake2b
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from labkit.engine.options import TensorParallel
from labkit.kernels.all_reduce import Exchange, all_gather, all_reduce, slot_bytes
from labkit.launcher.agreement import check_agreement, versions
from labkit.launcher.group import ensure_process_group
from labkit.launcher.joining import joining
from labkit.models.config import ModelConfig
from labkit.models.shards import Shard, shard
from labkit.system.errors import RunError, UserError

DIGEST = 16
PARALLEL = ("mp_size", "tensor_parallel", "tp", "pipeline_parallel")  # options that ask for ranks


class RanksDifferError(RunError):
    """The ranks of a model were given different work, or came to different results."""


class Ranks:
    """This rank's part of the model, and the way to the others. Every method but `fail_call` is called by all ranks
    alike.
    """

    def __init__(self, shard: Shard, exchange: Exchange, impl: str, device: torch.device) -> None:
        self.shard, self.exchange, self.impl, self.device = shard, exchange, impl, device

    def sum(self, x: Tensor) -> Tensor:
        """The sum of all ranks' float32 `x`."""
        return all_reduce(x, self.exchange, impl=self.impl)

    def side_by_side(self, part: Tensor) -> Tensor:
        """[..., this rank's part of V] of each rank -> [..., V]."""
        widths = [len(self.shard.vocab_of(rank)) for rank in range(self.shard.size)]
        padded = F.pad(part, (0, max(widths) - part.shape[-1])).contiguous()
        parts = all_gather(padded, self.exchange, impl=self.impl)
        return torch.cat([of_rank[..., :width] for of_rank, width in zip(parts, widths, strict=True)], dim=-1)

    def largest(self, part: Tensor, count: int) -> Tensor:
        """[..., this rank's part of V] of each rank -> [..., V]: at least the `count` largest numbers in their places,
        and -inf elsewhere. (Of numbers equal to the smallest of them some may be missing.)
        """
        widest = max(len(self.shard.vocab_of(rank)) for rank in range(self.shard.size))
        padded = F.pad(part, (0, widest - part.shape[-1]), value=-torch.inf)
        values, indices = padded.topk(min(count, widest))
        indices = (indices + self.shard.vocab.start).clamp(max=self.shard.config.vocab_size - 1)
        pairs = torch.stack((values.double(), indices.double()))
        whole = part.new_full((*part.shape[:-1], self.shard.config.vocab_size), -torch.inf)
        for values, indices in all_gather(pairs, self.exchange, impl=self.impl):
            whole.scatter_reduce_(-1, indices.long(), values.float(), "amax")
        return whole

    def agree(self, what: str, *parts: object, flag: bool = False) -> bool:
        """Whether `flag` is set on any rank. Raises RanksDifferError if `parts`, of `what`, are not the same on all."""
        lines = self.gather(torch.cat((digest_of(*parts), torch.tensor([flag], dtype=torch.uint8))))
        check_alike(what, lines[:, :-1])
        return bool(lines[:, -1].any())

    def share_randomness(self) -> None:
        """From here on all ranks draw the random numbers that rank 0 draws."""
        draw_alike(self.device, lambda state: self.gather(state)[0])

    def gather(self, x: Tensor) -> Tensor:
        """x of one shape and type on all ranks -> [ranks, *x.shape], by rank."""
        impl = "cpp" if self.impl == "cpp" else "reference"
        return all_gather(x, self.exchange, impl=impl)

    def begin_call(self) -> None:
        """Returns when all have left a call that failed."""
        self.exchange.begin_call()

    def fail_call(self, reason: str) -> None:
        """Says to the others that this rank leaves the call by an error, and waits for nobody."""
        self.exchange.fail_call(reason)


def digest_of(*parts: object) -> Tensor:
    """uint8 [16]: two lists of tensors and other things have the same one where they are equal."""
    digest = blake2b(digest_size=DIGEST)
    for part in parts:
        data = part.contiguous().cpu().numpy().tobytes() if isinstance(part, Tensor) else repr(part).encode()
        digest.update(data + b"\0")
    return torch.frombuffer(bytearray(digest.digest()), dtype=torch.uint8)


def check_alike(what: str, digests: Tensor) -> None:
    """Raises RanksDifferError where the digests of `what`, uint8 [ranks, 16], are not all the same."""
    if different := [rank for rank, other in enumerate(digests) if not torch.equal(other, digests[0])]:
        raise RanksDifferError(
            f"{what} of rank {', '.join(map(str, different))} differ from those of rank 0; "
            "all ranks of a model must make the same calls with the same arguments"
        )


def draw_alike(device: torch.device, of_rank_0: Callable[[Tensor], Tensor]) -> None:
    """From here on all ranks draw the random numbers that rank 0 draws, on the CPU and on the GPU that they compute on.

    of_rank_0: takes a tensor of each rank, and gives all of them rank 0's.
    """
    torch.set_rng_state(of_rank_0(torch.get_rng_state()).clone())  # torch reads a view from where its memory begins
    if device.type == "cuda":
        torch.cuda.set_rng_state(of_rank_0(torch.cuda.get_rng_state()))


def asked_to_join(config: object, keywords: Mapping[str, object]) -> AbstractContextManager[None]:
    """Within it options are read that seem to ask for several ranks: what fails until this rank has joined the others
    is raised on them, too. The ranks have met before, or nobody can be told.
    """
    asked = {**(config if isinstance(config, Mapping) else {}), **keywords}
    parallel = [asked[name] for name in PARALLEL if name in asked]
    if not dist.is_initialized() or not (parallel or isinstance(config, str | Path)):
        return nullcontext()
    groups = (
        getattr(each, "tp_group", None) or (isinstance(each, Mapping) and each.get("tp_group")) for each in parallel
    )
    return joining(next((group for group in groups if isinstance(group, dist.ProcessGroup)), None))


def join_ranks(
    config: ModelConfig,
    wanted: TensorParallel,
    impl: str,
    device: torch.device,
    most_rows: int,
    facts: Callable[[], dict[str, object]],
    layers: range | None = None,
) -> Ranks | None:
    """This process among the ranks that share the model; None where it has the model to itself.

    most_rows: of a step, that the ranks exchange at once. facts: of the model and its options. layers: that these ranks
    have; None: all. Raises ValueError as `join_group` does, and for more ranks than heads.
    """
    if wanted.ranks == 1:
        return None
    rank = join_group(wanted, device, {"impl": impl} | facts())
    part = shard(config, wanted.ranks, rank, layers=layers)
    width = max(config.hidden_size, config.embedding_size)
    return Ranks(part, Exchange(wanted.tp_group, slot_bytes(most_rows, width, config.vocab_size)), impl, device)


def join_group(wanted: TensorParallel, device: torch.device, facts: Mapping[str, object]) -> int:
    """This process's rank among the `wanted.ranks` that share a model, once all of them agree on the facts.

    Raises ValueError where there are not as many processes, or they differ in the facts or in their software.
    """
    group = wanted.tp_group
    if group is None:
        ensure_process_group(device.type, tp_size=wanted.ranks)
    elif (found := dist.get_world_size(group)) != wanted.ranks:
        raise UserError(f"got tp_size={wanted.ranks} and a tp_group of {found} processes; expected as many")
    check_agreement(versions() | dict(facts), group)
    return dist.get_rank(group)
