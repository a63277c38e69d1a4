"""Who gives a side: a baseline of its own kind, a peer, transformers' pipeline, or one that reads from the disk."""

from __future__ import annotations

import torch

from labkit.harness.compare.baselines import load_kernels
from labkit.harness.compare.from_disk import FROM_DISK, STREAMED
from labkit.harness.compare.hf_pipeline import HF_PIPELINE, HfPipeline
from labkit.harness.compare.peers.table import PEER_OF_SIDE
from labkit.harness.compare.provider import Provider

PROVIDED: dict[str, Provider] = {**FROM_DISK, HF_PIPELINE: HfPipeline(), **PEER_OF_SIDE}


def provider_of(side: str) -> Provider | None:
    """Who loads the side of this name; None for one of `labkit.harness.compare.baselines`."""
    return PROVIDED[STREAMED] if side.startswith(f"{STREAMED}:") else PROVIDED.get(side)


def get_ready(side: str, dtype: torch.dtype) -> None:
    """Import, and compile, what the side of this name needs beside its weights."""
    provider = provider_of(side)
    if provider is not None:
        provider.get_ready(side, dtype)
    else:
        load_kernels(side, dtype)
