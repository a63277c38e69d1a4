"""Providers of sides by name: peers, transformers' pipeline, and sides that read from the disk."""

from __future__ import annotations

import torch

from labkit.harness.compare.baselines import load_kernels
from labkit.harness.compare.from_disk import FROM_DISK, STREAMED
from labkit.harness.compare.hf_pipeline import HF_PIPELINE, HfPipeline
from labkit.harness.compare.peers.table import PEER_OF_SIDE
from labkit.harness.compare.provider import Provider

PROVIDED: dict[str, Provider] = {**FROM_DISK, HF_PIPELINE: HfPipeline(), **PEER_OF_SIDE}


def provider_of(side: str) -> Provider | None:
    """Provider of the side of this name; None for a side of `labkit.harness.compare.baselines`."""
    return PROVIDED[STREAMED] if side.startswith(f"{STREAMED}:") else PROVIDED.get(side)


def get_ready(side: str, dtype: torch.dtype) -> None:
    """Imports and compiles all that the side of this name needs besides its weights."""
    provider = provider_of(side)
    if provider is not None:
        provider.get_ready(side, dtype)
    else:
        load_kernels(side, dtype)
