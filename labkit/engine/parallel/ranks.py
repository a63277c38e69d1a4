"""Exchanges between the ranks of a tensor-parallel model.

V vocabulary; each rank has `len(shard.vocab)` rows of it.
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
from labkit.models.shards import Shard, expert_ranks, shard
from labkit.system.errors import RunError, UserError

DIGEST = 16
PARALLEL = ("mp_size", "tensor_parallel", "tp", "pipeline_parallel")  # options that ask for ranks


class RanksDifferError(RunError):
    """The ranks of a model were given different work, or came to different results."""


class Ranks:
    """This rank's part of the model, and its connection to the other ranks. All ranks call every method together,
    except `fail_call`.
    """

    def __init__(self, shard: Shard, exchange: Exchange, impl: str, device: torch.device) -> None:
        self.shard, self.exchange, self.impl, self.device = shard, exchange, impl, device

    def sum(self, x: Tensor) -> Tensor:
        """Returns the sum of all ranks' float32 `x`."""
        return all_reduce(x, self.exchange, impl=self.impl)

    def side_by_side(self, part: Tensor) -> Tensor:
        """[..., this rank's part of V] of each rank -> [..., V]."""
        widths = [len(self.shard.vocab_of(rank)) for rank in range(self.shard.size)]
        padded = F.pad(part, (0, max(widths) - part.shape[-1])).contiguous()
        parts = all_gather(padded, self.exchange, impl=self.impl)
        return torch.cat([of_rank[..., :width] for of_rank, width in zip(parts, widths, strict=True)], dim=-1)

    def largest(self, part: Tensor, count: int) -> Tensor:
        """[..., this rank's part of V] of each rank -> [..., V], with at least the `count` largest numbers in their
        places, and -inf in other places. (Numbers equal to the smallest one may be missing.)
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

    def agree(self, subject: str, *parts: object, flag: bool = False) -> bool:
        """Tells whether `flag` is set on any rank. Raises RanksDifferError if the ranks' `parts` differ; the message
        calls them `subject`.
        """
        lines = self.gather(torch.cat((digest_of(*parts), torch.tensor([flag], dtype=torch.uint8))))
        check_alike(subject, lines[:, :-1])
        return bool(lines[:, -1].any())

    def gather(self, x: Tensor) -> Tensor:
        """x of one shape and type on all ranks -> [ranks, *x.shape], by rank."""
        impl = "cpp" if self.impl == "cpp" else "reference"
        return all_gather(x, self.exchange, impl=impl)

    def begin_call(self) -> None:
        """Returns when all ranks have left a failed call."""
        self.exchange.begin_call()

    def fail_call(self, reason: str) -> None:
        """Tells the other ranks that this rank leaves the call by an error. Does not wait."""
        self.exchange.fail_call(reason)


def digest_of(*parts: object) -> Tensor:
    """Returns a digest, uint8 [16]. Equal lists of tensors and other objects have the same digest."""
    digest = blake2b(digest_size=DIGEST)
    for part in parts:
        data = part.contiguous().cpu().numpy().tobytes() if isinstance(part, Tensor) else repr(part).encode()
        digest.update(data + b"\0")
    return torch.frombuffer(bytearray(digest.digest()), dtype=torch.uint8)


def check_alike(subject: str, digests: Tensor) -> None:
    """Raises RanksDifferError if the digests of `subject`, uint8 [ranks, 16], differ."""
    if different := [rank for rank, digest in enumerate(digests) if not torch.equal(digest, digests[0])]:
        raise RanksDifferError(
            f"{subject} of rank {', '.join(map(str, different))} differ from those of rank 0; "
            "all ranks of a model must make the same calls with the same arguments"
        )


def draw_alike(device: torch.device, chosen: Callable[[Tensor], Tensor]) -> None:
    """Makes all ranks draw the same random numbers from now on, on the CPU and on their GPUs.

    chosen: takes each rank's random state, and returns the state of one of them on all ranks.
    """
    torch.set_rng_state(chosen(torch.get_rng_state()).clone())  # torch ignores a view's offset, so copy it
    if device.type == "cuda":
        torch.cuda.set_rng_state(chosen(torch.cuda.get_rng_state()))


def asked_to_join(config: object, keywords: Mapping[str, object]) -> AbstractContextManager[None]:
    """Context for reading options that may ask for several ranks. An error before this rank has joined the others is
    raised on them, too.
    """
    options = {**(config if isinstance(config, Mapping) else {}), **keywords}
    parallel = [options[name] for name in PARALLEL if name in options]
    if not (parallel or isinstance(config, str | Path)):
        return nullcontext()
    groups = (
        getattr(option, "tp_group", None) or (isinstance(option, Mapping) and option.get("tp_group"))
        for option in parallel
    )
    return joining(next((group for group in groups if isinstance(group, dist.ProcessGroup)), None))


def join_ranks(
    config: ModelConfig,
    options: TensorParallel,
    impl: str,
    device: torch.device,
    most_rows: int,
    facts: Callable[[], dict[str, object]],
    layers: range | None = None,
    ep_size: int = 1,
) -> Ranks | None:
    """Returns the connection of this process to the ranks that share the model; None: there is one rank.

    most_rows: rows of a step that the ranks exchange at once.
    facts: about the model and its options.
    layers: of these ranks; None: all.
    ep_size: number of parts of the experts.

    Raises ValueError as `join_group` does, for more ranks than heads, and for an `ep_size` that does not fit.
    """
    expert_ranks(config, options.ranks, ep_size)
    if options.ranks == 1:
        return None
    rank = join_group(options, device, {"impl": impl} | facts())
    part = shard(config, options.ranks, rank, ep_size, layers=layers)
    width = max(config.hidden_size, config.embedding_size)
    return Ranks(part, Exchange(options.tp_group, slot_bytes(most_rows, width, config.vocab_size)), impl, device)


def join_group(options: TensorParallel, device: torch.device, facts: Mapping[str, object]) -> int:
    """Returns this process's rank among the `options.ranks` ranks of a model, once all of them agree on the facts.

    Raises ValueError for another number of processes, or if they differ in the facts or in their software.
    """
    group = options.tp_group
    if group is None:
        ensure_process_group(device.type, tp_size=options.ranks)
    elif (processes := dist.get_world_size(group)) != options.ranks:
        raise UserError(
            f"got tp_size={options.ranks} and a tp_group of {processes} processes; expected the same number"
        )
    check_agreement(versions() | dict(facts), group)
    return dist.get_rank(group)
