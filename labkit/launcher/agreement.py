"""Checks that all ranks run the same model with the same software: else they give wrong tokens, or wait forever."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterator, Mapping
from importlib.metadata import version

import torch.distributed as dist

from labkit.kernels.build import sources_digest
from labkit.launcher.joining import join
from labkit.system.errors import UserError

SHOWN = 3
NOT_GIVEN = "not given"


def versions() -> dict[str, object]:
    """Versions that must be equal on all machines of a run: labkit, its kernels, torch, transformers and Python."""
    return {
        "labkit": version("labkit"),
        "kernels": sources_digest(),
        "torch": version("torch"),
        "transformers": version("transformers"),
        "python": ".".join(platform.python_version_tuple()[:2]),
    }


def check_agreement(facts: Mapping[str, object], group: dist.ProcessGroup | None = None) -> None:
    """Compares `facts`, plain JSON data, between the ranks of `group` (None: all), before they compute anything.

    Every rank has to call it, or to fail within `joining`. Nested facts are compared one by one.

    Raises UserError on every rank, with the first differences and the ranks that have them; TypeError for facts that
    JSON can't hold; RankFailedError if a rank has failed before.
    """
    gathered = join(json.dumps(facts, sort_keys=True), group)
    if len(set(gathered)) == 1:
        return
    ranks = dist.get_process_group_ranks(group)  # of all processes, not positions in the group
    by_rank = {rank: dict(_leaves(json.loads(text))) for rank, text in zip(ranks, gathered, strict=True)}
    names = dict.fromkeys(name for leaves in by_rank.values() for name in leaves)
    differing = [name for name in names if len({leaves.get(name) for leaves in by_rank.values()}) > 1]
    lines = [_difference(name, by_rank) for name in differing[:SHOWN]]
    if (more := len(differing) - SHOWN) > 0:
        lines.append(f"and {more} more")
    raise UserError(
        f"the ranks do not agree on what they run: {'; '.join(lines)}. Start every rank with the same model, options "
        "and versions"
    )


def _leaves(facts: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in facts.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, json.dumps(value)


def _difference(name: str, by_rank: Mapping[int, Mapping[str, str]]) -> str:
    ranks_by_value: dict[str, list[int]] = {}
    for rank, leaves in by_rank.items():
        ranks_by_value.setdefault(leaves.get(name, NOT_GIVEN), []).append(rank)
    return f"{name} is {' and '.join(f'{value} on {_named(ranks)}' for value, ranks in ranks_by_value.items())}"


def _named(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
